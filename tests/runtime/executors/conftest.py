"""The executor's tests without a GPU: a CUDA driver and a TensorRT of our own (fake_cuda.py, fake_tensorrt.py)."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

# Device kernels run in the interpreter, which is chosen when triton is first imported.
os.environ["TRITON_INTERPRET"] = "1"
sys.path.insert(0, str(Path(__file__).parent))

pytest.importorskip("cuda.bindings.driver", reason="needs cuda-python, see the extra gpu")


@pytest.fixture
def cuda() -> Iterator[object]:
    """Return a driver whose test must leave nothing behind."""
    from fake_cuda import FakeCuda

    made = FakeCuda()
    yield made
    assert made.problems() == []
