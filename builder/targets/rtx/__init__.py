"""The TensorRT-RTX targets: the graph lowered to rectangular steps, compiled in a child process, no GPU needed."""
