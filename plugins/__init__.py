"""The operators that are ours: for each a folder with a reference and the kernels of its targets."""
