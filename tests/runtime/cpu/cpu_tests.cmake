# Tests of the CPU executor and its kernels.
foreach(name candidates control_groups op_cost profile linear linear_codes rows rounding attention executor fuse quiet_step work_share lora plan plan_memory thread_pool block_copy kv_codes)
  plansmith_test(cpu_${name}_test ${CMAKE_CURRENT_LIST_DIR}/${name}_test.cc)
endforeach()

if(PLANSMITH_COMPILER_HAS_AMX AND CMAKE_SYSTEM_NAME STREQUAL "Linux")
  plansmith_test(cpu_amx_test ${CMAKE_CURRENT_LIST_DIR}/amx_test.cc)
endif()

if(CMAKE_NM)
  # Each file that is compiled for an instruction set; CMakeLists.txt says which there are.
  get_target_property(sources plansmith_core SOURCES)
  foreach(isa amx avx2 avx512bf16 avx512vnni neon)
    if("runtime/src/cpu/kernels_${isa}.cc" IN_LIST sources)
      add_test(NAME cpu_isa_leak_${isa}
        COMMAND ${CMAKE_COMMAND} -DNM=${CMAKE_NM}
          -DOBJECT=${CMAKE_BINARY_DIR}/CMakeFiles/plansmith_core.dir/runtime/src/cpu/kernels_${isa}.cc.o
          -P ${CMAKE_CURRENT_LIST_DIR}/isa_leak.cmake)
    endif()
  endforeach()
endif()
if(CMAKE_CROSSCOMPILING AND CMAKE_SYSTEM_PROCESSOR STREQUAL "aarch64")
  include(${CMAKE_SOURCE_DIR}/tests/cross/cross_tests.cmake)
endif()
