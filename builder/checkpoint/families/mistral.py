"""Mistral: Llama with a sliding window on every layer, or on none."""

from __future__ import annotations

from ...spec import DecoderSpec
from ..config import Config
from .common import Family, decoder_spec, flat_rope, layers, plain_parts


def _read(config: Config, family: Family, max_seq_len: int) -> DecoderSpec:
    window = config.optional_integer("sliding_window")
    kind = "full_attention" if window is None else "sliding_attention"
    types = [kind] * config.num_layers()
    if config.raw("layer_types") not in (None, types):
        raise config.error(
            f"layer_types is not {kind!r} for every layer, as models of type 'mistral' have it; "
            "mixed layers (Ministral) are not supported"
        )
    return decoder_spec(config, family, [flat_rope(config, max_seq_len)], layers(config, types, window))


FAMILY = Family(
    model_type="mistral",
    architecture="MistralForCausalLM",
    defaults={
        "vocab_size": 32000,
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "hidden_act": "silu",
        "max_position_embeddings": 131072,
        "rms_norm_eps": 1e-6,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "tie_word_embeddings": False,
        "sliding_window": 4096,
    },
    read=_read,
    parts=plain_parts,
)
