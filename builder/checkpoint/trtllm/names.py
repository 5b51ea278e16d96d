"""Where canonical weights lie in a TensorRT-LLM checkpoint: q, k and v in one; `fc` is gate_proj, `gate` is up_proj."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection

from ...spec import DecoderSpec, weight_shapes
from ..families import Family, Part

_MODULES = {
    "o": "attention.dense",
    "q_norm": "attention.q_layernorm",
    "k_norm": "attention.k_layernorm",
    "gate": "mlp.fc",
    "up": "mlp.gate",
    "down": "mlp.proj",
    "attn_norm": "input_layernorm",
    "mlp_norm": "post_layernorm",
}
_POST_NORM_MODULES = {
    "post_attn_norm": "post_layernorm",
    "mlp_norm": "pre_feedforward_layernorm",
    "post_mlp_norm": "post_feedforward_layernorm",
}
_TOP = {"embed": "transformer.vocab_embedding", "final_norm": "transformer.ln_f", "lm_head": "lm_head"}


def with_trtllm_parts(family: Family, names: Collection[str]) -> Family:
    """Return the family with its weights where a TensorRT-LLM checkpoint with tensors of those names has them."""
    has_gate = "transformer.layers.0.mlp.gate.weight" in names
    return dataclasses.replace(family, parts=lambda spec: trtllm_parts(spec, fused_mlp=not has_gate))


def trtllm_parts(spec: DecoderSpec, *, fused_mlp: bool = False) -> dict[str, Part]:
    """Return canonical name -> where it lies.

    fused_mlp : whether up_proj and gate_proj are one tensor `mlp.fc`, up_proj first (Phi 3)
    """
    modules = {**_MODULES, **(_POST_NORM_MODULES if spec.post_norms else {})}
    parts = {}
    for name in weight_shapes(spec):
        *prefix, module, leaf = name.split(".")
        if not prefix:
            parts[name] = Part(f"{_TOP[module]}.{leaf}")
            continue
        layer = f"transformer.layers.{prefix[1]}"
        rows = _qkv_rows(spec).get(module)
        if rows is not None:
            parts[name] = Part(f"{layer}.attention.qkv.{leaf}", rows, spec.q_width + 2 * spec.kv_width)
        elif fused_mlp and module in ("gate", "up"):
            first = spec.intermediate_size if module == "gate" else 0
            parts[name] = Part(
                f"{layer}.mlp.fc.{leaf}", (first, first + spec.intermediate_size), 2 * spec.intermediate_size
            )
        else:
            parts[name] = Part(f"{layer}.{modules[module]}.{leaf}")
    return parts


def _qkv_rows(spec: DecoderSpec) -> dict[str, tuple[int, int]]:
    q, kv = spec.q_width, spec.kv_width
    return {"q": (0, q), "k": (q, q + kv), "v": (q + kv, q + 2 * kv)}
