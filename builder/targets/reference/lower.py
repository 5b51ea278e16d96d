"""PagedAttention and RoundInput in standard ONNX ops.

The step's ragged rows become a rectangle [B, S] (S = the longest chunk), keys and values are gathered page by page into
[B, MB*BS], and a boolean mask says who sees whom. What lies behind a sequence's end is replaced by zeros before
any arithmetic, so that garbage, NaN included, cannot reach a result through 0 * NaN. Quantized pools are float32 here
and hold the numbers of the codes, so that NaN can mark what no step wrote.
"""

from __future__ import annotations

import dataclasses

import onnx_ir as ir

from ....runtime.errors import UnsupportedError
from ...graph import contract
from .rounding import pool_codes, replace_fp4_weights, round_input, to_float16
from .tape import I64, Tape

F32 = ir.DataType.FLOAT
LOWEST = -3.4e38  # masked scores; a number, since a padded row may see nothing at all and inf - inf is NaN


@dataclasses.dataclass(frozen=True)
class _Plan:
    """What all layers share, computed once a step from the contract's inputs; int64 unless said otherwise."""

    query_rows: ir.Value  # [B, S] row of the T tokens, clamped where a chunk has ended
    token_rows: ir.Value  # [T] row of the flattened [B*S]
    write_block: ir.Value  # [T]
    write_offset: ir.Value  # [T]
    pages: ir.Value  # [B, MB] blocks, unused entries 0
    query_pos: ir.Value  # [B, S]
    kv_pos: ir.Value  # [KV], 0, 1, ...
    kv_valid: ir.Value  # [B, KV] bool


def lower(model: ir.Model) -> ir.Model:
    """Return a copy of a graph of build_graph that has standard ONNX ops alone, all of which ONNX Runtime runs.

    The copy shares the weights' lazy tensors with `model`.
    raises : UnsupportedError for a bfloat16 graph, which ONNX Runtime's CPU kernels cannot run
    """
    if model.metadata_props.get("plansmith.compute") == "bfloat16":
        raise UnsupportedError(
            "ONNX Runtime cannot compute in bfloat16 on a CPU; build the graph with compute='float32' to check it"
        )
    model = model.clone()
    graph = model.graph
    consts: dict[str, ir.Value] = {}
    inputs = {str(v.name): v for v in graph.inputs}
    block_size = inputs[contract.k_pool(0)].shape
    assert block_size is not None
    tape = Tape("ref.step", consts)
    plan = _plan(tape, inputs, int(block_size[2]))  # type: ignore[arg-type]
    masks: dict[int, ir.Value] = {}
    attentions = [n for n in graph if (n.domain, n.op_type) == (contract.OP_DOMAIN, contract.PAGED_ATTENTION)]
    beside_float32 = any(k is not None and k.dtype is F32 for k in (n.inputs[1] for n in attentions))
    for window in dict.fromkeys(n.attributes.get_int("window", 0) for n in attentions):
        masks[window] = _mask(tape, plan, window)
    graph.insert_before(graph[0], tape.nodes)
    for node in attentions:
        layer = Tape(str(node.name), consts)
        outs = _attend(layer, node, plan, masks[node.attributes.get_int("window", 0)])
        ir.convenience.replace_nodes_and_values(graph, node, [node], layer.nodes, node.outputs, outs)
    _lower_rounding(graph, consts)
    _widen_pools(graph, beside_float32)
    for value in consts.values():
        graph.register_initializer(value)
    del graph.opset_imports[contract.OP_DOMAIN]
    return model


def _lower_rounding(graph: ir.Graph, consts: dict[str, ir.Value]) -> None:
    replace_fp4_weights(graph)
    for node in [n for n in graph if (n.domain, n.op_type) == (contract.OP_DOMAIN, contract.ROUND_INPUT)]:
        tape = Tape(str(node.name), consts)
        out = round_input(tape, node)
        ir.convenience.replace_nodes_and_values(graph, node, [node], tape.nodes, node.outputs, [out])


def _widen_pools(graph: ir.Graph, beside_float32: bool) -> None:
    """Make pools that are not of the activations' type float32, which ScatterND takes beside float32 values."""
    narrow = [ir.DataType.FLOAT8E4M3FN, ir.DataType.INT8]
    if beside_float32:
        narrow.append(ir.DataType.FLOAT16)
    for value in (*graph.inputs, *graph.outputs):
        if value.dtype in narrow:
            value.type = ir.TensorType(F32)


def _plan(t: Tape, inputs: dict[str, ir.Value], block_size: int) -> _Plan:
    cu = t.cast(inputs[contract.CU_QUERY_LENS], I64)
    kv_lens = t.cast(inputs[contract.KV_LENS], I64)
    table = t.cast(inputs[contract.BLOCK_TABLE], I64)
    starts = t.op("Slice", cu, t.ints(0), t.ints(-1))
    ends = t.op("Slice", cu, t.ints(1), t.ints(1 << 62))
    lens = t.op("Sub", ends, starts)
    past = t.op("Sub", kv_lens, lens)

    num_tokens = t.dim(inputs[contract.INPUT_IDS], 0)
    token = t.iota(num_tokens)
    behind = t.cast(t.op("GreaterOrEqual", t.expand_dims(token, 1), t.expand_dims(ends, 0)), I64)
    seq = t.op("ReduceSum", behind, t.ints(1), keepdims=0)
    in_chunk = t.op("Sub", token, t.op("Gather", starts, seq))
    pos = t.op("Add", in_chunk, t.op("Gather", past, seq))
    column = t.op("Div", pos, t.scalar(block_size))
    place = t.op("Concat", t.expand_dims(seq, 1), t.expand_dims(column, 1), axis=1)

    longest = t.op("ReduceMax", lens, keepdims=0)
    s = t.expand_dims(t.iota(longest), 0)
    rows = t.op("Add", t.expand_dims(starts, 1), s)
    kv_pos = t.iota(t.op("Mul", t.dim(table, 1), t.scalar(block_size)))
    return _Plan(
        query_rows=t.op("Min", rows, t.op("Sub", num_tokens, t.scalar(1))),
        token_rows=t.op("Add", t.op("Mul", seq, longest), in_chunk),
        write_block=t.op("GatherND", table, place),
        write_offset=t.op("Mod", pos, t.scalar(block_size)),
        pages=t.op("Max", table, t.scalar(0)),
        query_pos=t.op("Add", t.expand_dims(past, 1), s),
        kv_pos=kv_pos,
        kv_valid=t.op("Less", t.expand_dims(kv_pos, 0), t.expand_dims(kv_lens, 1)),
    )


