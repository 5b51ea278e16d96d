"""What needs a CUDA device; every test here is marked gpu and skips where there is none."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from plansmith.runtime.errors import UnsupportedError
from plansmith.runtime.executors.cuda import Context, Driver, load_bindings

_TESTS = Path(__file__).parents[1]
sys.path[:0] = [str(_TESTS), str(_TESTS / "builder")]  # tiny models in every quantized form


@pytest.fixture(scope="session")
def context() -> Iterator[Context]:
    """Return the first GPU's context, current; skips where the driver has none."""
    try:
        driver = Driver(load_bindings())
        devices = driver.devices()
    except UnsupportedError as error:
        pytest.skip(str(error))
    opened = driver.open(devices[0])
    with opened.current():
        yield opened
    opened.close()
