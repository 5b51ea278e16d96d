"""Nodes that work element by element: sums, gated activations, scalars and soft caps."""

from __future__ import annotations

import onnx_ir as ir

from .inputs import multiply
from .plan_file import OpCode
from .values import Activation, Pending
from .walk import Walk, only_user

GLU_SILU, GLU_GELU_TANH, GLU_GELU_ERF = 0, 1, 2


def add(w: Walk, node: ir.Node) -> None:
    """Add of two activations, in place where one is not needed any more."""
    left, right = w.activation(node, 0), w.activation(node, 1)
    width = left.storage.width
    if width != right.storage.width:
        raise w.error(node, f"{width} columns plus {right.storage.width}; the cpu target adds equal shapes")
    out = next((a.storage for a in (left, right) if w.in_place(a.storage)), None)
    if out is None:
        out = w.new(left.storage.rows, width)
    w.emit(OpCode.ADD, node.name, [left.ref, right.ref], out.ref, i=[width])
    w.bind(node.outputs[0], Activation(out, left.dims))


def mul(w: Walk, node: ir.Node) -> None:
    """Mul by a constant, or one of the two Muls of a gated activation."""
    scalar = w.scalar_input(node)
    if scalar is not None:
        _scale(w, node, *scalar)
        return
    if any(value in w.static for value in node.inputs):
        multiply(w, node)
        return
    left, right = (w.find(v) for v in node.inputs[:2])
    for gate, other, index in ((left, right, 1), (right, left, 0)):
        if isinstance(gate, Pending) and gate.kind == "sigmoid" and isinstance(other, Activation):
            other = w.activation(node, index)
            if other.storage is gate.storage:
                w.bind(node.outputs[0], Pending("act", gate.storage, gate.dims, GLU_SILU))
                return
        if isinstance(gate, Pending) and gate.kind == "act" and isinstance(other, Activation):
            _glu(w, node, gate, w.activation(node, index))
            return
    raise w.error(node, "the cpu target multiplies by constants, and SiLU or GELU of one half by the other")


def _glu(w: Walk, node: ir.Node, gate: Pending, up: Activation) -> None:
    width = gate.storage.width
    if width != up.storage.width:
        raise w.error(node, f"{width} columns of a gate meet {up.storage.width}")
    out = w.new(gate.storage.rows, width)
    w.emit(OpCode.GLU, node.name, [gate.storage.ref, up.ref], out.ref, i=[width, int(gate.argument)])
    w.bind(node.outputs[0], Activation(out, up.dims))


def div(w: Walk, node: ir.Node) -> None:
    """Div by a constant."""
    scalar = w.scalar_input(node)
    if scalar is None or scalar[0] != 0 or scalar[1] == 0:
        raise w.error(node, "the cpu target divides by constants other than 0")
    _scale(w, node, 0, 1.0 / scalar[1])


def _scale(w: Walk, node: ir.Node, index: int, factor: float) -> None:
    """Multiply by a constant, or remember it when it is part of a soft cap."""
    value = node.inputs[index]
    found = w.find(value)
    out = node.outputs[0]
    if isinstance(found, Pending) and found.kind == "capped":
        if abs(found.argument - factor) > 1e-6 * abs(factor):
            raise w.error(node, f"tanh(x / {found.argument}) * {factor}; the cpu target caps by one constant")
        w.bind(out, Activation(found.storage, found.dims))
        return
    source = w.activation(node, index)
    user = only_user(out)
    if user is not None and user.op_type == "Tanh":
        w.bind(out, Pending("scaled", source.storage, source.dims, factor))
        return
    if not w.in_place(source.storage):
        raise w.error(node, "the cpu target scales in place, but its input is used again")
    w.emit(OpCode.SCALE, node.name, [], source.ref, i=[source.storage.width], f=[factor])
    w.bind(out, source)


def tanh(w: Walk, node: ir.Node) -> None:
    """Tanh between two scalars: a soft cap."""
    found = w.find(node.inputs[0])
    if not isinstance(found, Pending) or found.kind != "scaled" or not w.in_place(found.storage):
        raise w.error(node, "the cpu target takes Tanh as a soft cap: tanh(x / c) * c")
    cap = 1.0 / found.argument
    w.emit(OpCode.SOFTCAP, node.name, [], found.storage.ref, i=[found.storage.width], f=[cap])
    w.bind(node.outputs[0], Pending("capped", found.storage, found.dims, cap))


def sigmoid(w: Walk, node: ir.Node) -> None:
    """Sigmoid, the first half of SiLU."""
    _half(w, node, "sigmoid", 0)


def swish(w: Walk, node: ir.Node) -> None:
    """Swish, which is SiLU."""
    if node.attributes.get_float("alpha", 1.0) != 1.0:
        raise w.error(node, "the cpu target takes Swish with alpha 1")
    _half(w, node, "act", GLU_SILU)


def gelu(w: Walk, node: ir.Node) -> None:
    """Gelu, exact or by tanh."""
    tanh = node.attributes.get_string("approximate", "none") == "tanh"
    _half(w, node, "act", GLU_GELU_TANH if tanh else GLU_GELU_ERF)


def _half(w: Walk, node: ir.Node, kind: str, argument: int) -> None:
    """Remember an activation until the product that it is part of."""
    source = w.activation(node, 0)
    w.bind(node.outputs[0], Pending(kind, source.storage, source.dims, argument))
