"""What comes before a product: a vector of factors, and rounding, in memory or left to the product itself."""

from __future__ import annotations

import dataclasses
import math

import onnx_ir as ir

from ...graph import contract
from ...scheme import FP4_GROUP, ROW, WHOLE
from . import packing
from .constants import scalar_constant
from .plan_file import F8_STEP, DType, LinearInput, OpCode, RoundFormat
from .values import Activation, Rounding
from .walk import Walk, only_user
from .weights import Weight, zero_point

_FORMATS = {"int8": RoundFormat.INT8, "fp8": RoundFormat.F8, "fp4": RoundFormat.F4}
_CODES = {ir.DataType.INT8: RoundFormat.INT8, ir.DataType.FLOAT8E4M3FN: RoundFormat.F8}
_PRODUCTS_ROUND = {  # to, by one scale for all, by a row's, by groups'
    RoundFormat.INT8: (LinearInput.INT8_STATIC, LinearInput.INT8_ROW, LinearInput.INT8_GROUP),
    RoundFormat.F8: (LinearInput.F8_STATIC, LinearInput.F8_ROW, LinearInput.F8_GROUP),
}
_CONSUMERS = ("MatMul", "QuantizeLinear", contract.ROUND_INPUT)


@dataclasses.dataclass(frozen=True)
class ProductInput:
    """How LINEAR takes its input: its flag, its f[0], and the groups that the weight's tensor must have then."""

    kind: LinearInput
    scale: float
    group_size: int


def product_input(weight: Weight, rounding: Rounding | None) -> ProductInput | None:
    """Return how a product takes an input that is to be rounded so; None where it must be rounded in memory first.

    I8 and I4 without zero points meet int8 in integer arithmetic and F8 meets E4M3 codes, with scales as the kernels
    want them.
    """
    if rounding is None:
        return ProductInput(LinearInput.FLOAT, 0.0, weight.group_size)
    if rounding.format is not _meets(weight):
        return None
    static, row, group = _PRODUCTS_ROUND[rounding.format]
    if rounding.group == WHOLE:
        return ProductInput(static, rounding.scale, weight.group_size)
    if rounding.group == ROW:
        return ProductInput(row, 0.0, weight.group_size)
    # Larger groups of the weight, or one scale an output, are repeated; smaller ones cannot be joined.
    step = F8_STEP if weight.dtype is DType.F8 else packing.K_STEP[packing.PACKED[weight.dtype]]
    fits = weight.group_size == 0 or weight.group_size % rounding.group == 0
    if fits and rounding.group % step == 0:
        return ProductInput(group, 0.0, rounding.group)
    if rounding.group == weight.cols:
        return ProductInput(row, 0.0, weight.group_size)
    return None


def _meets(weight: Weight) -> RoundFormat | None:
    """Return what a weight's inputs can be rounded to by its products."""
    if weight.dtype in (DType.I8, DType.I4) and not weight.has_zero_points:
        return RoundFormat.INT8
    if weight.dtype is DType.F8 and (weight.group_size or weight.cols) % F8_STEP == 0:
        return RoundFormat.F8
    return None


def multiply(w: Walk, node: ir.Node) -> None:
    """Mul of an activation by a vector known at build."""
    index = next(n for n in (0, 1) if node.inputs[n] not in w.static)
    factors = node.inputs[1 - index]
    source = w.activation(node, index)
    width = source.storage.width
    shape = factors.shape.numpy() if factors is not None and factors.shape is not None else ()
    if factors is None or shape not in ((width,), (1, width)) or source.last_dim != width:
        raise w.error(node, f"factors of shape {list(shape)} on {width} columns; one a column is wanted")
    out = node.outputs[0]
    before = None
    if any(use.node.op_type in _CONSUMERS for use in out.uses()):
        before = source.before or node.inputs[index]
    in_place = before is None and w.in_place(source.storage)
    storage = source.storage if in_place else w.new(source.storage.rows, width)
    tensor = w.pool.vector(factors, 1, width)
    w.emit(OpCode.MUL_VECTOR, node.name, [source.ref], storage.ref, tensors=[tensor, -1], i=[width])
    w.bind(out, Activation(storage, source.dims, before))


