"""Rotary embeddings and paged attention, on columns of the fused q, k and v."""

from __future__ import annotations

import dataclasses

import onnx_ir as ir

from ...graph import contract
from .buffers import BufferOp
from .plan_file import OpCode, SlotRows
from .tensors import joined_names
from .walk import Walk


def rope(w: Walk, node: ir.Node) -> None:
    """RotaryEmbedding, in place on the columns of q or k."""
    source = w.activation(node, 0)
    heads = node.attributes.get_int("num_heads", 0) or (source.dims[1] if len(source.dims) == 4 else 0)
    if heads < 1 or source.storage.width % heads or node.attributes.get_int("interleaved", 0):
        raise w.error(node, "the cpu target rotates halves of num_heads heads")
    if w.input_name(node.inputs[3] if len(node.inputs) > 3 else None) != contract.POSITION_IDS:
        raise w.error(node, f"the cpu target rotates by {contract.POSITION_IDS}")
    if not w.in_place(source.storage):
        raise w.error(node, "the cpu target rotates in place, but its input is used again")
    width = source.storage.width // heads
    rotated = node.attributes.get_int("rotary_embedding_dim", 0) or width
    tables = [_rope_table(w, node, index, rotated // 2) for index in (1, 2)]
    w.emit(OpCode.ROPE, node.name, [], source.ref, tensors=tables, i=[heads, width, rotated])
    w.bind(node.outputs[0], source)


def _rope_table(w: Walk, node: ir.Node, index: int, cols: int) -> int:
    table = node.inputs[index]
    if table is None or table not in w.static or table.shape is None:
        raise w.error(node, "the cpu target wants cosines and sines known at build")
    shape = table.shape.numpy()
    if len(shape) != 2 or shape[1] != cols:
        raise w.error(node, f"a table of shape {list(shape)}, [positions, {cols}] is wanted")
    return w.pool.vector(table, int(shape[0]), cols)


def paged_attention(w: Walk, node: ir.Node) -> None:
    """plansmith::PagedAttention over three views, which may be columns of one buffer."""
    q, k, v = (w.activation(node, n) for n in range(3))
    heads, kv_heads = node.attributes.get_int("num_heads", 0), node.attributes.get_int("kv_num_heads", 0)
    width = node.attributes.get_int("head_dim", 0)
    got = (q.storage.width, k.storage.width, v.storage.width)
    if got != (heads * width, kv_heads * width, kv_heads * width):
        raise w.error(node, f"q, k and v have {got} columns for {heads} and {kv_heads} heads of {width}")
    layer = _layer_of(w, node)
    out = w.new(SlotRows.TOKENS, heads * width)
    w.emit(
        OpCode.PAGED_ATTENTION,
        node.name,
        [q.ref, k.ref, v.ref],
        out.ref,
        tensors=[_pool_scales(w, node), -1],
        i=[heads, kv_heads, width, layer, node.attributes.get_int("window", 0)],
        f=[node.attributes["scale"].as_float(), node.attributes.get_float("softcap", 0.0)],
    )
    w.bind_rows(node.outputs[0], out)


def _layer_of(w: Walk, node: ir.Node) -> int:
    """Return the layer whose pools a PagedAttention node reads; the step's other inputs are checked too."""
    pools = [_input(w, v) for v in node.inputs[3:5]]
    rest = [_input(w, v) for v in node.inputs[5:8]]
    wanted = [contract.CU_QUERY_LENS, contract.KV_LENS, contract.BLOCK_TABLE]
    layer = (pools[0] or "").rpartition(".")[2]
    if not layer.isdigit() or pools != [contract.k_pool(int(layer)), contract.v_pool(int(layer))]:
        raise w.error(node, f"its pools are {pools}; k_pool.N and v_pool.N of one layer are wanted")
    if rest != wanted:
        raise w.error(node, f"inputs 5 to 7 are {rest}, wanted {wanted}")
    return int(layer)


def _pool_scales(w: Walk, node: ir.Node) -> int:
    """Return the tensor [1, 2] of the scales of K and V; -1 with float pools, which have none."""
    scales = [v for v in node.inputs[8:10] if v is not None]
    pools = [v for v in node.inputs[3:5] if v is not None]
    quantized = any(v.dtype not in (ir.DataType.FLOAT, ir.DataType.FLOAT16) for v in pools)
    if len(scales) != (2 if quantized else 0):
        raise w.error(
            node, f"it has {len(scales)} scales of its pools, wanted 2 with FP8 and INT8 pools and else none"
        )
    if not scales:
        return -1
    if any(v not in w.static for v in scales):
        raise w.error(
            node, "the scales of its pools are computed; the cpu target takes scales known at build"
        )
    return w.pool.side_by_side(scales, [1, 1])


def _input(w: Walk, value: ir.Value | None) -> str | None:
    return None if value is None else w.inputs.get(value)


def join_ropes(ops: list[BufferOp]) -> list[BufferOp]:
    """Return the ops with neighbours that rotate neighbouring columns by one table as one: q and k of a layer."""
    out: list[BufferOp] = []
    for op in ops:
        last = out[-1] if out else None
        if (
            last is not None
            and last.code is op.code is OpCode.ROPE
            and last.out.buffer is op.out.buffer
            and (last.tensors, last.i[1:]) == (op.tensors, op.i[1:])
            and last.out.col + last.i[0] * last.i[1] == op.out.col
        ):
            heads = (last.i[0] + op.i[0], *op.i[1:])
            out[-1] = dataclasses.replace(last, name=joined_names([last.name, op.name]), i=heads)
        else:
            out.append(op)
    return out
