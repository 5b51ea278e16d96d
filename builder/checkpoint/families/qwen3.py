"""Qwen 3: an RMSNorm on every head of q and k, an explicit head size, no biases unless asked for."""

from __future__ import annotations

from ...spec import DecoderSpec
from ..config import Config
from .common import Family, GgufForm, decoder_spec, flat_rope, plain_parts
from .qwen2 import FAMILY as QWEN2
from .qwen2 import windowed_layers


def _read(config: Config, family: Family, max_seq_len: int) -> DecoderSpec:
    bias = config.boolean("attention_bias")
    return decoder_spec(
        config,
        family,
        [flat_rope(config, max_seq_len)],
        windowed_layers(config),
        qk_norm=True,
        qkv_bias=bias,
        o_bias=bias,
    )


FAMILY = Family(
    model_type="qwen3",
    architecture="Qwen3ForCausalLM",
    defaults={**QWEN2.defaults, "head_dim": 128, "attention_bias": False},
    read=_read,
    parts=plain_parts,
    gguf=GgufForm("qwen3", {"attention_bias": "blk.0.attn_q.bias"}),
)
