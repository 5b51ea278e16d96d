"""The attention half of a block."""

from __future__ import annotations

import dataclasses

import onnx_ir as ir

from ..spec import DecoderSpec
from . import contract
from .graph_builder import BLOCKS, TOKENS, GraphBuilder, value
from .linear import linear
from .norm import head_norm
from .rope import Ropes
from .weights import WeightLoader


@dataclasses.dataclass(frozen=True)
class StepInputs:
    """The inputs that every layer's attention reads."""

    cu_query_lens: ir.Value
    kv_lens: ir.Value
    block_table: ir.Value
    k_pools: tuple[ir.Value, ...]
    v_pools: tuple[ir.Value, ...]
    tokens_per_block: int


def attention(
    g: GraphBuilder,
    w: WeightLoader,
    spec: DecoderSpec,
    ropes: Ropes,
    step: StepInputs,
    x: ir.Value,
    layer: int,
) -> ir.Value:
    """Return attention of the normed x [T, E] through o, [T, E]; adds the layer's pool outputs to the graph."""
    p = f"layers.{layer}."
    q = linear(g, w, x, f"{p}q", spec.q_width, spec.qkv_bias)
    k = linear(g, w, x, f"{p}k", spec.kv_width, spec.qkv_bias)
    v = linear(g, w, x, f"{p}v", spec.kv_width, spec.qkv_bias)
    if spec.qk_norm:
        q = head_norm(g, w, q, f"{p}q_norm", spec.norm_eps, spec.norm_offset, spec.num_heads)
        k = head_norm(g, w, k, f"{p}k_norm", spec.norm_eps, spec.norm_offset, spec.num_kv_heads)
    rope_idx = spec.layers[layer].rope_idx
    if rope_idx >= 0:
        q = ropes.rotate(q, f"{p}q_rope", rope_idx, spec.num_heads, spec.head_dim)
        k = ropes.rotate(k, f"{p}k_rope", rope_idx, spec.num_kv_heads, spec.head_dim)
    a = _paged_attention(g, spec, step, (q, k, v), w.kv_scales(layer), layer)
    return linear(g, w, a, f"{p}o", spec.hidden_size, spec.o_bias)


def _paged_attention(
    g: GraphBuilder,
    spec: DecoderSpec,
    step: StepInputs,
    qkv: tuple[ir.Value, ir.Value, ir.Value],
    kv_scales: list[ir.Value],
    layer: int,
) -> ir.Value:
    """The op of the contract; the scale and window of the layer are its attributes."""
    pools = step.k_pools[layer], step.v_pools[layer]
    dims = (BLOCKS, spec.num_kv_heads, step.tokens_per_block, spec.head_dim)
    name = f"layers.{layer}.attn"
    outs = [
        value(f"{name}/out", g.compute, (TOKENS, spec.q_width)),
        value(contract.k_pool_out(layer), pools[0].dtype or g.compute, dims),
        value(contract.v_pool_out(layer), pools[1].dtype or g.compute, dims),
    ]
    g.add(
        contract.PAGED_ATTENTION,
        [*qkv, *pools, step.cu_query_lens, step.kv_lens, step.block_table, *kv_scales],
        outs,
        name,
        {
            "num_heads": spec.num_heads,
            "kv_num_heads": spec.num_kv_heads,
            "head_dim": spec.head_dim,
            "scale": float(spec.attn_scale),
            "softcap": float(spec.attn_softcap),
            "window": spec.layers[layer].window,
        },
        domain=contract.OP_DOMAIN,
    )
    return outs[0]
