"""Text in, text out, by calls of the other models."""

from plansmith.serving.triton.bls import TritonPythonModel

__all__ = ["TritonPythonModel"]
