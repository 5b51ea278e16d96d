# Tests of the scheduler, the KV cache, sampling and the C API.
plansmith_test(capi_test tests/runtime/capi_test.c tests/runtime/fake_executor.c)
