"""The lowering to standard ONNX ops, run by ONNX Runtime on the CPU: what every other target is compared with."""

from __future__ import annotations

from .lower import lower
from .session import ReferenceSession

__all__ = ["ReferenceSession", "lower"]
