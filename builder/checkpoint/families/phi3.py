"""Phi 3, 3.5 and 4-mini: q, k and v in one tensor, gate and up in another, partial rotary embeddings, LongRoPE."""

from __future__ import annotations

import dataclasses

from ...spec import DecoderSpec
from ..config import Config
from .common import Family, Part, decoder_spec, flat_rope, layers, plain_parts, rope_dict


def _read(config: Config, family: Family, max_seq_len: int) -> DecoderSpec:
    window = config.optional_integer("sliding_window")
    kind = "full_attention" if window is None else "sliding_attention"
    types = [kind] * config.num_layers()
    if config.raw("layer_types") not in (None, types):
        raise config.error(f"layer_types is not {kind!r} for every layer, as models of type 'phi3' have it")
    original = config.integer("original_max_position_embeddings")
    rope = flat_rope(_with_longrope_name(config), max_seq_len, partial=True)
    if rope.kind not in ("default", "longrope"):
        raise config.error(f"rope type is {rope.kind!r}, Phi 3 has 'default' and 'longrope' only")
    spec = decoder_spec(config, family, [rope], layers(config, types, window))
    if rope.kind == "longrope" and max_seq_len <= original:
        # The short factors hold for this length only, so an engine built with them cannot be asked for more.
        limit = min(original, spec.max_position_embeddings)
        spec = dataclasses.replace(spec, max_position_embeddings=limit)
    return spec


def _with_longrope_name(config: Config) -> Config:
    """Name the rope type 'longrope' where the first files called it 'su' or 'yarn'."""
    for field in ("rope_scaling", "rope_parameters"):
        if config.raw(field) is not None:
            parameters = rope_dict(config, config.raw(field))
            if parameters["rope_type"] in ("su", "yarn"):
                config = config.replaced(field, {**parameters, "rope_type": "longrope"})
    return config


def _parts(spec: DecoderSpec) -> dict[str, Part]:
    parts = plain_parts(spec)
    fused = {
        "self_attn.qkv_proj": [("q", spec.q_width), ("k", spec.kv_width), ("v", spec.kv_width)],
        "mlp.gate_up_proj": [("gate", spec.intermediate_size), ("up", spec.intermediate_size)],
    }
    for n in range(spec.num_layers):
        for module, pieces in fused.items():
            total, first = sum(rows for _, rows in pieces), 0
            for name, rows in pieces:
                tensor = f"model.layers.{n}.{module}.weight"
                parts[f"layers.{n}.{name}.weight"] = Part(tensor, (first, first + rows), total)
                first += rows
    return parts


FAMILY = Family(
    model_type="phi3",
    architecture="Phi3ForCausalLM",
    defaults={
        "vocab_size": 32064,
        "hidden_size": 3072,
        "intermediate_size": 8192,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "hidden_act": "silu",
        "max_position_embeddings": 4096,
        "original_max_position_embeddings": 4096,
        "rms_norm_eps": 1e-5,
        "tie_word_embeddings": False,
        "bos_token_id": 1,
        "eos_token_id": 32000,
        "pad_token_id": 32000,
    },
    read=_read,
    parts=_parts,
    known_code={
        "AutoConfig": "configuration_phi3.Phi3Config",
        "AutoModelForCausalLM": "modeling_phi3.Phi3ForCausalLM",
        "AutoTokenizer": "Xenova/gpt-4o",
    },
)
