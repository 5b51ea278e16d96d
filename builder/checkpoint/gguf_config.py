"""GGUF metadata as a config.json, so that the families read both alike."""

from __future__ import annotations

import re
from typing import Any

import numpy as np

from ...runtime.errors import CheckpointError
from .families import FAMILIES
from .gguf_file import GgufFile

_FAMILIES = {family.gguf.architecture: family for family in FAMILIES.values() if family.gguf is not None}
_FIELDS = {  # after "<architecture>." -> field of config.json
    "block_count": "num_hidden_layers",
    "context_length": "max_position_embeddings",
    "embedding_length": "hidden_size",
    "feed_forward_length": "intermediate_size",
    "attention.head_count": "num_attention_heads",
    "attention.head_count_kv": "num_key_value_heads",
    "attention.key_length": "head_dim",
    "attention.layer_norm_rms_epsilon": "rms_norm_eps",
    "rope.freq_base": "rope_theta",
}
_USED = {
    *_FIELDS,
    "attention.value_length",
    "rope.dimension_count",
    "rope.scaling.type",
    "rope.scaling.factor",
    "rope.scaling.original_context_length",
    "rope.scaling.finetuned",
    "vocab_size",
    "expert_count",
    "expert_used_count",
}
_NEEDED = [
    "block_count",
    "context_length",
    "embedding_length",
    "feed_forward_length",
    "attention.head_count",
    "attention.layer_norm_rms_epsilon",
]
_MODULES = {
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_TOP = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
ROPE_FACTORS = "rope_freqs.weight"  # (head_dim / 2,) float32: rope type llama3, one divisor a frequency
_LAYER = re.compile(r"blk\.(\d+)\.(\w+)\.(weight|bias)")


def hf_name(name: str) -> str:
    """Return a GGUF tensor's Hugging Face name, or the name itself where it has none."""
    match = _LAYER.fullmatch(name)
    if match and match[2] in _MODULES:
        return f"model.layers.{int(match[1])}.{_MODULES[match[2]]}.{match[3]}"
    return _TOP.get(name, name)


def config_from_gguf(file: GgufFile) -> dict[str, Any]:
    """Return the config.json that the metadata stands for; CheckpointError names a key that is not supported."""
    arch = file.metadata.get("general.architecture")
    if not isinstance(arch, str) or arch not in _FAMILIES:
        raise file.error(
            f"is a GGUF of architecture {arch!r}, readable are {', '.join(_FAMILIES)}; "
            "give the model's Hugging Face directory instead"
        )
    values = _own_values(file, arch)
    family = _FAMILIES[arch]
    config: dict[str, Any] = {"model_type": family.model_type, "architectures": [family.architecture]}
    for key, field in _FIELDS.items():
        if key in values:
            config[field] = _shortest(values[key])
    tensors = set(file.names())
    if "token_embd.weight" not in tensors:
        raise file.error("has no tensor token_embd.weight; give a file with a whole model")
    config["vocab_size"] = file.shape("token_embd.weight")[0]
    config["tie_word_embeddings"] = "output.weight" not in tensors
    assert family.gguf is not None
    config.update({field: tensor in tensors for field, tensor in family.gguf.switches.items()})
    _add_rope(file, values, config)
    return {**config, **token_ids(file)}


def _own_values(file: GgufFile, arch: str) -> dict[str, Any]:
    prefix = arch + "."
    values = {key[len(prefix) :]: value for key, value in file.metadata.items() if key.startswith(prefix)}
    if values.get("expert_count"):
        raise file.error(
            f"is a mixture of experts (expert_count {values['expert_count']}), only dense models are supported"
        )
    unknown = sorted(set(values) - _USED)
    if unknown:
        raise file.error(f"has metadata that plansmith does not know for {arch}: {', '.join(unknown)}")
    missing = [key for key in _NEEDED if key not in values]
    if missing:
        raise file.error(f"lacks the metadata {', '.join(prefix + key for key in missing)}; convert it again")
    return values


def _shortest(value: Any) -> Any:
    """Return 1e-05 for the float32 9.99999974e-06: the decimal that config.json would have had."""
    return float(str(np.float32(value))) if isinstance(value, float) else value


def _add_rope(file: GgufFile, values: dict[str, Any], config: dict[str, Any]) -> None:
    config.setdefault("rope_theta", 10000.0)
    heads, hidden = config.get("num_attention_heads"), config.get("hidden_size")
    if isinstance(heads, int) and isinstance(hidden, int) and heads > 0:
        config.setdefault("head_dim", hidden // heads)
    size = config.get("head_dim")
    for key in ("rope.dimension_count", "attention.value_length"):
        if values.get(key, size) != size:
            raise file.error(f"has {key} {values[key]}, only the head size {size} is supported")
    kind = values.get("rope.scaling.type", "none")
    if kind == "none":
        return
    if kind not in ("linear", "yarn"):
        raise file.error(f"has rope.scaling.type {kind!r}, readable are none, linear and yarn")
    config["rope_scaling"] = {"rope_type": kind, "factor": _shortest(values.get("rope.scaling.factor"))}
    if kind == "yarn":
        config["rope_scaling"]["original_max_position_embeddings"] = values.get(
            "rope.scaling.original_context_length", config.get("max_position_embeddings")
        )


def token_ids(file: GgufFile) -> dict[str, Any]:
    """Return bos_token_id, eos_token_id and pad_token_id as a config has them, None where the file has none."""
    meta = file.metadata
    ends = [meta.get("tokenizer.ggml.eos_token_id"), meta.get("tokenizer.ggml.eot_token_id")]
    ids = list(dict.fromkeys(token_id for token_id in ends if token_id is not None))
    return {
        "bos_token_id": meta.get("tokenizer.ggml.bos_token_id"),
        "eos_token_id": ids[0] if len(ids) == 1 else ids or None,
        "pad_token_id": meta.get("tokenizer.ggml.padding_token_id"),
    }


def rope_factors(file: GgufFile, rotary_dim: int) -> np.ndarray[Any, np.dtype[np.float32]] | None:
    """Return the divisors of the rotary frequencies, (rotary_dim / 2,) float32, or None; CheckpointError if odd."""
    if ROPE_FACTORS not in file.names():
        return None
    factors = file.get(ROPE_FACTORS).astype(np.float32)
    if factors.shape != (rotary_dim // 2,) or not np.all(np.isfinite(factors)) or not np.all(factors > 0):
        raise CheckpointError(
            f"{file.where}: {ROPE_FACTORS} has shape {list(factors.shape)}, wanted {rotary_dim // 2} positive numbers"
        )
    return factors
