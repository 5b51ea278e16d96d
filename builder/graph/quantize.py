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
# (groups of 128) less squared error than 7 alone. Letting the largest weight take the code -8 with a scale of either
# sign would gain another tenth, but TensorRT documents scales as positive.
INT4_DIVISORS = (7.0, 7.5, 8.0, 8.5, 9.0)


def quantize_int8(
    w: Array, group: int = ROW, *, name: str = "weight", scale_dtype: np.dtype | type = np.float32
) -> tuple[Array, Array]:
    """Return (q, scale) with scale = max|w| / 127 of each row or group, q rounded half to even, -127..127.

    w : (N, K) float32, float16 or bfloat16
    group : columns that share a scale, a divisor of K; ROW = all
    name : what an error calls the tensor
    returns : q (N, K) int8, scale (N,) or (N, K // group) scale_dtype; where all are zeros it is 1
    raises : CheckpointError if a weight is NaN or infinite
    """
    n, k = w.shape
    q = np.empty((n, k), np.int8)
    scale = np.empty((n, 1 if group == ROW else k // group), scale_dtype)
    for rows in _slices(w):
        part = _finite(w[rows], name).reshape(-1, scale.shape[1], k // scale.shape[1])
        step = _stored_scale(np.abs(part).max(axis=2) / 127.0, scale_dtype)
        np.divide(part, step[:, :, None], out=part)
        np.rint(part, out=part)
        np.clip(part, -127, 127, out=part)
        q[rows] = part.reshape(-1, k)
        scale[rows] = step
        release_pages(w[rows])
    return q, scale[:, 0] if group == ROW else scale


def quantize_int4(
    w: Array, group: int, *, name: str = "weight", scale_dtype: np.dtype | type = np.float32
) -> tuple[Array, Array]:
    """Return (q, scale) with one positive scale for each `group` columns, the best of INT4_DIVISORS; q is -8..7.

    w : (N, K) float32, float16 or bfloat16; K is a multiple of group
    returns : q (N, K) int8 holding int4 values, scale (N, K // group) scale_dtype; a group of zeros has scale 1
    raises : CheckpointError if a weight is NaN or infinite
    """
    n, k = w.shape
    q = np.empty((n, k), np.int8)
    scale = np.empty((n, k // group), scale_dtype)
    for rows in _slices(w):
        part = _finite(w[rows], name).reshape(-1, k // group, group)
        peak = np.abs(part).max(axis=2)
        best_codes, best_step, best_error = _try_int4(part, peak / INT4_DIVISORS[0], scale_dtype)
        for divisor in INT4_DIVISORS[1:]:
            codes, step, error = _try_int4(part, peak / divisor, scale_dtype)
            better = error < best_error
            best_codes[better] = codes[better]
            best_step[better] = step[better]
            best_error[better] = error[better]
        q[rows] = best_codes.reshape(-1, k)
        scale[rows] = best_step
        release_pages(w[rows])
    return q, scale


def dequantize(q: Array, scale: Array) -> Array:
    """Return q * scale in float32: q (N, K), scale (N,) or (N, groups)."""
    if scale.ndim == 1:
        scale = scale[:, None]
    wide = np.repeat(scale.astype(np.float32), q.shape[1] // scale.shape[1], axis=1)
    return q.astype(np.float32) * wide


def _try_int4(part: Array, scale: Array, scale_dtype: np.dtype | type) -> tuple[Array, Array, Array]:
    """Return (codes, stored scale, squared error of each group)."""
    step = _stored_scale(scale, scale_dtype)
    codes = part / step[:, :, None]
    np.rint(codes, out=codes)
    np.clip(codes, -8, 7, out=codes)
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
