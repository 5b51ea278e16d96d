"""Every variant of every kernel: what `make kernels` compiles and reports."""

from __future__ import annotations

import importlib
import inspect
import pathlib

from .kernel import Kernel

_HERE = pathlib.Path(__file__).parent


def ops() -> list[str]:
    """Return the operators that have kernels: the folders with a spec.py."""
    return sorted(path.parent.name for path in _HERE.glob("*/spec.py"))


def catalog(sm: int, op: str | None = None) -> list[Kernel]:
    """Return the kernels that run on a compute capability, of one operator or of all.

    sm : 89 for 8.9. Tiles are chosen by it, so the names for two SMs can differ
    """
    found: list[Kernel] = []
    for name in ops() if op is None else [op]:
        spec = importlib.import_module(f".{name}.spec", __package__)
        by_sm = inspect.signature(
            spec.catalog
        ).parameters  # an operator whose tiles depend on the SM is asked for it
        kernels = spec.catalog(sm) if by_sm else spec.catalog()
        found += [kernel for kernel in kernels if kernel.min_sm <= sm]
    return found
