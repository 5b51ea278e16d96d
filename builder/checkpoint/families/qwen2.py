"""Qwen 2 and 2.5: biases on q, k and v; sliding windows from a given layer on where they are switched on."""

from __future__ import annotations

from ...spec import DecoderSpec, LayerSpec
from ..config import Config
from .common import Family, GgufForm, decoder_spec, flat_rope, layer_types, layers, plain_parts


def windowed_layers(config: Config) -> tuple[LayerSpec, ...]:
    """Return the layers by `layer_types`, or by use_sliding_window, sliding_window and max_window_layers."""
    on = config.boolean("use_sliding_window")
    window = config.optional_integer("sliding_window")
    first = config.integer("max_window_layers", low=0)
    window = window if on else None

    def kind(layer: int) -> str:
        return "sliding_attention" if window is not None and layer >= first else "full_attention"

    return layers(config, layer_types(config, kind), window)


def _read(config: Config, family: Family, max_seq_len: int) -> DecoderSpec:
    return decoder_spec(
        config, family, [flat_rope(config, max_seq_len)], windowed_layers(config), qkv_bias=True
    )


FAMILY = Family(
    model_type="qwen2",
    architecture="Qwen2ForCausalLM",
    defaults={
        "vocab_size": 151936,
        "hidden_size": 4096,
        "intermediate_size": 22016,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 32,
        "hidden_act": "silu",
        "max_position_embeddings": 32768,
        "rms_norm_eps": 1e-6,
        "tie_word_embeddings": False,
        "use_sliding_window": False,
        "sliding_window": 4096,
        "max_window_layers": 28,
    },
    read=_read,
    parts=plain_parts,
    gguf=GgufForm("qwen2"),
)
