"""Weights of the graph: which stored numbers, scales and zero points are behind a product's second input.

A weight is an initializer behind any of Cast, Transpose and DequantizeLinear, in the patterns of graph/decoder.py. Its
stored codes and scales are taken as they are; only their place in memory changes. weight_tensors.py does that.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import numpy as np
import numpy.typing as npt
import onnx_ir as ir

from ....runtime.errors import BuildError
from ...scheme import FP4_GROUP
from . import packing
from .constants import initializer_array
from .plan_file import DType

Array = npt.NDArray[Any]

_DTYPES = {
    ir.DataType.FLOAT: DType.F32,
    ir.DataType.FLOAT16: DType.F16,
    ir.DataType.BFLOAT16: DType.BF16,
    ir.DataType.INT8: DType.I8,
    ir.DataType.INT4: DType.I4,
    ir.DataType.UINT4: DType.I4,
    ir.DataType.FLOAT8E4M3FN: DType.F8,
    ir.DataType.FLOAT4E2M1: DType.F4,
}


@dataclasses.dataclass(frozen=True)
class Scales:
    """What DequantizeLinear multiplies by.

    values : [] for the whole weight, [N] for one an output, [N, K / group_size] or, `swapped`, [K / group_size, N]
    zero : zero points in the form of `values`; None where they are 0
    outer : of fp4, the factor [] on all scales
    """

    values: ir.Value
    swapped: bool
    group_size: int = 0
    zero: ir.Value | None = None
    outer: ir.Value | None = None


@dataclasses.dataclass(frozen=True)
class Weight:
    """A matrix [rows N, cols K] of the graph.

    values : the initializer; `swapped` says that it holds [K, N]
    stored : type of its numbers
    grid : a scale []: the dequantized numbers are rounded to FP8 by it, and the plan holds those codes
    """

    values: ir.Value
    stored: DType
    rows: int
    cols: int
    swapped: bool
    scales: Scales | None = None
    grid: ir.Value | None = None

    @property
    def dtype(self) -> DType:
        """Return the type that the plan holds."""
        return self.stored if self.grid is None else DType.F8

    @property
    def group_size(self) -> int:
        """Return how many inputs share a scale of the plan; 0 = all."""
        return self.scales.group_size if self.scales is not None and self.grid is None else 0

    @property
    def has_zero_points(self) -> bool:
        """Return whether the plan holds zero points."""
        return self.scales is not None and self.scales.zero is not None and self.grid is None

    @property
    def scale_dtype(self) -> DType:
        """Return the type of the plan's scales: bfloat16 stays in integer weights, where the kernels know it."""
        if self.dtype is DType.F4:
            return DType.F8
        small = self.scales is not None and self.scales.values.dtype is ir.DataType.BFLOAT16
        return DType.BF16 if small and self.dtype in (DType.I8, DType.I4) else DType.F32

    @functools.cached_property
    def outer_scale(self) -> float:
        """Return the factor on all scales of fp4, read now: products of different ones stay apart; else 1."""
        if self.scales is None or self.scales.outer is None:
            return 1.0
        return float(initializer_array(self.scales.outer).reshape(-1)[0])


@dataclasses.dataclass
class _Steps:
    """The nodes between a weight's initializer and its use: those that change numbers, the last first."""

    nodes: list[tuple[ir.Node, bool]] = dataclasses.field(default_factory=list)  # and whether [K, N] there
    values: ir.Value | None = None
    swapped: bool = False  # whether the initializer holds [K, N]


def resolve_weight(value: ir.Value, *, matmul: bool) -> Weight:
    """Return the weight behind a MatMul's second input [K, N] (matmul) or a table [N, K]; nothing is read.

    raises BuildError naming what the cpu target does not take.
    """
    steps = _walk_back(value, matmul)
    assert steps.values is not None
    kinds = [node.op_type for node, _ in steps.nodes]
    if kinds == []:
        return _make_weight(steps, None, None)
    if kinds == ["DequantizeLinear"]:
        return _make_weight(steps, _scales_of(*steps.nodes[0]), None)
    if kinds == ["DequantizeLinear", "QuantizeLinear", "DequantizeLinear"]:
        grid = _fp8_grid(steps.nodes[0][0], steps.nodes[1][0])
        return _make_weight(steps, _scales_of(*steps.nodes[2]), grid)
    raise BuildError(
        f"weight {steps.values.name!r} goes through {', '.join(reversed(kinds))}; the cpu target takes one "
        "DequantizeLinear, or with a QuantizeLinear and DequantizeLinear behind it"
    )


def _walk_back(value: ir.Value, swapped: bool) -> _Steps:
    steps = _Steps(swapped=swapped)
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
            steps.swapped = not steps.swapped
        elif node.op_type in ("DequantizeLinear", "QuantizeLinear"):
            steps.nodes.append((node, steps.swapped))
        elif node.op_type != "Cast":
            raise BuildError(
                f"node {node.name!r}: {node.op_type} on a weight; the cpu target takes initializers behind "
                "Cast, DequantizeLinear and Transpose"
            )
        current = node.inputs[0]
    steps.values = current
    return steps


