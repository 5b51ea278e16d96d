"""Token ids to text."""

from plansmith.serving.triton.postprocessing import TritonPythonModel

__all__ = ["TritonPythonModel"]
