# Tests of the scheduler, the KV cache, sampling and the C API.
plansmith_test(header_c_test tests/runtime/header_c_test.c)
plansmith_test(header_cc_test tests/runtime/header_cc_test.cc)
target_compile_options(header_c_test PRIVATE -pedantic -std=c11)
target_compile_options(header_cc_test PRIVATE -pedantic)

plansmith_test(kv_cache_test tests/runtime/kv_cache_test.cc)
plansmith_test(scheduler_test tests/runtime/scheduler_test.cc)
plansmith_test(sampler_test tests/runtime/sampler_test.cc)
plansmith_test(event_queue_test tests/runtime/event_queue_test.cc)

# The engine through the public API, over an executor whose logits depend on the tokens it finds in its KV blocks.
add_library(plansmith_fake_executor OBJECT tests/runtime/fake_executor.c)
target_include_directories(plansmith_fake_executor PUBLIC runtime/include tests/runtime)
foreach(test capi_test capi_invalid_test threads_test)
  plansmith_test(${test} tests/runtime/${test}.c)
  target_link_libraries(${test} PRIVATE plansmith_fake_executor m)
endforeach()
plansmith_test(engine_test tests/runtime/engine_test.cc)
target_link_libraries(engine_test PRIVATE plansmith_fake_executor m)
