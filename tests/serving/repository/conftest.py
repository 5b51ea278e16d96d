"""A tiny engine; `tmp_path` holds repositories."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from tiny_engines import build_tiny

sys.path.insert(0, str(Path(__file__).parent))


@pytest.fixture(scope="session")
def engine_dir(tiny_checkpoint: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the engine directory of the tiny llama; do not change the files."""
    return build_tiny(tiny_checkpoint("llama"), tmp_path_factory.mktemp("engine") / "llama")