def _mask(t: Tape, plan: _Plan, window: int) -> ir.Value:
    """Who sees whom, bool [B, 1, 1, S, KV]: a query at p sees p-window+1..p (window 0: everything up to p)."""
    p = t.expand_dims(plan.query_pos, 2)
    j = t.expand_dims(plan.kv_pos, 0, 1)
    seen = t.op("And", t.op("LessOrEqual", j, p), t.expand_dims(plan.kv_valid, 1))
    if window:
        seen = t.op("And", seen, t.op("Greater", j, t.op("Sub", p, t.scalar(window))))
    return t.expand_dims(seen, 1, 2)


def _attend(t: Tape, node: ir.Node, plan: _Plan, mask: ir.Value) -> list[ir.Value]:
    """Return out, k_pool_out, v_pool_out."""
    q, k, v, k_pool, v_pool = (x for x in node.inputs[:5] if x is not None)
    scales = node.inputs[8:]
    attrs = node.attributes
    heads, kv_heads, d = (attrs.get_int(a, 0) for a in ("num_heads", "kv_num_heads", "head_dim"))
    scale, softcap = attrs.get_float("scale", 1.0), attrs.get_float("softcap", 0.0)

    index = _write_index(t, plan, kv_heads)
    shape = t.ints(-1, kv_heads, d)
    if scales:
        k_scale, v_scale = (x for x in scales if x is not None)
        assert k_pool.dtype is not None
        k, v = pool_codes(t, k, k_scale, k_pool.dtype), pool_codes(t, v, v_scale, k_pool.dtype)
    elif k_pool.dtype is ir.DataType.FLOAT16 and k.dtype is F32:
        k, v = to_float16(t, k), to_float16(t, v)
    k_out = t.op("ScatterND", k_pool, index, t.op("Reshape", k, shape))
    v_out = t.op("ScatterND", v_pool, index, t.op("Reshape", v, shape))
    keys = _pages(t, plan, k_out, kv_heads, d)
    values = _pages(t, plan, v_out, kv_heads, d)
    if scales:
        keys, values = t.op("Mul", keys, k_scale), t.op("Mul", values, v_scale)

    rows = t.op("Gather", t.cast(q, F32), plan.query_rows, axis=0)
    grouped = t.op("Reshape", rows, t.ints(0, 0, kv_heads, heads // kv_heads, d))
    queries = t.op("Transpose", grouped, perm=[0, 2, 3, 1, 4])  # [B, KVH, G, S, D]
    score = t.op("MatMul", queries, t.op("Transpose", keys, perm=[0, 1, 2, 4, 3]))
    score = t.op("Mul", score, t.number(scale))
    if softcap:
        cap = t.number(softcap)
        score = t.op("Mul", t.op("Tanh", t.op("Div", score, cap)), cap)
    weight = t.op("Softmax", t.op("Where", mask, score, t.number(LOWEST)), axis=-1)
    mixed = t.op("Transpose", t.op("MatMul", weight, values), perm=[0, 3, 1, 2, 4])
    flat = t.op("Reshape", mixed, t.ints(-1, heads * d))
    out = t.op("Gather", flat, plan.token_rows, axis=0)
    assert q.dtype is not None
    return [t.cast(out, q.dtype), k_out, v_out]


def _write_index(t: Tape, plan: _Plan, kv_heads: int) -> ir.Value:
    """Where each token's heads go in a pool [NB, KVH, BS, D]: (block, head, offset), [T, KVH, 3]."""
    zeros = t.op("Mul", t.expand_dims(plan.write_block, 1, 2), t.scalar(0))  # [T, 1, 1]
    head = t.op("Reshape", t.iota(t.scalar(kv_heads)), t.ints(1, kv_heads, 1))
    head = t.op("Add", head, zeros)
    zeros = t.op("Mul", head, t.scalar(0))
    block = t.op("Add", zeros, t.expand_dims(plan.write_block, 1, 2))
    offset = t.op("Add", zeros, t.expand_dims(plan.write_offset, 1, 2))
    return t.op("Concat", block, head, offset, axis=2)


def _pages(t: Tape, plan: _Plan, pool: ir.Value, kv_heads: int, d: int) -> ir.Value:
    """A pool's rows in each sequence's order, float32 [B, KVH, 1, KV, D], zeros behind its end."""
    pages = t.op("Gather", pool, plan.pages, axis=0)  # [B, MB, KVH, BS, D]
    pages = t.op("Transpose", pages, perm=[0, 2, 1, 3, 4])
    rows = t.cast(t.op("Reshape", pages, t.ints(0, kv_heads, 1, -1, d)), F32)
    return t.op("Where", t.expand_dims(plan.kv_valid, 1, 2, 4), rows, t.number(0.0))
