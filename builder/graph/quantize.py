"""Weights to int8 and int4 with a scale for each output, or each group of its inputs, symmetric, in numpy.

w ~ q * scale. Rows are handled in slices, and the pages of a mapped file let go of, so that little more than the result
is held. Scales are first rounded to the type they are stored in and then used, so that no error hides between the two.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from ...runtime.errors import CheckpointError
from ..mapped import release_pages
from ..scheme import ROW

Array = npt.NDArray[Any]

SLICE_ELEMENTS = 1 << 18  # weights handled at a time: 1 MB as float32, which stays in a core's cache

# int4: a group's scale is max|w| / d for the d with the least squared error. 7 reaches every value; larger ones clip
# the peaks for finer steps between the others. Over normal weights the choice has 21 % (groups of 64) to 25 %
# (groups of 128) less squared error than 7 alone. Scales of either sign, with which the code -8 goes to the largest
# weight whatever its sign, have 11 % less still in groups of 32; TensorRT documents scales as positive.
INT4_DIVISORS = (7.0, 7.5, 8.0, 8.5, 9.0)

# int8: likewise. Steps that are a little larger than the peak needs put the other weights elsewhere between two steps;
# over normal weights the best of these has 15 % (groups of 32) to 6 % (groups of 128) less squared error than 127.
INT8_DIVISORS = (127.0, 126.0, 125.0, 124.0, 123.0)


def quantize_int8(
    w: Array, group: int = ROW, *, name: str = "weight", scale_dtype: np.dtype | type = np.float32
) -> tuple[Array, Array]:
    """Return (q, scale) with one positive scale for each row, or each `group` columns; q rounded half to even.

    w : (N, K) float32, float16 or bfloat16
    group : columns that share a scale, the best of INT8_DIVISORS; a divisor of K. ROW = all of a row, max|w| / 127
    returns : q (N, K) int8 -127..127, scale (N,) or (N, K // group) scale_dtype; where all are zeros it is 1
    raises : CheckpointError if a weight is NaN or infinite
    """
    if group == ROW:
        q, scale = _quantized(w, w.shape[1], INT8_DIVISORS[:1], (-127, 127), name, scale_dtype)
        return q, scale[:, 0]
    return _quantized(w, group, INT8_DIVISORS, (-127, 127), name, scale_dtype)


def quantize_int4(
    w: Array,
    group: int,
    *,
    signed: bool = False,
    name: str = "weight",
    scale_dtype: np.dtype | type = np.float32,
) -> tuple[Array, Array]:
    """Return (q, scale) with one scale for each `group` columns, the best of INT4_DIVISORS; q is -8..7.

    w : (N, K) float32, float16 or bfloat16; K is a multiple of group
    signed : scales may be negative
    returns : q (N, K) int8 holding int4 values, scale (N, K // group) scale_dtype; a group of zeros has scale 1
    raises : CheckpointError if a weight is NaN or infinite
    """
    divisors = INT4_DIVISORS + tuple(-d for d in INT4_DIVISORS) if signed else INT4_DIVISORS
    return _quantized(w, group, divisors, (-8, 7), name, scale_dtype)


def dequantize(q: Array, scale: Array) -> Array:
    """Return q * scale in float32: q (N, K), scale (N,) or (N, groups)."""
    if scale.ndim == 1:
        scale = scale[:, None]
    wide = np.repeat(scale.astype(np.float32), q.shape[1] // scale.shape[1], axis=1)
    return q.astype(np.float32) * wide


def _quantized(
    w: Array,
    group: int,
    divisors: tuple[float, ...],
    limits: tuple[int, int],
    name: str,
    scale_dtype: np.dtype | type,
) -> tuple[Array, Array]:
    """Return codes (N, K) within limits and scales (N, K // group), of each group the best of max|w| / divisor."""
    n, k = w.shape
    q = np.empty((n, k), np.int8)
    scale = np.empty((n, k // group), scale_dtype)
    for rows in _slices(w):
        part = _finite(w[rows], name).reshape(-1, k // group, group)
        peak = np.abs(part).max(axis=2)
        best = _try(part, peak / divisors[0], limits, scale_dtype)
        for divisor in divisors[1:]:
            found = _try(part, peak / divisor, limits, scale_dtype)
            better = found[2] < best[2]
            for kept, new in zip(best, found, strict=True):
                kept[better] = new[better]
        q[rows] = best[0].reshape(-1, k)
        scale[rows] = best[1]
        release_pages(w[rows])
    return q, scale


def _try(
    part: Array, scale: Array, limits: tuple[int, int], scale_dtype: np.dtype | type
) -> tuple[Array, Array, Array]:
    """Return (codes, stored scale, squared error of each group)."""
    step = _stored_scale(scale, scale_dtype)
    codes = part / step[:, :, None]
    np.rint(codes, out=codes)
    np.clip(codes, *limits, out=codes)
    codes = codes.astype(np.int8)
    error = codes * step[:, :, None] - part
    return codes, step, np.einsum("ngk,ngk->ng", error, error)


def _stored_scale(scale: Array, scale_dtype: np.dtype | type) -> Array:
    """Return the scales as they are stored, back in float32; those that vanish are 1 (their codes are 0)."""
    step = scale.astype(scale_dtype).astype(np.float32)
    step[step == 0.0] = 1.0
    return step


def _finite(part: Array, name: str) -> Array:
    """Return a float32 copy; CheckpointError if a weight is not finite."""
    part = np.array(part, dtype=np.float32)
    if not np.isfinite(part).all():
        bad = int(np.size(part) - np.count_nonzero(np.isfinite(part)))
        raise CheckpointError(
            f"{name} has {bad} or more weights that are NaN or infinite, so it cannot be quantized; "
            "the checkpoint is damaged or overflowed when it was converted: get it again"
        )
    return part


def _slices(w: Array) -> list[slice]:
    step = max(1, SLICE_ELEMENTS // max(1, w.shape[1]))
    return [slice(i, min(i + step, w.shape[0])) for i in range(0, w.shape[0], step)]
