"""Scales of two-dimensional blocks as scales of each output's groups, which say the same."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from .module import Module

Array = npt.NDArray[Any]


def block_grid(module: Module, rows: int, columns: int) -> tuple[int, int]:
    """Return how many blocks a layer has: the last of the outputs may be cut off, inputs must divide."""
    return -(-module.rows // rows), module.groups(columns)


def by_output(scales: Array, block_rows: int, rows: int) -> Array:
    """Return (N, K / columns) of (ceil(N / block_rows), K / columns)."""
    return np.repeat(scales, block_rows, axis=0)[:rows]


def is_block(value: object) -> bool:
    """Return whether a JSON value is [rows, columns] of a block."""
    return (
        isinstance(value, list)
        and len(value) == 2
        and all(isinstance(one, int) and not isinstance(one, bool) and 0 < one < 1 << 24 for one in value)
    )