def round_input(w: Walk, node: ir.Node) -> None:
    """plansmith::RoundInput: scales taken from the values themselves, but for the outer one of FP4."""
    kind, group = node.attributes.get_string("format", ""), node.attributes.get_int("group", ROW)
    found = _FORMATS.get(kind)
    if found is None or group < 0:
        raise w.error(
            node, f"rounds to {kind!r} in groups of {group}; int8, fp8 and fp4 are known, groups from 0 up"
        )
    if (found is RoundFormat.F4) != (group == FP4_GROUP and len(node.inputs) == 2):
        raise w.error(
            node,
            f"rounds to {kind} in groups of {group} with {len(node.inputs) - 1} scales; FP4 has groups "
            f"of {FP4_GROUP} and a scale, the others have none",
        )
    scale = _scale(w, node) if found is RoundFormat.F4 else 1.0
    _round(w, node, node.outputs[0], Rounding(found, group, scale))


def quantize(w: Walk, node: ir.Node) -> None:
    """QuantizeLinear of an activation by a scalar, and the DequantizeLinear behind it."""
    back = only_user(node.outputs[0])
    if back is None or back.op_type != "DequantizeLinear" or back.inputs[0] is not node.outputs[0]:
        raise w.error(
            node, "the cpu target takes QuantizeLinear of activations with one DequantizeLinear behind it"
        )
    found = _CODES.get(node.outputs[0].dtype or ir.DataType.UNDEFINED)
    if found is None or not node.attributes.get_int("saturate", 1):
        raise w.error(node, f"rounds to {node.outputs[0].dtype}; saturated INT8 and FLOAT8E4M3FN are known")
    scale = _scale(w, node)
    if scalar_constant(back.inputs[1]) != scale:
        raise w.error(back, f"multiplies by another scale than the {scale} that {node.name!r} divides by")
    if any(zero_point(n) is not None for n in (node, back)):
        raise w.error(node, "has a zero point; the cpu target rounds inputs symmetrically")
    w.fused.add(back)
    _round(w, node, back.outputs[0], Rounding(found, WHOLE, scale))


def _scale(w: Walk, node: ir.Node) -> float:
    """Return a node's second input, a positive scalar known at build."""
    scale = scalar_constant(node.inputs[1]) if node.inputs[1] in w.static else None
    if scale is None or not 0 < scale < math.inf:
        raise w.error(node, f"its scale is {scale}; one positive number known at build is wanted")
    return scale


def _round(w: Walk, node: ir.Node, out: ir.Value, rounding: Rounding) -> None:
    """Bind a rounded value: the products that read it round it themselves where all of them can."""
    source = w.activation(node, 0)
    width = source.storage.width
    if source.last_dim != width or (rounding.group > 0 and width % rounding.group):
        raise w.error(
            node, f"rounds {source.last_dim} columns in groups of {rounding.group}, which must divide them"
        )
    before = source.before or node.inputs[0]
    if _products_round(w, out, rounding):
        w.bind(out, Activation(source.storage, source.dims, before, rounding))
        return
    # What adapters take must stay; a copy that was made to be multiplied need not.
    in_place = source.before is not None and w.in_place(source.storage)
    storage = source.storage if in_place else w.new(source.storage.rows, width)
    w.emit(
        OpCode.ROUND_INPUT,
        node.name,
        [source.ref],
        storage.ref,
        i=[width, rounding.format, rounding.group],
        f=[rounding.scale],
    )
    w.bind(out, Activation(storage, source.dims, before))


def _products_round(w: Walk, value: ir.Value, rounding: Rounding) -> bool:
    """Return whether all that read a value are products that can round it themselves."""
    users = [use.node for use in value.uses()]
    return not value.is_graph_output() and all(
        user.op_type == "MatMul"
        and user.inputs[0] is value
        and user.inputs[1] in w.static
        and product_input(w.weight(user), rounding) is not None
        for user in users
    )
