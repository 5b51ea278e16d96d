"""The frozen description of a decoder, the one thing that graph, targets and manifest know of a checkpoint.

A family (llama, qwen3, gemma2, ...) is a way to fill these fields and a weight-name map; nothing behind this
module knows a family's name.
"""

from __future__ import annotations

import dataclasses
from typing import Literal

Activation = Literal["silu", "gelu_tanh", "gelu"]


@dataclasses.dataclass(frozen=True)
class RopeSpec:
    """One rotary embedding, scaling already applied.

    inv_freq : rotary_dim / 2 frequencies, radians a position
    rotary_dim : columns of a head that are rotated, even, 2 <= rotary_dim <= head_dim
    mscale : factor on cos and sin (yarn, longrope), 1.0 otherwise
    kind : the scaling's name, for the manifest only
    """

    inv_freq: tuple[float, ...]
    rotary_dim: int
    mscale: float = 1.0
    kind: str = "default"


@dataclasses.dataclass(frozen=True)
class LayerSpec:
    """What may differ from layer to layer.

    window : a query at position p sees p-window+1..p; 0 = everything before it
    rope_idx : index into DecoderSpec.ropes; -1 = this layer has no rotary embedding
    """

    window: int = 0
    rope_idx: int = 0


@dataclasses.dataclass(frozen=True)
class DecoderSpec:
    """A decoder-only transformer: pre-norm blocks of attention and a gated MLP.

    The block, with the optional parts in brackets::

        x = embed[ids] * embed_scale
        for each layer:
            h = rmsnorm(x, attn_norm)
            q, k, v = linear(h)            [+ bias: qkv_bias]
            q, k = rmsnorm per head        [qk_norm]
            q, k = rope(q, k)
            a = attention(q, k, v) with attn_scale [attn_softcap, window]
            a = linear(a)                  [+ bias: o_bias]
            a = rmsnorm(a, post_attn_norm) [post_norms]
            x = x + a
            h = rmsnorm(x, mlp_norm)
            m = linear(act(linear(h, gate)) * linear(h, up), down)   [+ biases: mlp_bias]
            m = rmsnorm(m, post_mlp_norm)  [post_norms]
            x = x + m
        logits = linear(rmsnorm(x, final_norm), lm_head or embed)    [final_softcap]
    """

    family: str  # name for people and the manifest
    architecture: str  # as in config.json, e.g. "LlamaForCausalLM"
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    max_position_embeddings: int
    norm_eps: float
    activation: Activation
    ropes: tuple[RopeSpec, ...]
    layers: tuple[LayerSpec, ...]
    attn_scale: float  # factor on q.k
    tie_embeddings: bool
    norm_offset: float = 0.0  # 1.0: the norms multiply by 1 + w
    embed_scale: float = 1.0
    attn_softcap: float = 0.0  # 0 = none
    final_softcap: float = 0.0  # 0 = none
    qk_norm: bool = False
    qkv_bias: bool = False
    o_bias: bool = False
    mlp_bias: bool = False
    lm_head_bias: bool = False
    post_norms: bool = False
    dtype: str = "float32"  # the checkpoint's own
    bos_token_id: int | None = None
    eos_token_ids: tuple[int, ...] = ()
    pad_token_id: int | None = None

    @property
    def q_width(self) -> int:
        """Columns of q: H * D."""
        return self.num_heads * self.head_dim

    @property
    def kv_width(self) -> int:
        """Columns of k, and of v: KVH * D."""
        return self.num_kv_heads * self.head_dim


def weight_shapes(spec: DecoderSpec) -> dict[str, tuple[int, ...]]:
    """Return every weight the spec needs, canonical name -> shape; matrices are [out, in] as in checkpoints."""
    e, f = spec.hidden_size, spec.intermediate_size
    shapes: dict[str, tuple[int, ...]] = {"embed.weight": (spec.vocab_size, e)}
    for n in range(spec.num_layers):
        p = f"layers.{n}."
        linears = [
            ("q", spec.q_width, e, spec.qkv_bias),
            ("k", spec.kv_width, e, spec.qkv_bias),
            ("v", spec.kv_width, e, spec.qkv_bias),
            ("o", e, spec.q_width, spec.o_bias),
            ("gate", f, e, spec.mlp_bias),
            ("up", f, e, spec.mlp_bias),
            ("down", e, f, spec.mlp_bias),
        ]
        for name, rows, cols, bias in linears:
            shapes[f"{p}{name}.weight"] = (rows, cols)
            if bias:
                shapes[f"{p}{name}.bias"] = (rows,)
        norms = ["attn_norm", "mlp_norm"]
        if spec.post_norms:
            norms += ["post_attn_norm", "post_mlp_norm"]
        for name in norms:
            shapes[f"{p}{name}.weight"] = (e,)
        if spec.qk_norm:
            shapes[f"{p}q_norm.weight"] = (spec.head_dim,)
            shapes[f"{p}k_norm.weight"] = (spec.head_dim,)
    shapes["final_norm.weight"] = (e,)
    if not spec.tie_embeddings:
        shapes["lm_head.weight"] = (spec.vocab_size, e)
    if spec.lm_head_bias:
        shapes["lm_head.bias"] = (spec.vocab_size,)
    return shapes
