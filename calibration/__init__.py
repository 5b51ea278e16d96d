"""Calibration: checkpoints quantized with NVIDIA ModelOpt, and what that costs in quality."""
