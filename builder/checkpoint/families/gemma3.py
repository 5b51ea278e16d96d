"""Gemma 3, text models: Gemma 2 with norms on q and k, no attention cap, and a rope of its own for windowed layers."""

from __future__ import annotations

from typing import Any

from ...spec import DecoderSpec, RopeSpec
from ..config import Config
from ..rope import RopeConfig, make_rope
from .common import Family, decoder_spec, head_dim, layer_types, layers, rope_dict
from .gemma2 import GEMMA_DEFAULTS, gemma_features, gemma_parts

_TYPES = ("full_attention", "sliding_attention")


def _rope_dicts(config: Config) -> dict[str, dict[str, Any]]:
    """Return one dictionary a layer type, from the nested form or from rope_theta and rope_local_base_freq."""
    nested = config.raw("rope_parameters") or {}
    if not isinstance(nested, dict) or set(nested) - set(_TYPES):
        raise config.error(
            f"rope_parameters is {nested!r}, wanted one object for each of {', '.join(_TYPES)}; "
            "the file is damaged"
        )
    dicts = {kind: rope_dict(config, nested.get(kind)) for kind in _TYPES}
    if config.raw("rope_scaling") is not None:  # the older form: for the full-attention layers only
        dicts["full_attention"].update(rope_dict(config, config.raw("rope_scaling")))
    for kind, field, theta in (
        ("full_attention", "rope_theta", 1_000_000.0),
        ("sliding_attention", "rope_local_base_freq", 10_000.0),
    ):
        given = config.raw(field)
        dicts[kind].setdefault("rope_theta", theta if given is None else given)
    return dicts


def _ropes(config: Config) -> list[RopeSpec]:
    ropes = []
    for kind, parameters in _rope_dicts(config).items():
        if parameters["rope_type"] not in ("default", "linear"):
            raise config.error(
                f"rope type of {kind} is {parameters['rope_type']!r}, supported for Gemma 3 are default and linear"
            )
        rope = RopeConfig(
            parameters,
            where=f"{config.where}: {kind}",
            head_dim=head_dim(config),
            max_position_embeddings=config.integer("max_position_embeddings"),
        )
        if rope.rotary_dim != head_dim(config):
            raise config.error("partial_rotary_factor is not 1.0, Gemma 3 rotates whole heads")
        ropes.append(make_rope(rope))
    return ropes


def _read(config: Config, family: Family, max_seq_len: int) -> DecoderSpec:
    if config.raw("attn_logit_softcapping") is not None:
        raise config.error(
            f"attn_logit_softcapping is {config.raw('attn_logit_softcapping')!r}, Gemma 3 has none (transformers "
            "ignores it); set it to null"
        )
    # Newer files hold layer_types, older ones the length of the pattern, the oldest neither: then it is 6.
    config.use("_sliding_window_pattern")
    pattern = config.integer("sliding_window_pattern")
    types = layer_types(config, lambda n: "sliding_attention" if (n + 1) % pattern else "full_attention")
    return decoder_spec(
        config,
        family,
        _ropes(config),
        layers(
            config, types, config.optional_integer("sliding_window"), {k: n for n, k in enumerate(_TYPES)}
        ),
        qk_norm=True,
        **gemma_features(config),
    )


FAMILY = Family(
    model_type="gemma3_text",
    architecture="Gemma3ForCausalLM",
    defaults={
        **GEMMA_DEFAULTS,
        "vocab_size": 262208,
        "max_position_embeddings": 131072,
        "sliding_window_pattern": 6,
    },
    read=_read,
    parts=gemma_parts,
)
