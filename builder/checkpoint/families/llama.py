"""Llama 2 and 3.x, SmolLM, and what else calls itself `llama`: grouped queries, rope scalings, optional biases."""

from __future__ import annotations

from ...spec import DecoderSpec
from ..config import Config
from .common import Family, GgufForm, decoder_spec, flat_rope, layer_types, layers, plain_parts


def _read(config: Config, family: Family, max_seq_len: int) -> DecoderSpec:
    attention_bias, mlp_bias = config.boolean("attention_bias"), config.boolean("mlp_bias")
    return decoder_spec(
        config,
        family,
        [flat_rope(config, max_seq_len)],
        layers(config, layer_types(config, lambda _: "full_attention"), None),
        qkv_bias=attention_bias,
        o_bias=attention_bias,
        mlp_bias=mlp_bias,
    )


FAMILY = Family(
    model_type="llama",
    architecture="LlamaForCausalLM",
    defaults={
        "vocab_size": 32000,
        "hidden_size": 4096,
        "intermediate_size": 11008,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "hidden_act": "silu",
        "max_position_embeddings": 2048,
        "rms_norm_eps": 1e-6,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "tie_word_embeddings": False,
        "attention_bias": False,
        "mlp_bias": False,
    },
    read=_read,
    parts=plain_parts,
    gguf=GgufForm(
        "llama",
        {"attention_bias": "blk.0.attn_q.bias", "mlp_bias": "blk.0.ffn_up.bias"},
        interleaved_qk=True,
    ),
)
