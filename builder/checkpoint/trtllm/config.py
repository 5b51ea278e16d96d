"""A TensorRT-LLM config.json as the Hugging Face config it was made from, so that the families read both alike.

Absent fields have TensorRT-LLM's defaults, not transformers'. It holds no sliding windows (but for Gemma 3): engines of
that stack get them at run time, and attend to everything without. Mistral, Qwen and Phi are read like that; the windows
of Gemma 2 are the same in every model, so they are taken from the family.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Collection, Mapping
from typing import Any

from ....runtime.errors import CheckpointError
from ..config import Config
from ..families import FAMILIES, Family

_FAMILIES: dict[str, Family] = {family.architecture: family for family in FAMILIES.values()}
_DEFAULTS: dict[str, Any] = {
    "norm_epsilon": 1e-5,
    "rotary_base": 10000.0,
    "rotary_pct": 1.0,
    "position_embedding_type": "learned_absolute",
    "use_parallel_embedding": False,
    "embedding_sharding_dim": 0,
}
_SILU, _GELU = "silu", "gelu_pytorch_tanh"  # its gelu is the tanh form under every name
_ACTIVATIONS = {"silu": _SILU, "gelu": _GELU, "gelu_new": _GELU, "gelu_fast": _GELU, _GELU: _GELU}
_FUSED_ACTIVATIONS = {**_ACTIVATIONS, "swiglu": _SILU, "geglu": _GELU}
_HARMLESS = frozenset(
    [
        "producer",
        "dtype",
        "logits_dtype",
        "rank",
        "decoder",
        "bias",
        "runtime_defaults",
        "disable_weight_only_quant_plugin",
        "seq_length",
        "use_fused_mlp",
        "use_prompt_tuning",
        "use_gemm_woq_plugin",
        "moe_normalization_mode",
        "moe_tp_mode",
        "architecture",
        "quantization",
        "share_embedding_table",
        "tie_word_embeddings",
        "inter_layernorms",
    ]
)
# Parts that other models of the same classes have; at these values they are not there.
_ABSENT_AT: dict[str, tuple[object, ...]] = {
    "rmsnorm": (True,),
    "residual_mlp": (False,),
    "lm_head_bias": (False,),
    "use_logn_attn": (False,),
    "fc_after_embed": (False,),
    "use_input_layernorm_in_first_layer": (True,),
    "use_last_layernorm": (True,),
    "remove_duplicated_kv_heads": (False,),
    "is_pruned": (False,),
    "layer_idx_offset": (0,),
    "num_labels": (1,),
    "embedding_multiplier": (1, None),
    "attention_multiplier": (1, None),
    "residual_multiplier": (1, None),
    "output_multiplier_scale": (1, None),
    "q_scaling": (1, None),
    "clip_qkv": (None,),
    "alibi_bias_max": (0, None),
    "moe_num_experts": (0, None),
    "moe_top_k": (0, None),
    "moe_intermediate_size": (0, None),
    "moe_shared_expert_intermediate_size": (0, None),
    "longrope_short_mscale": (0, None),
    "longrope_long_mscale": (0, None),
}


@dataclasses.dataclass(frozen=True)
class TrtllmConfig:
    """What config.json says.

    hf : the Hugging Face config that it stands for
    tp_size, pp_size : ranks that share each layer, and stages of layers; rank = stage * tp_size + share
    embedding_axis : along which the embedding table is shared out; None = every rank has all of it
    quantization : as it is written; {} = none
    producer : what wrote it
    """

    hf: dict[str, Any]
    tp_size: int
    pp_size: int
    embedding_axis: int | None
    quantization: Mapping[str, Any]
    producer: str

    @property
    def world_size(self) -> int:
        """Number of rank files."""
        return self.tp_size * self.pp_size


def find_family(data: Mapping[str, Any], where: str) -> Family:
    """Return the family of an `architecture`; CheckpointError lists those there are."""
    name = data.get("architecture")
    if not isinstance(name, str) or name not in _FAMILIES:
        raise CheckpointError(
            f"{where}: is a TensorRT-LLM checkpoint of architecture {name!r}, supported are {', '.join(_FAMILIES)}"
        )
    return _FAMILIES[name]


def read_mapping(data: Mapping[str, Any], where: str) -> tuple[int, int]:
    """Return (tp_size, pp_size) of a config.json, which must agree with its world_size."""
    mapping = data.get("mapping")
    if mapping is not None and not isinstance(mapping, dict):
        raise CheckpointError(f"{where}: mapping is {mapping!r}, it must be an object; the file is damaged")
    config = Config(mapping or {}, f"{where}: mapping", {"tp_size": 1, "pp_size": 1, "cp_size": 1})
    tp, pp, cp = (config.integer(f"{name}_size", high=1 << 16) for name in ("tp", "pp", "cp"))
    world = config.integer("world_size", high=1 << 20) if config.has("world_size") else tp * pp * cp
    if tp * pp * cp != world or cp != 1:
        raise CheckpointError(
            f"{where}: mapping has tp_size {tp}, pp_size {pp}, cp_size {cp} and world_size {world}; supported are "
            "cp_size 1 and world_size = tp_size x pp_size; convert the model again with tp_size 1"
        )
    return tp, pp


def read_config(data: Mapping[str, Any], where: str, names: Collection[str]) -> TrtllmConfig:
    """Return what a config.json says; CheckpointError names the field that is missing, wrong or not understood.

    names : of the checkpoint's tensors, which alone say which layers have biases
    """
    family = find_family(data, where)
    config = Config(data, where, _DEFAULTS)
    tp_size, pp_size = read_mapping(data, where)
    config.use("mapping")
    own = _OWN_FIELDS[family.model_type]
    hf = {**_common(config, family, names), **own(config, names)}
    parallel = config.boolean("use_parallel_embedding")
    axis = config.integer("embedding_sharding_dim", low=0, high=2)
    _check_absent_parts(config)
    config.finish(_HARMLESS)
    quantization = data.get("quantization") or {}
    if not isinstance(quantization, dict):
        raise config.error(f"quantization is {quantization!r}, it must be an object; the file is damaged")
    return TrtllmConfig(
        hf,
        tp_size,
        pp_size,
        axis if parallel and tp_size > 1 else None,
        quantization,
        _producer(data.get("producer")),
    )


def _producer(value: Any) -> str:
    if not isinstance(value, dict) or not isinstance(value.get("name"), str):
        return "tensorrt_llm"
    return f"{value['name']} {value.get('version', '')}".strip()


def _common(config: Config, family: Family, names: Collection[str]) -> dict[str, Any]:
    """Return the fields of every family."""
    hidden = config.integer("hidden_size")
    heads = config.integer("num_attention_heads", high=1 << 16)
    layers = config.integer("num_hidden_layers", high=1 << 16)
    head_size = config.optional_integer("head_size", high=4097)
    if head_size is None and hidden % heads:
        raise config.error(f"hidden_size {hidden} is not divisible by num_attention_heads {heads}")
    fused = family.model_type == "phi3"
    activation = config.choice("hidden_act", _FUSED_ACTIVATIONS if fused else _ACTIVATIONS)
    return {
        "model_type": family.model_type,
        "architectures": [family.architecture],
        "vocab_size": config.integer("vocab_size", high=1 << 24),
        "hidden_size": hidden,
        "intermediate_size": config.optional_integer("intermediate_size") or 4 * hidden,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": config.optional_integer("num_key_value_heads", high=1 << 16) or heads,
        "head_dim": head_size or hidden // heads,
        "max_position_embeddings": config.integer("max_position_embeddings"),
        "rms_norm_eps": config.number("norm_epsilon"),
        "hidden_act": activation,
        "tie_word_embeddings": "lm_head.weight" not in names,
        "rope_theta": config.number("rotary_base"),
    }


def _check_absent_parts(config: Config) -> None:
    """Refuse parts of a model that the families do not have."""
    for name, values in _ABSENT_AT.items():
        value = config.raw(name)
        if config.has(name) and not any(
            value == one and isinstance(value, bool) == isinstance(one, bool) for one in values
        ):
            raise config.error(
                f"{name!r} is {value!r}, only {values[0]!r} is supported; it cannot be compiled"
            )
    moe = config.raw("moe")
    if moe is not None and not (isinstance(moe, dict) and not moe.get("num_experts")):
        raise config.error(f"moe is {moe!r}: a mixture of experts, only dense models are supported")


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
        "hidden_activation": config.choice("hidden_act", _ACTIVATIONS),
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
            raise config.error("has scaled rotary embeddings and position_embedding_type 'rope_gpt_neox'; Phi 3 has "
                               "'long_rope' with longrope_scaling_short_factors and longrope_scaling_long_factors")  # fmt: skip
    config.use("rotary_scaling")
    return fields


_OWN_FIELDS: dict[str, Callable[[Config, Collection[str]], dict[str, Any]]] = {
    "llama": _llama,
    "mistral": _mistral,
    "qwen2": _qwen2,
    "qwen3": _qwen3,
    "gemma2": _gemma2,
    "gemma3_text": _gemma3,
    "phi3": _phi3,
}
