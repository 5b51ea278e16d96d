"""The gated MLP of a block."""

from __future__ import annotations

import onnx_ir as ir

from ..spec import DecoderSpec
from .graph_builder import TOKENS, GraphBuilder
from .linear import linear
from .weights import WeightLoader


def mlp(g: GraphBuilder, w: WeightLoader, spec: DecoderSpec, x: ir.Value, layer: int) -> ir.Value:
    """Return down(act(gate(x)) * up(x)) for the normed x [T, E]."""
    p = f"layers.{layer}."
    f = spec.intermediate_size
    gate = linear(g, w, x, f"{p}gate", f, spec.mlp_bias)
    up = linear(g, w, x, f"{p}up", f, spec.mlp_bias)
    act = _activation(g, spec, gate, f"{p}act")
    h = g.node("Mul", [act, up], f"{p}glu", g.compute, (TOKENS, f))
    return linear(g, w, h, f"{p}down", spec.hidden_size, spec.mlp_bias)


def _activation(g: GraphBuilder, spec: DecoderSpec, x: ir.Value, name: str) -> ir.Value:
    """SiLU is x * Sigmoid(x), not Swish: every target knows it."""
    shape = (TOKENS, spec.intermediate_size)
    if spec.activation == "silu":
        s = g.node("Sigmoid", [x], f"{name}/sigmoid", g.compute, shape)
        return g.node("Mul", [x, s], f"{name}/silu", g.compute, shape, out=f"{name}/out")
    approximate = "tanh" if spec.activation == "gelu_tanh" else "none"
    return g.node(
        "Gelu", [x], f"{name}/gelu", g.compute, shape, {"approximate": approximate}, out=f"{name}/out"
    )
