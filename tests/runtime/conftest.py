"""Puts tests/runtime on the import path, for the fake executor and the toy tokenizers, and shares tiny engines."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))


@pytest.fixture(scope="session")
def tiny_engine(
    tiny_checkpoint: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory
) -> Callable[[str, str], Path]:
    """Return (family, precision) -> engine directory of the tiny checkpoint; do not change the files."""
    from tiny_engines import build_tiny

    made: dict[tuple[str, str], Path] = {}

    def get(family: str, precision: str = "fp32") -> Path:
        key = (family, precision)
        if key not in made:
            out = tmp_path_factory.mktemp("engine") / f"{family}_{precision}"
            made[key] = build_tiny(tiny_checkpoint(family), out, precision)
        return made[key]

    return get
