"""Weights as arrays: checked, converted and transposed with little more in memory than the result."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt

from ...runtime.errors import CheckpointError
from ..mapped import release_pages

Array = npt.NDArray[Any]

_SLICE_ELEMENTS = 1 << 18  # checked at a time


def check_finite(w: Array, name: str) -> None:
    """Raise CheckpointError if a weight is NaN or infinite."""
    for part in _slices(w):
        if not _all_finite(part):
            raise CheckpointError(
                f"{name} has weights that are NaN or infinite; the checkpoint is damaged or overflowed when it was "
                "converted: get it again"
            )
        release_pages(part)


def _slices(w: Array) -> Iterator[Array]:
    step = max(1, _SLICE_ELEMENTS // max(1, w[:1].size))
    return (w[i : i + step] for i in range(0, len(w), step))


def _all_finite(part: Array) -> bool:
    if part.itemsize != 2:
        return bool(np.isfinite(part).all())
    # numpy's own is 5 times slower on these
    exponent = np.uint16(0x7F80 if part.dtype == ml_dtypes.bfloat16 else 0x7C00)
    return bool(((part.view(np.uint16) & exponent) != exponent).all())


def transposed(w: Array) -> Array:
    """Return a matrix [out, in] as a contiguous [in, out], a cache line of each output row at a time (4 x numpy's)."""
    out = np.empty(w.shape[::-1], w.dtype)
    stripe = max(1, 64 // w.itemsize)
    for row in range(0, w.shape[0], stripe):
        out[:, row : row + stripe] = w[row : row + stripe].T
    return out


def converted(w: Array, dtype: np.dtype[Any], name: str) -> Array:
    """Return a weight in another float type, itself where it has that; CheckpointError beyond float16's range."""
    if w.dtype == dtype:
        return w
    with np.errstate(over="ignore"):
        out: Array = w.astype(dtype)
    release_pages(w)
    if dtype == np.float16 and not all(map(_all_finite, _slices(out))):
        raise CheckpointError(
            f"{name} has weights beyond float16's largest number, 65504; build with --precision bf16"
        )
    return out
