"""Weights of the graph as tensors of the plan.

A weight is an initializer behind any of Cast, DequantizeLinear and Transpose. Its stored integers and scales are taken
as they are; only their place in memory changes. Values are fetched when the tensor is written, one at a time.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt
import onnx_ir as ir

from ....runtime.errors import BuildError
from ...mapped import release_pages
from . import packing
from .plan_file import DType, Layout, Tensor

Array = npt.NDArray[Any]

_DTYPES = {
    ir.DataType.FLOAT: DType.F32,
    ir.DataType.FLOAT16: DType.F32,  # the plan has no float16; float32 holds every float16 exactly
    ir.DataType.BFLOAT16: DType.BF16,
    ir.DataType.INT8: DType.I8,
    ir.DataType.INT4: DType.I4,
}


@dataclasses.dataclass(frozen=True)
class Weight:
    """A matrix [rows N, cols K] of the graph.

    values, scale : initializers; `swapped` says that they hold [K, N] and [groups, N]
    group_size : inputs that share a scale, 0 = all
    """

    values: ir.Value
    dtype: DType
    rows: int
    cols: int
    swapped: bool
    scale: ir.Value | None = None
    scale_swapped: bool = False
    group_size: int = 0

    def fetch(self) -> Array:
        """Return the stored values as [N, K], a view where the source is one."""
        values = initializer_array(self.values)
        return values.T if self.swapped else values

    def fetch_scales(self) -> Array:
        """Return float32 [N, groups]."""
        assert self.scale is not None
        scales = np.asarray(initializer_array(self.scale), np.float32)
        if scales.ndim < 2:
            return np.broadcast_to(scales.reshape(-1, 1), (self.rows, 1))
        return scales.T if self.scale_swapped else scales


def initializer_array(value: ir.Value) -> Array:
    """Return an initializer's values, fetched now."""
    if value.const_value is None:
        raise BuildError(f"initializer {value.name!r} has no values; give the graph a weight source")
    return value.const_value.numpy()


def small_constant(value: ir.Value | None) -> Array | None:
    """Return the values of a constant of up to 16 elements, floats as float32; None when it is none."""
    while value is not None and value.const_value is None:
        node = value.producer()
        if node is None or node.op_type != "Cast":
            return None
        value = node.inputs[0]
    if value is None or value.const_value is None or value.const_value.size > 16:
        return None
    array = value.const_value.numpy()
    return array.astype(np.float32) if array.dtype in (np.float16, ml_dtypes.bfloat16, np.float64) else array


def resolve_weight(value: ir.Value, *, matmul: bool) -> Weight:
    """Return the weight behind a MatMul's second input [K, N] (matmul) or a table [N, K].

    raises BuildError naming what the cpu target does not take.
    """
    swapped = False  # relative to `value`
    scale: ir.Value | None = None
    axis, block, scale_swapped = 0, 0, False
    current = value
    while not current.is_initializer():
        node = current.producer()
        if node is None or not node.inputs or node.inputs[0] is None:
            raise BuildError(f"{value.name!r} is not a weight; the cpu target takes weights known at build")
        if node.op_type == "Transpose":
            perm = node.attributes.get("perm")
            if perm is not None and tuple(perm.as_ints()) != (1, 0):
                raise BuildError(
                    f"node {node.name!r}: Transpose of a weight by {perm.as_ints()}, [1, 0] is wanted"
                )
            swapped = not swapped
        elif node.op_type == "DequantizeLinear":
            _check_zero_point(node)
            scale, scale_swapped = node.inputs[1], swapped
            axis = node.attributes.get_int("axis", 1) % 2 ^ swapped
            block = node.attributes.get_int("block_size", 0)
        elif node.op_type != "Cast":
            raise BuildError(
                f"node {node.name!r}: {node.op_type} on a weight; the cpu target takes initializers behind "
                "Cast, DequantizeLinear and Transpose"
            )
        current = node.inputs[0]
    return _make_weight(current, swapped ^ matmul, scale, axis ^ int(matmul), block, scale_swapped ^ matmul)


