"""Weights as tensors of the plan. Their numbers are fetched when a tensor is written, one weight at a time."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt
import onnx_ir as ir

from ....runtime.errors import BuildError
from ...mapped import release_pages
from ...scheme import FP8_MAX
from . import packing
from .constants import initializer_array
from .plan_file import DType, Layout, Tensor
from .weights import Scales, Weight

Array = npt.NDArray[Any]

_ROWS_AT_A_TIME = (
    256  # of a weight that is rounded to the FP8 grid; its float32 rows are a fraction of the weight
)


def packed_tensor(name: str, parts: list[Weight], layout: Layout, group_size: int) -> Tensor:
    """Return the tensor of weights under one another, in `layout`.

    group_size : of the tensor; parts with larger groups, or one scale an output, repeat theirs
    """
    first = parts[0]
    dtype, cols, rows = first.dtype, first.cols, sum(p.rows for p in parts)
    sections = {"data": packing.data_bytes(dtype, layout, rows, cols)}
    groups = cols // group_size if group_size else 1
    if dtype in packing.SCALED:
        sections["scales"] = packing.scales_bytes(first.scale_dtype, rows, groups)
    if first.has_zero_points:
        sections["zeros"] = packing.scales_bytes(DType.F32, rows, groups)

    def blocks() -> Iterator[tuple[str, Array]]:
        fetched = _Fetched(parts, groups)
        if layout is Layout.ROW_MAJOR:
            for block in packing.row_blocks(fetched.values(), cols, pad=False):
                yield "data", packing.as_stored(block, dtype)
            return
        zero_points = "zeros" in sections
        for block in packing.pack_matrix(fetched.values(), dtype, cols, zero_points=zero_points):
            yield "data", block
        for section in ("scales", "zeros"):
            if section in sections:
                yield section, packing.pack_scales(fetched.beside[section])

    kind = first.scale_dtype
    return Tensor(name, dtype, layout, rows, cols, group_size, sections, blocks, first.outer_scale, kind)


class _Fetched:
    """Numbers of weights, and what is beside them: both are read at once, so that a source unpacks a weight once."""

    def __init__(self, parts: list[Weight], groups: int) -> None:
        self._parts = parts
        self._groups = groups
        self.beside: dict[str, list[Array]] = {"scales": [], "zeros": []}

    def values(self) -> Iterator[Array]:
        """Yield each part's codes or floats [N, K]."""
        for part in self._parts:
            values = _oriented(part.values, part.swapped)
            if part.scales is not None:
                if part.grid is not None:
                    values = _grid_codes(part, values)
                self._add(part, part.scales)
            yield values
            release_pages(values)

    def _add(self, part: Weight, scales: Scales) -> None:
        if part.grid is not None:
            scales = Scales(part.grid, swapped=False)
        kind = packing.FLOATS[part.scale_dtype]
        for section, value in (("scales", scales.values), ("zeros", scales.zero)):
            if value is not None:
                array = _a_row_each(value, scales.swapped, part.rows)
                wide = np.repeat(array, self._groups // array.shape[1], axis=1)
                self.beside[section].append(wide.astype(kind if section == "scales" else np.float32))


def _oriented(value: ir.Value, swapped: bool) -> Array:
    """Return a matrix [N, K], a view where the source is one."""
    array = initializer_array(value)
    return array.T if swapped else array


def _a_row_each(value: ir.Value, swapped: bool, rows: int) -> Array:
    """Return scales or zero points as [N, groups]."""
    array = initializer_array(value)
    if array.ndim < 2:
        return np.broadcast_to(array.reshape(-1, 1), (rows, 1))
    return array.T if swapped else array


def _grid_codes(part: Weight, codes: Array) -> Array:
    """Return the FP8 codes [N, K] that QuantizeLinear makes of the dequantized weight: in float32, saturated."""
    assert part.scales is not None and part.grid is not None
    scales = part.scales
    steps = _a_row_each(scales.values, scales.swapped, part.rows).astype(np.float32)
    zeros = None
    if scales.zero is not None:
        zeros = _a_row_each(scales.zero, scales.swapped, part.rows).astype(np.float32)
    grid = initializer_array(part.grid).astype(np.float32)
    out = np.empty(codes.shape, ml_dtypes.float8_e4m3fn)
    group = part.cols // steps.shape[1]
    for first in range(0, part.rows, _ROWS_AT_A_TIME):
        rows = slice(first, first + _ROWS_AT_A_TIME)
        numbers = codes[rows].astype(np.float32).reshape(-1, steps.shape[1], group)
        if zeros is not None:
            numbers -= zeros[rows, :, None]
        numbers *= steps[rows, :, None]
        numbers /= grid
        out[rows] = np.clip(numbers, -FP8_MAX, FP8_MAX).reshape(-1, part.cols)
    return out


def vector_tensor(name: str, rows: int, cols: int, fetch: Callable[[], Array]) -> Tensor:
    """Return a row-major float32 tensor: a norm's weight, a bias, a table of cosines."""

    def blocks() -> Iterator[tuple[str, Array]]:
        array = np.asarray(fetch(), np.float32)
        if array.size != rows * cols:
            raise BuildError(f"{name!r} has {array.size} values, {rows} x {cols} are wanted")
        yield "data", array

    return Tensor(name, DType.F32, Layout.ROW_MAJOR, rows, cols, 0, {"data": rows * cols * 4}, blocks)