def _scales_of(node: ir.Node, swapped: bool) -> Scales:
    """Return the scales of a DequantizeLinear whose result is [K, N] (swapped) or [N, K]."""
    codes, scale = node.inputs[0], node.inputs[1]
    assert codes is not None and scale is not None
    outer = None
    producer = scale.producer()
    if producer is not None and producer.op_type == "Cast" and producer.inputs[0] is not None:
        scale = producer.inputs[0]
        producer = scale.producer()
    if producer is not None and producer.op_type == "DequantizeLinear":
        scale, outer = producer.inputs[0], producer.inputs[1]
        assert scale is not None and outer is not None
        zero_point(producer)
        if outer.shape is None or outer.shape.numpy() not in ((), (1,)):
            raise BuildError(
                f"node {producer.name!r}: its scale is no scalar; the cpu target takes one for all"
            )
    if not scale.is_initializer() or (outer is not None and not outer.is_initializer()):
        raise BuildError(
            f"node {node.name!r}: its scale is computed; the cpu target takes scales known at build"
        )
    one_each = scale.shape is not None and len(scale.shape) == 1 and scale.shape.numpy() != (1,)
    axis = node.attributes.get_int("axis", 1) % 2  # 0 = what lies first in memory
    over_inputs = axis == (0 if swapped else 1)
    block = node.attributes.get_int("block_size", 0)
    if one_each and over_inputs:
        raise BuildError(
            f"node {node.name!r}: one scale an input; the cpu target takes one an output, or groups"
        )
    if block and not over_inputs:
        raise BuildError(
            f"node {node.name!r}: groups of {block} along outputs; the cpu target takes groups along the inputs"
        )
    return Scales(scale, swapped, block, zero_point(node), outer)


def zero_point(node: ir.Node) -> ir.Value | None:
    """Return a node's zero points where they may be other than 0: UINT4's, which nobody has read.

    raises BuildError where another type has one that is not 0.
    """
    zero = node.inputs[2] if len(node.inputs) > 2 else None
    if zero is None:
        return None
    if zero.dtype is ir.DataType.UINT4:
        return zero
    if np.any(np.asarray(initializer_array(zero), np.float32) != 0):
        raise BuildError(
            f"node {node.name!r}: a zero point other than 0; the cpu target takes zero points of UINT4 alone"
        )
    return None


def _fp8_grid(dequantize: ir.Node, quantize: ir.Node) -> ir.Value:
    """Return the scale of a QuantizeLinear to FP8 and a DequantizeLinear back."""
    zero_point(dequantize), zero_point(quantize)
    scale, codes = quantize.inputs[1], quantize.outputs[0].dtype
    same = scale is dequantize.inputs[1] and scale is not None and scale.is_initializer()
    if not same or scale is None or scale.shape is None or len(scale.shape) != 0:
        raise BuildError(
            f"node {quantize.name!r}: rounds a weight by other scales than it is multiplied by again, or by more "
            "than one; the cpu target takes one scalar for both"
        )
    if codes is not ir.DataType.FLOAT8E4M3FN or not quantize.attributes.get_int("saturate", 1):
        raise BuildError(
            f"node {quantize.name!r}: rounds a weight to {codes}; saturated FLOAT8E4M3FN is wanted"
        )
    return scale


def _make_weight(steps: _Steps, scales: Scales | None, grid: ir.Value | None) -> Weight:
    """Return the weight once what it is made of fits together."""
    values = steps.values
    assert values is not None
    name, kind = values.name, values.dtype
    stored = _DTYPES.get(kind) if kind is not None else None
    if stored is None:
        takes = ", ".join(sorted(k.name for k in _DTYPES))
        raise BuildError(f"weight {name!r} is {kind}; the cpu target takes {takes}")
    shape = values.shape.numpy() if values.shape is not None else ()
    if len(shape) != 2:
        raise BuildError(f"weight {name!r} has shape {list(shape)}, a matrix is wanted")
    rows, cols = (shape[1], shape[0]) if steps.swapped else (shape[0], shape[1])
    if (stored in packing.SCALED) != (scales is not None):
        raise BuildError(f"weight {name!r} is {kind} {'with' if scales else 'without'} DequantizeLinear")
    if scales is not None:
        _check_scales(f"weight {name!r}", stored, scales, rows, cols)
        if (kind is ir.DataType.UINT4) != (scales.zero is not None):
            raise BuildError(
                f"weight {name!r} is {kind}; UINT4 and zero points go together on the cpu target"
            )
    return Weight(values, stored, rows, cols, steps.swapped, scales, grid)


def _check_scales(what: str, stored: DType, scales: Scales, rows: int, cols: int) -> None:
    block, step = scales.group_size, packing.K_STEP[packing.PACKED[stored]]
    if block and (cols % block or block % step):
        raise BuildError(
            f"{what}: groups of {block} along {cols} inputs; the cpu target takes multiples of {step} that divide them"
        )
    if (stored is DType.F4) != (scales.outer is not None) or (stored is DType.F4 and block != FP4_GROUP):
        raise BuildError(
            f"{what}: {stored.name} with groups of {block} and scales that are {'' if scales.outer else 'not '}scaled "
            f"themselves; the cpu target takes scaled scales with FP4 alone, which has groups of {FP4_GROUP} (NVFP4)"
        )
    wanted = (rows, cols // block) if block else (rows,)
    wanted = wanted[::-1] if block and scales.swapped else wanted
    got = scales.values.shape.numpy() if scales.values.shape is not None else None
    if got != wanted and (block or got not in ((), (1,))):
        raise BuildError(f"{what}: scales of shape {list(got or ())}, {list(wanted)} is wanted")
    if stored is DType.F4 and scales.values.dtype is not ir.DataType.FLOAT8E4M3FN:
        raise BuildError(f"{what}: FP4 scales are {scales.values.dtype}, FLOAT8E4M3FN is wanted")
    zero = scales.zero
    if zero is not None and (zero.shape is None or zero.shape.numpy() != got):
        raise BuildError(f"{what}: zero points are not of the scales' shape {list(got or ())}")