def _check_zero_point(node: ir.Node) -> None:
    zero = node.inputs[2] if len(node.inputs) > 2 else None
    if zero is not None and np.any(np.asarray(initializer_array(zero), np.float32) != 0):
        raise BuildError(
            f"node {node.name!r}: a zero point other than 0; the cpu target takes symmetric weights"
        )


def _make_weight(
    values: ir.Value, swapped: bool, scale: ir.Value | None, axis: int, block: int, scale_swapped: bool
) -> Weight:
    """Return the checked weight; `axis` is the scale's in [N, K]."""
    name, kind = values.name, values.dtype
    dtype = _DTYPES.get(kind) if kind is not None else None
    if dtype is None:
        raise BuildError(
            f"weight {name!r} is {kind}; the cpu target takes FLOAT, FLOAT16, BFLOAT16, INT8 and INT4"
        )
    shape = values.shape.numpy() if values.shape is not None else ()
    if len(shape) != 2:
        raise BuildError(f"weight {name!r} has shape {list(shape)}, a matrix is wanted")
    rows, cols = (shape[1], shape[0]) if swapped else (shape[0], shape[1])
    integer = dtype in (DType.I8, DType.I4)
    if integer != (scale is not None):
        raise BuildError(f"weight {name!r} is {kind} {'without' if integer else 'with'} DequantizeLinear")
    if integer and block and (axis != 1 or cols % block or block % 8):
        raise BuildError(
            f"weight {name!r}: groups of {block} along {'inputs' if axis else 'outputs'} of {rows} x {cols}; the cpu "
            "target takes groups along the inputs, a multiple of 8 that divides them"
        )
    if integer and not block and axis != 0:
        raise BuildError(
            f"weight {name!r}: one scale an input; the cpu target takes one an output, or groups"
        )
    return Weight(values, dtype, rows, cols, swapped, scale, scale_swapped, block)


def packed_tensor(name: str, parts: list[Weight], layout: Layout, group_size: int) -> Tensor:
    """Return the tensor of weights under one another, in `layout`.

    group_size : of the tensor; when the parts have one scale an output it repeats it for each group
    """
    first = parts[0]
    rows, cols = sum(p.rows for p in parts), first.cols
    sections = {"data": packing.data_bytes(first.dtype, layout, rows, cols)}
    groups = cols // group_size if group_size else 1
    integer = first.scale is not None
    if integer:
        sections["scales"] = packing.scales_bytes(rows, groups)

    def blocks() -> Iterator[tuple[str, Array]]:
        if layout is Layout.ROW_MAJOR:
            for block in packing.row_blocks(_fetch_all(parts, []), cols, pad=False):
                yield "data", packing.as_stored(block, first.dtype)
            return
        scales: list[Array] = []
        for block in packing.pack_matrix(_fetch_all(parts, scales), first.dtype, cols):
            yield "data", block
        if integer:
            yield "scales", packing.pack_scales(np.broadcast_to(s, (len(s), groups)) for s in scales)

    return Tensor(name, first.dtype, layout, rows, cols, group_size, sections, blocks)


def _fetch_all(parts: list[Weight], scales: list[Array]) -> Iterator[Array]:
    """Yield each part's values and put its scales into `scales` at once: a source quantizes a weight for both."""
    for part in parts:
        values = part.fetch()
        if part.scale is not None:
            scales.append(part.fetch_scales())
        yield values
        release_pages(values)


def vector_tensor(name: str, rows: int, cols: int, fetch: Callable[[], Array]) -> Tensor:
    """Return a row-major float32 tensor: a norm's weight, a bias, a table of cosines."""

    def blocks() -> Iterator[tuple[str, Array]]:
        array = np.asarray(fetch(), np.float32)
        if array.size != rows * cols:
            raise BuildError(f"{name!r} has {array.size} values, {rows} x {cols} are wanted")
        yield "data", array

    return Tensor(name, DType.F32, Layout.ROW_MAJOR, rows, cols, 0, {"data": rows * cols * 4}, blocks)
