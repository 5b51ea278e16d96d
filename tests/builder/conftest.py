"""Puts this folder's helpers on the import path (`import quantized_weights`)."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
