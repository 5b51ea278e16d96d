# What `make test-cross` builds and runs: the tests of kernels, each on one thread, as ctest's label "cross".
set(names linear rows rounding attention kv_codes)
add_custom_target(cross_tests)
foreach(name ${names})
  add_dependencies(cross_tests cpu_${name}_test)
  set_tests_properties(cpu_${name}_test PROPERTIES LABELS cross)
endforeach()
set_tests_properties(cpu_isa_leak_neon PROPERTIES LABELS cross)

# The tests above run what the processor has: here it is said what that is.
add_test(NAME cross_neon_is_chosen COMMAND cpu_rounding_test)
set_tests_properties(cross_neon_is_chosen PROPERTIES LABELS cross PASS_REGULAR_EXPRESSION "neon: ok")
add_test(NAME cross_neon_needs_dot_products
  COMMAND ${CMAKE_CROSSCOMPILING_EMULATOR} --no-dotprod $<TARGET_FILE:cpu_rounding_test>)
set_tests_properties(cross_neon_needs_dot_products PROPERTIES LABELS cross FAIL_REGULAR_EXPRESSION "neon")
