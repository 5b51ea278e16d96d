"""The TensorRT 11 targets: packed steps, attention by our plugins, compiled on a machine with the target's GPU."""
