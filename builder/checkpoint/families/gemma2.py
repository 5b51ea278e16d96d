"""Gemma 2: norms of 1 + w before and after each part, soft caps, windows on every other layer, scaled embeddings."""

from __future__ import annotations

from typing import Any

import numpy as np

from ...spec import DecoderSpec
from ..config import Config
from .common import POST_NORM_NAMES, Family, Part, decoder_spec, flat_rope, layer_types, layers, plain_parts


def gemma_features(config: Config) -> dict[str, Any]:
    """Return the fields of the spec that Gemma 2 and 3 share."""
    config.use("hidden_act")  # beside hidden_activation in older files; transformers reads only the latter
    bias = config.boolean("attention_bias")
    return {
        "activation_field": "hidden_activation",
        "norm_offset": 1.0,
        # Rounded to float32, as transformers holds it.
        "embed_scale": float(np.float32(config.integer("hidden_size") ** 0.5)),
        "attn_scale": config.number("query_pre_attn_scalar") ** -0.5,
        "final_softcap": config.optional_number("final_logit_softcapping") or 0.0,
        "post_norms": True,
        "qkv_bias": bias,
        "o_bias": bias,
    }


def gemma_parts(spec: DecoderSpec) -> dict[str, Part]:
    """Return the weight names: the four norms of a layer are called after their place."""
    return plain_parts(spec, POST_NORM_NAMES)


def _read(config: Config, family: Family, max_seq_len: int) -> DecoderSpec:
    window = config.optional_integer("sliding_window")
    if config.has("sliding_window_size") and config.raw("sliding_window_size") != window:
        raise config.error(
            f"sliding_window_size is {config.raw('sliding_window_size')!r} and sliding_window {window!r}; transformers "
            "reads the latter, so make them equal or remove the former"
        )
    types = layer_types(config, lambda n: "full_attention" if n % 2 else "sliding_attention")
    return decoder_spec(
        config,
        family,
        [flat_rope(config, max_seq_len)],
        layers(config, types, window),
        attn_softcap=config.optional_number("attn_logit_softcapping") or 0.0,
        **gemma_features(config),
    )


GEMMA_DEFAULTS: dict[str, Any] = {
    "hidden_size": 2304,
    "intermediate_size": 9216,
    "num_hidden_layers": 26,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "hidden_activation": "gelu_pytorch_tanh",
    "rms_norm_eps": 1e-6,
    "pad_token_id": 0,
    "eos_token_id": 1,
    "bos_token_id": 2,
    "tie_word_embeddings": True,
    "attention_bias": False,
    "query_pre_attn_scalar": 256,
    "sliding_window": 4096,
}
FAMILY = Family(
    model_type="gemma2",
    architecture="Gemma2ForCausalLM",
    defaults={
        **GEMMA_DEFAULTS,
        "vocab_size": 256000,
        "max_position_embeddings": 8192,
        "final_logit_softcapping": 30.0,
        "attn_logit_softcapping": 50.0,
    },
    read=_read,
    parts=gemma_parts,
)
