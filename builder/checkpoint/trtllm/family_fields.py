"""What the families of a TensorRT-LLM config.json have of their own, as the fields of a Hugging Face config."""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Any

from ..config import Config

_SILU, _GELU = "silu", "gelu_pytorch_tanh"  # its gelu is the tanh form under every name
ACTIVATIONS = {"silu": _SILU, "gelu": _GELU, "gelu_new": _GELU, "gelu_fast": _GELU, _GELU: _GELU}
FUSED_ACTIVATIONS = {**ACTIVATIONS, "swiglu": _SILU, "geglu": _GELU}


def _rotary_dim(config: Config, factor: float) -> None:
    """Refuse a number of rotated columns that is another than the family's."""
    size = config.optional_integer("head_size", high=4097) or (
        config.integer("hidden_size") // config.integer("num_attention_heads", high=1 << 16)
    )
    for name in ("rotary_embedding_dim", "rotary_dim"):
        given = config.optional_integer(name, high=4097)
        if given is not None and given != int(size * factor):
            raise config.error(
                f"{name} is {given}, {int(size * factor)} of a head's {size} columns are rotated here"
            )


def _whole_rotary(config: Config) -> None:
    """Refuse a model that rotates part of a head, or positions of another kind than rotary embeddings."""
    config.choice("position_embedding_type", {"rope_gpt_neox": "rope"})
    if config.number("rotary_pct") != 1.0:
        raise config.error(
            f"rotary_pct is {config.raw('rotary_pct')!r}, models of this type rotate whole heads"
        )
    _rotary_dim(config, 1.0)


def _scaling(config: Config) -> dict[str, Any] | None:
    """Return rotary_scaling, with TensorRT-LLM's defaults where Llama 3's numbers are not given."""
    value = config.raw("rotary_scaling")
    if value is None:
        return None
    if not isinstance(value, dict):
        raise config.error(f"rotary_scaling is {value!r}, it must be an object or null; the file is damaged")
    scaling = dict(value)
    kind = scaling.pop("type", None)
    scaling.setdefault("rope_type", kind or "default")
    theta = scaling.pop("rope_theta", None)
    if theta is not None and theta != config.raw("rotary_base"):
        raise config.error(
            f"rotary_scaling has rope_theta {theta!r} and rotary_base is {config.raw('rotary_base')!r}; make them equal"
        )
    if scaling["rope_type"] == "llama3":
        defaults = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
        scaling = {**defaults, "original_max_position_embeddings": 8192, **scaling}
    return scaling


def _has_bias(config: Config, names: Collection[str], field: str, module: str) -> bool:
    """Return whether the first layer's module has a bias, which the field must not deny."""
    found = f"transformer.layers.0.{module}.bias" in names
    if config.has(field) and config.boolean(field) != found:
        raise config.error(
            f"{field} is {config.raw(field)!r}, but 'transformer.layers.0.{module}.bias' is "
            f"{'there' if found else 'missing'}; the weights and config.json do not belong together"
        )
    return found


def _no_norms_of_heads(config: Config) -> None:
    if config.has("qk_layernorm") and config.boolean("qk_layernorm"):
        raise config.error("qk_layernorm is True, models of this type have no norms on q and k")


def _llama(config: Config, names: Collection[str]) -> dict[str, Any]:
    _whole_rotary(config)
    _no_norms_of_heads(config)
    return {
        "attention_bias": _has_bias(config, names, "attn_bias", "attention.qkv"),
        "mlp_bias": _has_bias(config, names, "mlp_bias", "mlp.fc"),
        "rope_scaling": _scaling(config),
    }


def _mistral(config: Config, names: Collection[str]) -> dict[str, Any]:
    fields = _llama(config, names)
    if fields.pop("attention_bias") or fields.pop("mlp_bias"):
        raise config.error("there are biases, models of this type have none")
    return {**fields, "sliding_window": None}


def _qwen(config: Config, names: Collection[str], kind: str) -> dict[str, Any]:
    _whole_rotary(config)
    if config.raw("qwen_type") not in (None, kind):
        raise config.error(
            f"qwen_type is {config.raw('qwen_type')!r}, for this architecture only {kind!r} is supported"
        )
    if _has_bias(config, names, "mlp_bias", "mlp.fc"):
        raise config.error("mlp_bias is True, models of this type have none")
    return {"rope_scaling": _scaling(config), "use_sliding_window": False}


