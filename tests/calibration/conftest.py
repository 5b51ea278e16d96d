"""Tiny checkpoints quantized once a session, and texts to calibrate them with."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

WORDS = "the quick brown fox jumps over lazy dog while other animals stand there and think 12 7 ! ?"


@pytest.fixture(scope="session")
def texts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a .txt file of sixty short documents."""
    source, words = random.Random(7), WORDS.split()
    documents = (" ".join(source.choice(words) for _ in range(60)) for _ in range(60))
    path = tmp_path_factory.mktemp("texts") / "texts.txt"
    path.write_text("\n\n".join(documents), encoding="utf-8")
    return path


@pytest.fixture(scope="session")
def options(texts: Path) -> Callable[..., Any]:
    """Return a function that gives options of few short samples; its arguments go before them."""
    from plansmith.calibration.options import QuantizeOptions

    def make(**given: Any) -> Any:
        few = {"calib_data": str(texts), "calib_size": 8, "calib_length": 32}
        return QuantizeOptions(**{**few, **given})

    return make
