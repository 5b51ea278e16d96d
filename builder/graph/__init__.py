"""One ONNX graph for every target: its contract, its blocks, and how precision is written into it."""

from __future__ import annotations

from .decoder import build_graph
from .save import save
from .weights import weight_bytes

__all__ = ["build_graph", "save", "weight_bytes"]
