"""Text to token ids."""

from plansmith.serving.triton.preprocessing import TritonPythonModel

__all__ = ["TritonPythonModel"]
