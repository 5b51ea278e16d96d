"""Puts this folder's helpers on the import path (`import quantized_weights`), and compilers that are quick."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

sys.path.insert(0, str(Path(__file__).parent))

if TYPE_CHECKING:
    from fake_compilers import FakeKernelCompiler


@pytest.fixture
def fake_kernels(monkeypatch: pytest.MonkeyPatch) -> FakeKernelCompiler:
    """Stand in for the compiler of device kernels."""
    from fake_compilers import FakeKernelCompiler
    from plansmith.builder import device_kernels

    fake = FakeKernelCompiler()
    monkeypatch.setattr(device_kernels, "compile_tasks", fake)
    return fake


@pytest.fixture
def fake_rtx(
    monkeypatch: pytest.MonkeyPatch, fake_kernels: FakeKernelCompiler
) -> dict[str, Exception | None]:
    """Stand in for the GPU compiler, and for that of device kernels: name of a target -> error to fail with."""
    from fake_compilers import FakeRtx
    from plansmith.builder import compile

    fake = FakeRtx()
    monkeypatch.setattr(compile, "_compile_rtx", fake)
    return fake.errors
