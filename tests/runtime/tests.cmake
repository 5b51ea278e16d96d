# C and C++ tests of the core. Each is one executable that returns non-zero on a failed CHECK (tests/runtime/check.h).
function(plansmith_test name)
  add_executable(${name} ${ARGN})
  target_link_libraries(${name} PRIVATE plansmith_core Threads::Threads)
  target_include_directories(${name} PRIVATE ${CMAKE_SOURCE_DIR}/runtime/src ${CMAKE_SOURCE_DIR}/tests/runtime)
  set_target_properties(${name} PROPERTIES LINKER_LANGUAGE CXX)
  add_test(NAME ${name} COMMAND ${name})
endfunction()

include(${CMAKE_CURRENT_LIST_DIR}/core_tests.cmake)
include(${CMAKE_CURRENT_LIST_DIR}/cpu/cpu_tests.cmake)