def _qwen2(config: Config, names: Collection[str]) -> dict[str, Any]:
    _no_norms_of_heads(config)
    fields = _qwen(config, names, "qwen2")
    if config.has("attn_bias") and not config.boolean("attn_bias"):
        raise config.error("attn_bias is False, models of this type have biases on q, k and v")
    return fields


def _qwen3(config: Config, names: Collection[str]) -> dict[str, Any]:
    config.raw("qk_layernorm")  # some versions leave it false, although the norms are there
    bias = _has_bias(config, names, "attn_bias", "attention.qkv")
    return {**_qwen(config, names, "qwen3"), "attention_bias": bias}


def _gemma(config: Config, names: Collection[str]) -> dict[str, Any]:
    _whole_rotary(config)
    if _has_bias(config, names, "mlp_bias", "mlp.fc"):
        raise config.error("mlp_bias is True, models of this type have none")
    return {
        "hidden_activation": config.choice("hidden_act", ACTIVATIONS),
        "query_pre_attn_scalar": config.number("query_pre_attn_scalar"),
        "final_logit_softcapping": config.optional_number("final_logit_softcapping"),
        "attn_logit_softcapping": config.optional_number("attn_logit_softcapping"),
        "attention_bias": _has_bias(config, names, "attn_bias", "attention.qkv"),
    }


def _gemma2(config: Config, names: Collection[str]) -> dict[str, Any]:
    _no_norms_of_heads(config)
    window = {"sliding_window": config.integer("sliding_window")} if config.has("sliding_window") else {}
    return {**_gemma(config, names), "rope_scaling": _scaling(config), **window}


def _gemma3(config: Config, names: Collection[str]) -> dict[str, Any]:
    config.raw("qk_layernorm")
    pattern = next(
        (one for one in ("_sliding_window_pattern", "sliding_window_pattern") if config.has(one)), None
    )
    config.use("_sliding_window_pattern", "sliding_window_pattern")
    if pattern is None:
        raise config.error("'sliding_window_pattern' is missing, Gemma 3 needs it; convert the model again")
    return {
        **_gemma(config, names),
        "sliding_window": config.integer("sliding_window"),
        "sliding_window_pattern": config.integer(pattern),
        "rope_local_base_freq": config.number("rope_local_base_freq"),
        "rope_scaling": _scaling(config),
    }


def _phi3(config: Config, names: Collection[str]) -> dict[str, Any]:
    _no_norms_of_heads(config)
    positions = config.choice(
        "position_embedding_type", {"rope_gpt_neox": "default", "long_rope": "longrope"}
    )
    factor = config.number("rotary_pct")
    _rotary_dim(config, factor)
    fields: dict[str, Any] = {"partial_rotary_factor": factor, "sliding_window": None}
    short, long = config.raw("longrope_scaling_short_factors"), config.raw("longrope_scaling_long_factors")
    if positions == "longrope":
        fields["rope_scaling"] = {"rope_type": "longrope", "short_factor": short, "long_factor": long}
        fields["original_max_position_embeddings"] = config.integer("original_max_position_embeddings")
    else:
        original = config.optional_integer("original_max_position_embeddings")
        fields["original_max_position_embeddings"] = original or config.integer("max_position_embeddings")
        if short is not None or long is not None or _scaling(config) not in (None, {"rope_type": "default"}):
            raise config.error(
                "has scaled rotary embeddings and position_embedding_type 'rope_gpt_neox'; Phi 3 has 'long_rope' with "
                "longrope_scaling_short_factors and longrope_scaling_long_factors"
            )
    config.use("rotary_scaling")
    return fields


OWN_FIELDS: dict[str, Callable[[Config, Collection[str]], dict[str, Any]]] = {
    "llama": _llama,
    "mistral": _mistral,
    "qwen2": _qwen2,
    "qwen3": _qwen3,
    "gemma2": _gemma2,
    "gemma3_text": _gemma3,
    "phi3": _phi3,
}
