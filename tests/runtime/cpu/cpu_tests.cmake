# Tests of the CPU executor and its kernels.
