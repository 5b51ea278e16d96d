"""Executors of compiled GPU plans: TensorRT and TensorRT-RTX through one code path."""
