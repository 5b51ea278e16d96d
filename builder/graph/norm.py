"""RMS norms, always in float32."""

from __future__ import annotations

import onnx_ir as ir

from .graph_builder import TOKENS, GraphBuilder
from .weights import WeightLoader


def rms_norm(
    g: GraphBuilder, w: WeightLoader, x: ir.Value, name: str, eps: float, offset: float, rows: str = TOKENS
) -> ir.Value:
    """Return x [rows, E] normed over its columns and scaled by weight `<name>.weight` (+ offset)."""
    scale = w.norm(f"{name}.weight", offset)
    assert scale.shape is not None
    return _norm(g, x, scale, name, eps, (rows, scale.shape.numpy()[0]))


def head_norm(
    g: GraphBuilder, w: WeightLoader, x: ir.Value, name: str, eps: float, offset: float, heads: int
) -> ir.Value:
    """Return x [T, heads*D] with each head normed by weight `<name>.weight` [D]."""
    scale = w.norm(f"{name}.weight", offset)
    assert scale.shape is not None
    d = scale.shape.numpy()[0]
    split = g.ints(f"split_heads.{heads}", [-1, heads, d])
    merge = g.ints(f"merge_heads.{heads}", [-1, heads * d])
    x = g.node("Reshape", [x, split], f"{name}/split", g.compute, (TOKENS, heads, d))
    x = _norm(g, x, scale, name, eps, (TOKENS, heads, d))
    return g.node("Reshape", [x, merge], f"{name}/merge", g.compute, (TOKENS, heads * d))


def _norm(
    g: GraphBuilder, x: ir.Value, scale: ir.Value, name: str, eps: float, shape: tuple[int | str, ...]
) -> ir.Value:
    """Cast to float32, norm, cast back: a sum of squares overflows float16, and 1 + w is coarse in bfloat16."""
    f32 = ir.DataType.FLOAT
    attrs = {"axis": -1, "epsilon": float(eps), "stash_type": 1}
    if g.compute == f32:
        return g.node("RMSNormalization", [x, scale], name, f32, shape, attrs)
    x = g.node("Cast", [x], f"{name}/to_f32", f32, shape, {"to": int(f32)})
    x = g.node("RMSNormalization", [x, scale], name, f32, shape, attrs, out=f"{name}/normed")
    return g.node(
        "Cast", [x], f"{name}/to_compute", g.compute, shape, {"to": int(g.compute)}, out=f"{name}/out"
    )
