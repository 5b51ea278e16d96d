"""A quantized weight as the plain float32 matrix that it stands for."""

from __future__ import annotations

import dataclasses
from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt

from ...scheme import FP8_MAX, QuantizedWeight, Scheme

Array = npt.NDArray[Any]

_SLICE_ELEMENTS = 1 << 20  # weights handled at a time, 4 MB


def dequantize(weight: QuantizedWeight, scheme: Scheme, pre_scale: Array | None = None) -> Array:
    """Return (N, K) float32: codes less zero points, times scales, rounded to the grid, times pre_scale (K,)."""
    n, k = weight.codes.shape
    out = np.empty((n, k), np.float32)
    step = max(1, _SLICE_ELEMENTS // max(1, k))
    for first in range(0, n, step):
        part, rows = slice_rows(weight, first, first + step), out[first : first + step]
        rows[:] = part.codes
        if part.zero is not None:
            rows -= _wide(part.zero.astype(np.float32), k)
        scale = part.scale.astype(np.float32)
        if scheme.weight == "fp4":
            scale *= np.float32(part.scale_2)
        rows *= _wide(scale, k) if scale.ndim else scale
        if scheme.fp8_grid:
            rows[:] = to_fp8_grid(rows, part.scale_2)
        if pre_scale is not None:
            rows *= pre_scale
    return out


def to_fp8_grid(w: Array, scale: float) -> Array:
    """Return w rounded to multiples of scale that E4M3 holds, to nearest even, clipped at 448 * scale."""
    codes = np.clip(w / np.float32(scale), -FP8_MAX, FP8_MAX).astype(ml_dtypes.float8_e4m3fn)
    grid: Array = codes.astype(np.float32) * np.float32(scale)
    return grid


def slice_rows(weight: QuantizedWeight, first: int, last: int) -> QuantizedWeight:
    """Return the outputs first..last - 1 of a weight; a scale of the whole tensor stays as it is."""
    return dataclasses.replace(
        weight,
        codes=weight.codes[first:last],
        scale=weight.scale[first:last] if weight.scale.ndim else weight.scale,
        zero=None if weight.zero is None else weight.zero[first:last],
    )


def _wide(groups: Array, k: int) -> Array:
    """Return (N,) or (N, G) as it goes with (N, K)."""
    if groups.ndim == 1:
        return groups[:, None]
    return np.repeat(groups, k // groups.shape[1], axis=1)
