"""A TensorRT-LLM config.json as the Hugging Face config it was made from, so that the families read both alike.

Absent fields have TensorRT-LLM's defaults, not transformers'. It holds no sliding windows (but for Gemma 3): engines of
that stack get them at run time, and attend to everything without. Mistral, Qwen and Phi are read like that; the windows
of Gemma 2 are the same in every model, so they are taken from the family.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Mapping
from typing import Any

from ....runtime.errors import CheckpointError
from ..config import Config
from ..families import FAMILIES, Family
from .family_fields import ACTIVATIONS, FUSED_ACTIVATIONS, OWN_FIELDS

_FAMILIES: dict[str, Family] = {family.architecture: family for family in FAMILIES.values()}
_DEFAULTS: dict[str, Any] = {
    "norm_epsilon": 1e-5,
    "rotary_pct": 1.0,
    "position_embedding_type": "learned_absolute",
    "use_parallel_embedding": False,
    "embedding_sharding_dim": 0,
}
# Bookkeeping, how that stack runs the model, and fields that the tensors themselves tell.
_HARMLESS = (
    "producer", "dtype", "logits_dtype", "kv_dtype", "rank", "decoder", "bias", "seq_length", "architecture",
    "quantization", "share_embedding_table", "tie_word_embeddings", "inter_layernorms", "use_fused_mlp",
    "use_prompt_tuning", "use_gemm_woq_plugin", "disable_weight_only_quant_plugin", "moe_normalization_mode",
    "moe_tp_mode",
)  # fmt: skip
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
    "enable_pos_shift": (False,),
    "dense_context_fmha": (False,),
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
    own = OWN_FIELDS[family.model_type]
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
    layers = config.num_layers()
    head_size = config.optional_integer("head_size", high=4097)
    if head_size is None and hidden % heads:
        raise config.error(f"hidden_size {hidden} is not divisible by num_attention_heads {heads}")
    fused = family.model_type == "phi3"
    activation = config.choice("hidden_act", FUSED_ACTIVATIONS if fused else ACTIVATIONS)
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
        "rope_theta": _theta(config),
    }


def _theta(config: Config) -> float:
    """Return rotary_base, which every converter writes; ModelOpt with transformers 5 loses it and rotary_scaling."""
    if config.raw("rotary_base") is None:
        raise config.error(
            "'rotary_base' is missing: ModelOpt's export under transformers 5 loses it; add the model's rope_theta as "
            "rotary_base, and its rope scaling, if it has one, as rotary_scaling"
        )
    return config.number("rotary_base")


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
    _check_runtime_defaults(config)
    moe = config.raw("moe")
    if moe is not None and not (isinstance(moe, dict) and not moe.get("num_experts")):
        raise config.error(f"moe is {moe!r}: a mixture of experts, only dense models are supported")


def _check_runtime_defaults(config: Config) -> None:
    """Refuse windows of attention that a model's defaults for the runtime set."""
    defaults = config.raw("runtime_defaults") or {}
    cache = defaults.get("kv_cache_config") if isinstance(defaults, dict) else defaults
    if cache and not (isinstance(cache, dict) and cache.get("max_attention_window") is None):
        raise config.error(
            f"runtime_defaults is {str(defaults)[:80]}: attention windows are not read from there; set it to null if "
            "the model attends to everything"
        )
