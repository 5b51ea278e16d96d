"""Runs a kernel on torch tensors: by the interpreter if TRITON_INTERPRET=1 was set before import, else on a GPU."""

from __future__ import annotations

import functools
import importlib
from collections.abc import Mapping
from typing import Any

from .kernel import Grid, Kernel


def launch(kernel: Kernel, grid: Grid, arguments: Mapping[str, Any]) -> None:
    """Run a kernel over a grid of programs, without waiting for a GPU.

    arguments : one for each name of kernel.signature: a tensor for a pointer, else a number
    raises : TypeError where names are missing or too many
    """
    if arguments.keys() != kernel.signature.keys():
        wrong = sorted(arguments.keys() ^ kernel.signature.keys())
        raise TypeError(
            f"{kernel.name} takes {', '.join(kernel.signature)}; wrong or missing: {', '.join(wrong)}"
        )
    if 0 in grid:
        return
    options = {
        "num_warps": kernel.num_warps,
        "num_stages": kernel.num_stages,
        "enable_fp_fusion": kernel.fp_fusion,
    }
    _function(kernel.function)[grid](**arguments, **kernel.constants, **options)


@functools.cache
def _function(path: str) -> Any:
    """Return the jitted function of Kernel.function."""
    module, name = path.split(":")
    return getattr(importlib.import_module(f".{module}", __package__), name)
