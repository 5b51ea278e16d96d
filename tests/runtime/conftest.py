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
    """Return (family, precision) -> engine directory of the tiny checkpoint; do not change the files.

    Precisions "fp8_kv" and "int8_kv" are float32 with such pools, a plan alone.
    """
    from tiny_engines import build_tiny, build_tiny_kv

    made: dict[tuple[str, str], Path] = {}

    def get(family: str, precision: str = "fp32") -> Path:
        key = (family, precision)
        if key not in made:
            out = tmp_path_factory.mktemp("engine") / f"{family}_{precision}"
            if precision.endswith("_kv"):
                made[key] = build_tiny_kv(tiny_checkpoint(family), out, precision.removesuffix("_kv"))
            else:
                made[key] = build_tiny(tiny_checkpoint(family), out, precision)
        return made[key]

    return get
