"""Linear layers, the embedding and the logits."""

from __future__ import annotations

import onnx_ir as ir

from ..spec import DecoderSpec
from . import contract
from .graph_builder import ROWS, TOKENS, GraphBuilder
from .weights import WeightLoader


def linear(
    g: GraphBuilder, w: WeightLoader, x: ir.Value, name: str, width: int, bias: bool, rows: str = TOKENS
) -> ir.Value:
    """Return x [rows, K] times `<name>.weight` [K, width] (+ `<name>.bias`), called "<name>/out"."""
    return _product(g, w, w.input(x, name, rows), w.matrix(name), name, width, bias, rows)


def embed(g: GraphBuilder, w: WeightLoader, ids: ir.Value, spec: DecoderSpec) -> ir.Value:
    """Return the rows [T, E] of the table for ids [T], times embed_scale."""
    table = w.table("embed.weight")
    shape = (TOKENS, spec.hidden_size)
    assert table.dtype is not None
    x = g.node("Gather", [table, ids], "embed/gather", table.dtype, shape, {"axis": 0})
    if table.dtype != g.compute:
        x = g.node("Cast", [x], "embed/cast", g.compute, shape, {"to": int(g.compute)})
    if spec.embed_scale != 1.0:
        factor = g.scalar("embed.scale", spec.embed_scale)
        x = g.node("Mul", [x, factor], "embed/scale", g.compute, shape)
    return x


def logits(g: GraphBuilder, w: WeightLoader, x: ir.Value, spec: DecoderSpec) -> ir.Value:
    """Return float32 logits [R, V] of x [R, E], soft-capped where the model does so."""
    shape = (ROWS, spec.vocab_size)
    weight = _tied_head(g, w, spec) if spec.tie_embeddings else w.matrix("lm_head")
    x = w.input(x, "lm_head", ROWS)
    y = _product(g, w, x, weight, "lm_head", spec.vocab_size, spec.lm_head_bias, ROWS)
    f32 = ir.DataType.FLOAT
    cap = spec.final_softcap
    if cap == 0.0 and g.compute == f32:
        return g.node("Identity", [y], "logits/identity", f32, shape, out=contract.LOGITS)
    if g.compute != f32:
        out = None if cap else contract.LOGITS
        y = g.node("Cast", [y], "logits/to_f32", f32, shape, {"to": int(f32)}, out=out)
    if cap:
        limit = g.const_f32("logits.softcap", cap)
        y = g.node("Div", [y, limit], "logits/div", f32, shape)
        y = g.node("Tanh", [y], "logits/tanh", f32, shape)
        y = g.node("Mul", [y, limit], "logits/softcap", f32, shape, out=contract.LOGITS)
    return y


def _tied_head(g: GraphBuilder, w: WeightLoader, spec: DecoderSpec) -> ir.Value:
    """The embedding table [V, E] in the compute type, transposed to [E, V]."""
    table = w.cast(w.table("embed.weight"))
    return g.node(
        "Transpose",
        [table],
        "lm_head.weight/transpose",
        g.compute,
        (spec.hidden_size, spec.vocab_size),
        {"perm": [1, 0]},
    )


def _product(
    g: GraphBuilder,
    w: WeightLoader,
    x: ir.Value,
    weight: ir.Value,
    name: str,
    width: int,
    bias: bool,
    rows: str,
) -> ir.Value:
    if not bias:
        return g.node("MatMul", [x, weight], f"{name}/matmul", g.compute, (rows, width), out=f"{name}/out")
    y = g.node("MatMul", [x, weight], f"{name}/matmul", g.compute, (rows, width))
    return g.node(
        "Add", [y, w.vector(f"{name}.bias")], f"{name}/bias", g.compute, (rows, width), out=f"{name}/out"
    )
