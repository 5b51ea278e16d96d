"""The graph of builder/graph lowered to the linear program of the cpu plan.

Nodes are taken in the graph's order and matched by what they compute, whatever the family: what shares an input is
one product (q, k and v; gate and up), a branch is added to the residual stream by the product that ends it, and of
the last layer only the rows whose logits are wanted go through what follows its attention.
"""

from __future__ import annotations

from collections.abc import Callable

import onnx_ir as ir

from ....runtime.errors import BuildError
from ...graph import contract
from . import attention, inputs, pointwise, products, relabel
from .buffers import Buffer, assign_slots, to_ops
from .plan_file import KvFormat, OpCode, Program, SlotRows
from .values import ROWS_AXIS, Activation
from .walk import Walk, only_user
from .weights import resolve_weight

_KV_FORMATS = {
    ir.DataType.FLOAT: KvFormat.F32,
    ir.DataType.FLOAT16: KvFormat.F16,
    ir.DataType.FLOAT8E4M3FN: KvFormat.F8,
    ir.DataType.INT8: KvFormat.I8,
}


def lower(model: ir.Model, header: dict[str, int]) -> Program:
    """Return the program of a graph; no weight is read, but for the outer scales of FP4.

    header : the plan's model fields (plan_file.MODEL_FIELDS)
    raises BuildError naming the node that the cpu target does not take, and what it takes.
    """
    w = Walk(model.graph)
    for node in w.nodes:
        if node not in w.fused and not all(out in w.static for out in node.outputs):
            handler = HANDLERS.get((node.domain, node.op_type))
            if handler is None:
                known = sorted("::".join(filter(None, key)) for key in HANDLERS)
                raise w.error(node, f"the cpu target does not take this op, it takes {', '.join(known)}")
            handler(w, node)
        w.finish(node)
    logits = _logits_buffer(w, model.graph, header["vocab_size"])
    ops = attention.join_ropes(w.ops)
    slots, slot_of = assign_slots(ops, logits)
    kv = _kv_format(model.graph)
    return Program(slots, w.pool.tensors(), to_ops(ops, slot_of), header, slot_of[logits], kv)


def _kv_format(graph: ir.Graph) -> KvFormat:
    """Return what the pools hold, which is the same in all layers."""
    kinds = {v.dtype for v in graph.inputs if v.name is not None and contract.is_pool(v.name)}
    found = _KV_FORMATS.get(next(iter(kinds), None) or ir.DataType.UNDEFINED)
    if len(kinds) != 1 or found is None:
        raise BuildError(
            f"the KV pools are {', '.join(sorted(map(str, kinds)))}; the cpu target takes one of "
            f"{', '.join(kind.name for kind in _KV_FORMATS)} for all layers: build its graph with compute float32"
        )
    return found


def _logits_buffer(w: Walk, graph: ir.Graph, vocab_size: int) -> Buffer:
    found = next((w.find(v) for v in graph.outputs if v.name == contract.LOGITS), None)
    if not isinstance(found, Activation):
        raise BuildError(f"the graph has no output {contract.LOGITS!r}; build it with build_graph")
    ref = found.ref
    if ref.buffer.rows is not SlotRows.LOGITS or ref.col or ref.buffer.width != vocab_size:
        raise BuildError(
            f"{contract.LOGITS} are not [R, {vocab_size}] rows chosen by {contract.LOGITS_ROWS}; gather those "
            "rows before the logits product"
        )
    return ref.buffer


def gather(w: Walk, node: ir.Node) -> None:
    """Gather of the embedding by token id, or of the rows with logits."""
    if w.is_logits_gather(node):
        found = w.activation(node, 0)
        if node.attributes.get_int("axis", 0) % len(found.dims) != found.dims.index(ROWS_AXIS):
            raise w.error(node, "logits rows are gathered along another axis than the tokens'")
        w.bind(node.outputs[0], found)
        return
    table, ids = node.inputs[0], node.inputs[1]
    if (
        table not in w.static
        or w.input_name(ids) != contract.INPUT_IDS
        or node.attributes.get_int("axis", 0) != 0
    ):
        raise w.error(
            node,
            f"the cpu target gathers rows of the embedding by {contract.INPUT_IDS}, and rows of activations "
            f"by {contract.LOGITS_ROWS}",
        )
    assert table is not None
    weight = resolve_weight(table, matmul=False)
    out, scale = _follow_scale(w, node.outputs[0])
    storage = w.new(SlotRows.TOKENS, weight.cols)
    tensor = w.pool.matrix([weight])
    w.emit(OpCode.EMBED, node.name, [], storage.ref, tensors=[tensor, -1], f=[scale])
    w.bind_rows(out, storage)


def _follow_scale(w: Walk, value: ir.Value) -> tuple[ir.Value, float]:
    """Return the value behind Casts and a Mul by a constant that are its only uses, and the constant."""
    scale = 1.0
    while (node := only_user(value)) is not None:
        if node.op_type == "Cast" and node.attributes["to"].as_int() == ir.DataType.FLOAT:
            pass
        elif node.op_type == "Mul" and scale == 1.0 and (found := w.scalar_input(node)) is not None:
            scale = found[1]
        else:
            break
        w.fused.add(node)
        value = node.outputs[0]
    return value, scale


def rms_norm(w: Walk, node: ir.Node) -> None:
    """RMSNormalization of a row, or of each head's columns."""
    source = w.activation(node, 0)
    axis, width = node.attributes.get_int("axis", -1), source.last_dim
    if axis not in (-1, len(source.dims) - 1) or width == ROWS_AXIS or node.inputs[1] not in w.static:
        raise w.error(node, "the cpu target norms the last axis by a weight known at build")
    assert node.inputs[1] is not None
    tensor = w.pool.vector(node.inputs[1], 1, width)
    total = source.storage.width
    out = source.storage if w.in_place(source.storage) else w.new(source.storage.rows, total)
    epsilon = node.attributes.get_float("epsilon", 1e-5)
    w.emit(
        OpCode.RMS_NORM,
        node.name,
        [source.ref],
        out.ref,
        tensors=[tensor, -1],
        i=[total // width, width],
        f=[epsilon],
    )
    w.bind(node.outputs[0], Activation(out, source.dims))


HANDLERS: dict[tuple[str, str], Callable[[Walk, ir.Node], None]] = {
    ("", "Gather"): gather,
    ("", "RMSNormalization"): rms_norm,
    ("", "MatMul"): products.matmul,
    ("", "Add"): pointwise.add,
    ("", "Mul"): pointwise.mul,
    ("", "Div"): pointwise.div,
    ("", "Sigmoid"): pointwise.sigmoid,
    ("", "Swish"): pointwise.swish,
    ("", "Gelu"): pointwise.gelu,
    ("", "Tanh"): pointwise.tanh,
    ("", "RotaryEmbedding"): attention.rope,
    ("", "Reshape"): relabel.reshape,
    ("", "Transpose"): relabel.transpose,
    ("", "Unsqueeze"): relabel.unsqueeze,
    ("", "Squeeze"): relabel.squeeze,
    ("", "Cast"): relabel.cast,
    ("", "Identity"): relabel.identity,
    ("", "QuantizeLinear"): inputs.quantize,
    (contract.OP_DOMAIN, contract.ROUND_INPUT): inputs.round_input,
    (contract.OP_DOMAIN, contract.PAGED_ATTENTION): attention.paged_attention,
}
