"""Shares the small models and numpy layers of the other TensorRT's tests."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parents[1] / "rtx")]
