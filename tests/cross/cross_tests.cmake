# What `make test-cross` builds and runs, as ctest's label "cross": the tests of the NEON kernels.
add_custom_target(cross_tests)
foreach(name linear linear_codes rows rounding attention kv_codes candidates)
  add_dependencies(cross_tests cpu_${name}_test)
  set_tests_properties(cpu_${name}_test PROPERTIES LABELS cross
    ENVIRONMENT "PLANSMITH_TEST_ISA=neon;PLANSMITH_TEST_SHORT=1")
endforeach()
set_tests_properties(cpu_isa_leak_neon PROPERTIES LABELS cross)

# Without dot products, and without a wish, it is the portable kernels.
add_test(NAME cross_neon_needs_dot_products
  COMMAND ${CMAKE_CROSSCOMPILING_EMULATOR} --no-dotprod $<TARGET_FILE:cpu_rounding_test>)
set_tests_properties(cross_neon_needs_dot_products PROPERTIES LABELS cross FAIL_REGULAR_EXPRESSION "neon")
add_test(NAME cross_neon_is_chosen COMMAND cpu_rounding_test)
set_tests_properties(cross_neon_is_chosen PROPERTIES LABELS cross PASS_REGULAR_EXPRESSION "neon: ok")
