# Tests of the scheduler, the KV cache, sampling and the C API.
