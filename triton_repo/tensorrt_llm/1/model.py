"""The engine."""

from plansmith.serving.triton.engine_model import TritonPythonModel

__all__ = ["TritonPythonModel"]
