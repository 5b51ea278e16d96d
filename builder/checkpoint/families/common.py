"""What the families share: the record of a family, the plain fields of a spec, and the plain weight names."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from ...spec import DecoderSpec, LayerSpec, RopeSpec, weight_shapes
from ..config import Config
from ..rope import RopeConfig, make_rope

ACTIVATIONS = {
    "silu": "silu",
    "swish": "silu",
    "gelu": "gelu",
    "gelu_pytorch_tanh": "gelu_tanh",
    "gelu_new": "gelu_tanh",
}


@dataclasses.dataclass(frozen=True)
class Part:
    """Where a canonical weight lies in the checkpoint: a tensor, or some of its rows.

    name : the checkpoint's tensor
    rows : (first, last + 1) of its first axis, or None for all of it
    total_rows : rows of the whole tensor when `rows` is given
    """

    name: str
    rows: tuple[int, int] | None = None
    total_rows: int = 0


@dataclasses.dataclass(frozen=True)
class GgufForm:
    """How GGUF files hold a family.

    architecture : their `general.architecture`
    switches : boolean field of config.json -> the tensor that is there where it is true
    interleaved_qk : whether the rows of q and k lie for rotation by neighbours, the two halves of a head interleaved
    """

    architecture: str
    switches: Mapping[str, str] = dataclasses.field(default_factory=dict)
    interleaved_qk: bool = False


@dataclasses.dataclass(frozen=True)
class Family:
    """One model family as data.

    model_type, architecture : as in config.json
    defaults : transformers' defaults for absent fields
    read : (config, family, max_seq_len) -> spec
    parts : spec -> canonical name -> where it lies
    known_code : the `auto_map` of official checkpoints whose code became transformers' own class
    gguf : None = not read from GGUF files, whose converters change norms or rope factors of such models
    """

    model_type: str
    architecture: str
    defaults: Mapping[str, Any]
    read: Callable[[Config, Family, int], DecoderSpec]
    parts: Callable[[DecoderSpec], dict[str, Part]]
    known_code: Mapping[str, str] = dataclasses.field(default_factory=dict)
    gguf: GgufForm | None = None


def head_dim(config: Config) -> int:
    """Return the columns of a head: `head_dim`, or hidden_size / num_attention_heads where it is absent or null."""
    given = config.optional_integer("head_dim", high=4097)
    heads, hidden = config.integer("num_attention_heads", high=1 << 16), config.integer("hidden_size")
    if given is None and hidden % heads:
        raise config.error(
            f"hidden_size {hidden} is not divisible by num_attention_heads {heads} and there is no head_dim; "
            "the file is damaged"
        )
    size = given or hidden // heads
    if size % 2:
        raise config.error(
            f"a head has {size} columns, rotary embeddings need an even number; check head_dim"
        )
    return size


def flat_rope(config: Config, max_seq_len: int = 0, *, partial: bool = False) -> RopeSpec:
    """Return the model's single rotary embedding from `rope_parameters`, or `rope_theta` and `rope_scaling`.

    partial : whether the family's model rotates part of a head; elsewhere partial_rotary_factor must be 1
    """
    parameters = rope_dict(config, config.raw("rope_scaling") or config.raw("rope_parameters"))
    theta = config.raw("rope_theta")
    factor = config.raw("partial_rotary_factor")
    parameters.setdefault("rope_theta", 10000.0 if theta is None else theta)
    if factor is not None:
        parameters.setdefault("partial_rotary_factor", factor)
    original = config.raw("original_max_position_embeddings")
    if parameters.get("rope_type") in ("llama3", "yarn", "longrope"):
        # transformers lets the field beside the dictionary win over the one in it.
        parameters["original_max_position_embeddings"] = original or parameters.get(
            "original_max_position_embeddings", config.integer("max_position_embeddings")
        )
    rope = RopeConfig(
        parameters,
        where=config.where,
        head_dim=head_dim(config),
        max_position_embeddings=config.integer("max_position_embeddings"),
        max_seq_len=max_seq_len,
    )
    if not partial and rope.rotary_dim != head_dim(config):
        raise config.error(
            f"partial_rotary_factor is {parameters.get('partial_rotary_factor')!r}, models of this type rotate "
            "whole heads; only 1.0 is supported"
        )
    return make_rope(rope)


def rope_dict(config: Config, value: Any) -> dict[str, Any]:
    """Return a copy of a dictionary of rope parameters with `rope_type` in place of the older `type`."""
    if value is None:
        value = {}
    if not isinstance(value, dict):
        raise config.error(f"rope parameters are {value!r}, they must be an object; the file is damaged")
    copy = dict(value)
    copy.setdefault("rope_type", copy.pop("type", None) or "default")
    return copy


def layer_types(config: Config, default: Callable[[int], str]) -> list[str]:
    """Return `layer_types`, or default(layer) for each layer where it is absent or null."""
    count = config.num_layers()
    value = config.raw("layer_types")
    if value is None:
        return [default(n) for n in range(count)]
    if not isinstance(value, list) or len(value) != count:
        got = f"{len(value)} entries" if isinstance(value, list) else repr(value)
        raise config.error(f"layer_types has {got}, wanted {count} (num_hidden_layers); the file is damaged")
    renamed = ["full_attention" if kind == "attention" else kind for kind in value]
    for n, kind in enumerate(renamed):
        if kind not in ("full_attention", "sliding_attention"):
            raise config.error(
                f"layer {n} is of type {kind!r}, supported are 'full_attention' and 'sliding_attention'; "
                "this checkpoint cannot be compiled"
            )
    return renamed


def layers(
    config: Config, types: Sequence[str], window: int | None, ropes: Mapping[str, int] | None = None
) -> tuple[LayerSpec, ...]:
    """Return the layers: `window` for sliding ones, and the rope of the type (0 without `ropes`)."""
    if "sliding_attention" in types and window is None:
        raise config.error("has sliding_attention layers and no sliding_window; the file is damaged")
    ropes = ropes or {}
    return tuple(
        LayerSpec(window=(window or 0) if kind == "sliding_attention" else 0, rope_idx=ropes.get(kind, 0))
        for kind in types
    )


def decoder_spec(
    config: Config,
    family: Family,
    ropes: Sequence[RopeSpec],
    layer_specs: Sequence[LayerSpec],
    *,
    activation_field: str = "hidden_act",
    **features: Any,
) -> DecoderSpec:
    """Return the spec from the fields that all families have; `features` are the family's own."""
    heads = config.integer("num_attention_heads", high=1 << 16)
    kv_heads = config.optional_integer("num_key_value_heads", high=1 << 16) or heads
    if heads % kv_heads:
        raise config.error(
            f"num_attention_heads is {heads}, no multiple of num_key_value_heads {kv_heads}; the file is damaged"
        )
    size = head_dim(config)
    vocab = config.integer("vocab_size", high=1 << 24)
    bos = config.ids("bos_token_id")
    pad = config.optional_integer("pad_token_id", low=-1)
    spec = DecoderSpec(
        family=family.model_type,
        architecture=family.architecture,
        vocab_size=vocab,
        hidden_size=config.integer("hidden_size"),
        intermediate_size=config.integer("intermediate_size"),
        num_layers=config.num_layers(),
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=size,
        max_position_embeddings=config.integer("max_position_embeddings"),
        norm_eps=config.number("rms_norm_eps"),
        activation=config.choice(activation_field, ACTIVATIONS),  # type: ignore[arg-type]
        ropes=tuple(ropes),
        layers=tuple(layer_specs),
        attn_scale=features.pop("attn_scale", size**-0.5),
        tie_embeddings=config.boolean("tie_word_embeddings"),
        bos_token_id=bos[0] if bos else None,
        eos_token_ids=config.ids("eos_token_id"),
        pad_token_id=None if pad == -1 else pad,
    )
    return dataclasses.replace(spec, **features)


