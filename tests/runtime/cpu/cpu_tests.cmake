# Tests of the CPU executor and its kernels.
foreach(name op_cost profile linear rows rounding attention executor fuse quiet_step lora plan thread_pool block_copy kv_codes)
  plansmith_test(cpu_${name}_test ${CMAKE_CURRENT_LIST_DIR}/${name}_test.cc)
endforeach()

if(CMAKE_SYSTEM_PROCESSOR MATCHES "x86_64|AMD64|amd64" AND CMAKE_NM)
  foreach(isa avx2 avx512vnni)
    add_test(NAME cpu_isa_leak_${isa}
      COMMAND ${CMAKE_COMMAND} -DNM=${CMAKE_NM}
        -DOBJECT=${CMAKE_BINARY_DIR}/CMakeFiles/plansmith_core.dir/runtime/src/cpu/kernels_${isa}.cc.o
        -P ${CMAKE_CURRENT_LIST_DIR}/isa_leak.cmake)
  endforeach()
endif()
