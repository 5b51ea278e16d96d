"""MatMul by weights: products of one input become one, biases and residual sums are taken in."""

from __future__ import annotations

import onnx_ir as ir

from .buffers import Ref
from .inputs import product_input
from .plan_file import DType, OpCode
from .tensors import joined_names
from .values import Activation, Storage
from .walk import Walk, only_user
from .weights import Weight


def matmul(w: Walk, node: ir.Node) -> None:
    """MatMul by a weight together with those of the same input; adds to the residual stream where it ends a branch."""
    source = w.activation(node, 0)
    group = _sharing(w, node)
    weights = [w.weight(n) for n in group]
    if weights[0].cols != source.storage.width or source.last_dim != weights[0].cols:
        raise w.error(node, f"{source.last_dim} columns meet a weight of {weights[0].cols} inputs")
    sizes = [weight.rows for weight in weights]
    results = [_follow_bias(w, n, size) for n, size in zip(group, sizes, strict=True)]
    residual = _follow_residual(w, node, results[0][0], sizes[0]) if len(group) == 1 else None
    out = residual[1] if residual else w.new(source.storage.rows, sum(sizes))
    _emit(w, group, weights, [bias for _, bias in results], source, out, residual is not None)
    w.fused.update(group)
    if residual:
        w.bind(residual[0], Activation(out, (*source.dims[:-1], sizes[0])))
        return
    col = 0
    for (value, _), size in zip(results, sizes, strict=True):
        columns = Storage(Ref(out.ref.buffer, col), size)
        w.bind(value, Activation(columns, (*source.dims[:-1], size)))
        col += size


def _emit(
    w: Walk,
    group: list[ir.Node],
    weights: list[Weight],
    biases: list[ir.Value | None],
    source: Activation,
    out: Storage,
    accumulate: bool,
) -> None:
    taken = product_input(weights[0], source.rounding)
    if taken is None:
        raise w.error(group[0], "its input is not rounded as its weight wants it")
    tensor = w.pool.matrix(weights, product_group_size=taken.group_size)
    bias = -1
    if any(b is not None for b in biases):
        bias = w.pool.side_by_side(biases, [weight.rows for weight in weights])
    ins = [source.ref]
    before = w.before(group[0], source)
    if before is not None and before != source.ref:
        ins.append(before)
    name = joined_names([_unit(n.name) for n in group])
    flags = [int(accumulate), taken.kind]
    w.emit(OpCode.LINEAR, name, ins, out.ref, tensors=[tensor, bias], i=flags, f=[taken.scale])


def _sharing(w: Walk, node: ir.Node) -> list[ir.Node]:
    """Return the products of the same rows by weights of the same kind, this node's first."""
    source = node.inputs[0]
    assert source is not None

    def joins(other: ir.Node) -> bool:
        return (
            other.op_type == "MatMul"
            and other.inputs[0] is source
            and other.inputs[1] in w.static
            and other not in w.fused
            and (other in w.late) == (node in w.late)
            and _kind(w.weight(other)) == _kind(w.weight(node))
        )

    return [other for other in w.in_order(use.node for use in source.uses()) if joins(other)]


def _kind(weight: Weight) -> tuple[DType, int, int, bool, float, DType]:
    """Return what weights under one another have in common."""
    numbers = weight.dtype, weight.group_size, weight.cols
    return *numbers, weight.has_zero_points, weight.outer_scale, weight.scale_dtype


def _follow_bias(w: Walk, node: ir.Node, rows: int) -> tuple[ir.Value, ir.Value | None]:
    """Return a product's result and bias, the Add of a constant vector that is its only use taken in."""
    value = node.outputs[0]
    user = only_user(value)
    if user is not None and user.op_type == "Add":
        bias = user.inputs[1] if user.inputs[0] is value else user.inputs[0]
        if bias is not None and bias in w.static and bias.shape is not None:
            if bias.shape.numpy() not in ((rows,), (1, rows)):
                raise w.error(user, f"a bias of shape {bias.shape.numpy()} on {rows} columns")
            w.fused.add(user)
            return user.outputs[0], bias
    return value, None


def _follow_residual(w: Walk, node: ir.Node, value: ir.Value, width: int) -> tuple[ir.Value, Storage] | None:
    """Return (sum, columns to add to) when a product's only use is an Add to columns no one else needs."""
    user = only_user(value)
    if user is None or user.op_type != "Add" or (user in w.late) != (node in w.late):
        return None
    index = 1 if user.inputs[0] is value else 0
    other = user.inputs[index]
    if other is None or not isinstance(w.find(other), Activation):
        return None
    target = w.activation(user, index).storage
    if target.width != width or not w.in_place(target):
        return None
    w.fused.add(user)
    return user.outputs[0], target


def _unit(name: str | None) -> str:
    """Return "layers.0.q" of "layers.0.q/matmul"."""
    return (name or "").partition("/")[0]
