"""Puts tests/runtime on the import path, so that tests can share the fake executor and the toy tokenizers."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
