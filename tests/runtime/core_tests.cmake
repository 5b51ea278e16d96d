# Tests of the scheduler, the KV cache, sampling and the C API.
plansmith_test(header_c_test tests/runtime/header_c_test.c)
plansmith_test(header_cc_test tests/runtime/header_cc_test.cc)
target_compile_options(header_c_test PRIVATE -pedantic)
target_compile_options(header_cc_test PRIVATE -pedantic)

plansmith_test(kv_cache_test tests/runtime/kv_cache_test.cc)
plansmith_test(kv_events_test tests/runtime/kv_events_test.cc)
plansmith_test(kv_eviction_test tests/runtime/kv_eviction_test.cc)
plansmith_test(kv_property_test tests/runtime/kv_property_test.cc)
plansmith_test(kv_reuse_test tests/runtime/kv_reuse_test.cc)
plansmith_test(prefix_tree_test tests/runtime/prefix_tree_test.cc)
plansmith_test(scheduler_test tests/runtime/scheduler_test.cc)
plansmith_test(scheduler_property_test tests/runtime/scheduler_property_test.cc)
plansmith_test(waiting_queue_test tests/runtime/waiting_queue_test.cc)
plansmith_test(sampler_test tests/runtime/sampler_test.cc)
plansmith_test(beam_search_test tests/runtime/beam_search_test.cc)
plansmith_test(event_queue_test tests/runtime/event_queue_test.cc)
plansmith_test(simulated_test tests/runtime/simulated_test.cc)
plansmith_test(steady_test tests/runtime/steady_test.cc)
plansmith_test(fuzz_test tests/runtime/fuzz_test.cc)
plansmith_test(step_cost_test tests/runtime/step_cost_test.cc)
plansmith_test(ngram_test tests/runtime/ngram_test.cc)
plansmith_test(draft_length_test tests/runtime/draft_length_test.cc)
plansmith_test(caller_draft_test tests/runtime/caller_draft_test.cc)
plansmith_test(repeat_ngram_test tests/runtime/repeat_ngram_test.cc)
plansmith_test(speculator_test tests/runtime/speculator_test.cc)
plansmith_test(speculation_distribution_test tests/runtime/speculation_distribution_test.cc)

# The engine through the public API, over an executor whose logits depend on the tokens it finds in its KV blocks.
add_library(plansmith_fake_executor OBJECT tests/runtime/fake_executor.c)
target_include_directories(plansmith_fake_executor PUBLIC runtime/include tests/runtime)
target_compile_options(plansmith_fake_executor PRIVATE -pedantic)
foreach(test capi_test capi_invalid_test threads_test)
  plansmith_test(${test} tests/runtime/${test}.c)
  target_compile_options(${test} PRIVATE -pedantic)
  target_link_libraries(${test} PRIVATE plansmith_fake_executor m)
endforeach()
plansmith_test(engine_test tests/runtime/engine_test.cc)
target_link_libraries(engine_test PRIVATE plansmith_fake_executor m)
foreach(test halves_test halves_events_test halves_memory_test)
  plansmith_test(${test} tests/runtime/${test}.cc)
  target_link_libraries(${test} PRIVATE plansmith_fake_executor m)
endforeach()
plansmith_test(sampling_rows_test tests/runtime/sampling_rows_test.cc)

plansmith_test(guide_test tests/runtime/guide_test.cc)
plansmith_test(guide_engine_test tests/runtime/guide_engine_test.cc)
target_link_libraries(guide_engine_test PRIVATE plansmith_fake_executor m)

# The same C program against the shared library: it exports what the header declares and lacks nothing.
add_executable(capi_shared_test tests/runtime/capi_test.c)
target_link_libraries(capi_shared_test PRIVATE plansmith plansmith_fake_executor m)
add_test(NAME capi_shared_test COMMAND capi_shared_test)

if(CMAKE_NM AND UNIX AND NOT APPLE)
  add_test(NAME exports_test
    COMMAND ${CMAKE_COMMAND} -DNM=${CMAKE_NM} -DLIBRARY=$<TARGET_FILE:plansmith> -DCDEF=${PLANSMITH_CDEF}
      -P ${CMAKE_CURRENT_LIST_DIR}/exports.cmake)
  set_tests_properties(exports_test PROPERTIES LABELS core)
endif()

# A finding of a sanitizer ends the test, also where the build would let it go on.
foreach(test header_c_test header_cc_test kv_cache_test kv_events_test kv_eviction_test
        kv_property_test kv_reuse_test prefix_tree_test
        scheduler_test scheduler_property_test waiting_queue_test sampler_test beam_search_test event_queue_test capi_test
        capi_invalid_test threads_test engine_test halves_test halves_events_test halves_memory_test sampling_rows_test simulated_test fuzz_test steady_test step_cost_test
        ngram_test repeat_ngram_test draft_length_test speculator_test caller_draft_test speculation_distribution_test guide_test guide_engine_test
        capi_shared_test)
  set_tests_properties(${test} PROPERTIES LABELS core ENVIRONMENT
    "UBSAN_OPTIONS=halt_on_error=1:print_stacktrace=1;TSAN_OPTIONS=halt_on_error=1")
endforeach()