_HF_NAMES = {
    "q": "self_attn.q_proj",
    "k": "self_attn.k_proj",
    "v": "self_attn.v_proj",
    "o": "self_attn.o_proj",
    "q_norm": "self_attn.q_norm",
    "k_norm": "self_attn.k_norm",
    "gate": "mlp.gate_proj",
    "up": "mlp.up_proj",
    "down": "mlp.down_proj",
    "attn_norm": "input_layernorm",
    "mlp_norm": "post_attention_layernorm",
}
POST_NORM_NAMES = {
    "post_attn_norm": "post_attention_layernorm",
    "mlp_norm": "pre_feedforward_layernorm",
    "post_mlp_norm": "post_feedforward_layernorm",
}
_TOP_NAMES = {"embed": "model.embed_tokens", "final_norm": "model.norm", "lm_head": "lm_head"}


def plain_parts(spec: DecoderSpec, names: Mapping[str, str] | None = None) -> dict[str, Part]:
    """Return the usual Hugging Face name of every weight; `names` changes some of a layer's modules."""
    modules = {**_HF_NAMES, **(names or {})}
    parts = {}
    for name in weight_shapes(spec):
        *prefix, module, leaf = name.split(".")
        if prefix:
            parts[name] = Part(f"model.layers.{prefix[1]}.{modules[module]}.{leaf}")
        else:
            parts[name] = Part(f"{_TOP_NAMES[module]}.{leaf}")
    return parts
