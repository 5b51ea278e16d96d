"""A model in which some layers are quantized and the others are the unquantized checkpoint's.

A layer here is a decoder block ("layers.3"), the head ("lm_head", with an embedding that shares its bits), or the KV
cache of all blocks ("kv_cache").
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from typing import Any

import numpy.typing as npt

from ..builder.checkpoint import Checkpoint, WeightSource
from ..builder.precision import Precision
from ..builder.scheme import FLOAT, ROW, WHOLE, KvFormat, QuantizedInput, QuantizedWeight, Scheme
from ..builder.spec import DecoderSpec, weight_shapes

HEAD, KV_CACHE = "lm_head", "kv_cache"


def quantized_layers(spec: DecoderSpec, recipe: Precision) -> tuple[str, ...]:
    """Return the layers that a recipe quantizes, in the model's order."""
    blocks = [f"layers.{n}" for n in range(spec.num_layers)]
    found = [
        block for block in blocks if any(_scheme(spec, recipe, name) != FLOAT for name in _products(block))
    ]
    if _scheme(spec, recipe, HEAD) != FLOAT:
        found.append(HEAD)
    if recipe.kv in ("fp8", "int8"):
        found.append(KV_CACHE)
    return tuple(found)


def _products(block: str) -> list[str]:
    return [f"{block}.{name}" for name in ("q", "k", "v", "o", "gate", "up", "down")]


def _weight_of(spec: DecoderSpec, name: str) -> str:
    return "embed.weight" if name == HEAD and spec.tie_embeddings else f"{name}.weight"


def _scheme(spec: DecoderSpec, recipe: Precision, name: str) -> Scheme:
    return recipe.scheme(name, weight_shapes(spec)[_weight_of(spec, name)][1])


def layer_bytes(spec: DecoderSpec, recipe: Precision, layer: str) -> tuple[int, int]:
    """Return the bytes of a layer's matrices and scales as quantized, and of the matrices in 16 bits."""
    names = [] if layer == KV_CACHE else [HEAD] if layer == HEAD else _products(layer)
    quantized = floats = 0
    for name in names:
        n, k = weight_shapes(spec)[_weight_of(spec, name)]
        scheme = _scheme(spec, recipe, name)
        groups = {WHOLE: 1, ROW: n}.get(scheme.weight_group) or n * (k // scheme.weight_group)
        scales = 0 if scheme.weight == "float" else groups * (1 if scheme.weight == "fp4" else 4)
        quantized += n * k * scheme.weight_bits // 8 + scales
        floats += n * k * 2
    return quantized, floats


@dataclasses.dataclass(frozen=True)
class Mixed:
    """Weights and a precision, some layers quantized and the rest in float."""

    spec: DecoderSpec
    weights: WeightSource
    recipe: Precision


def mixed(checkpoint: Checkpoint, recipe: Precision, against: Checkpoint, quantized: Iterable[str]) -> Mixed:
    """Return a model in which only the named layers are quantized; the others are the unquantized checkpoint's."""
    chosen = frozenset(quantized)
    num_layers = checkpoint.spec.num_layers
    floats = tuple(
        name for n in range(num_layers) if f"layers.{n}" not in chosen for name in _products(f"layers.{n}")
    )
    weights = _MixedWeights(checkpoint.weights, against.weights, chosen)
    if recipe.quantization is None:
        changed = dataclasses.replace(
            recipe,
            kept_float=floats,
            head_bits=recipe.head_bits if HEAD in chosen else 32,
            float_type="float32",
        )
        return Mixed(checkpoint.spec, weights, changed)
    schemes = tuple(
        (name, one)
        for name, one in recipe.quantization.schemes
        if _layer_of(name) in chosen and name not in floats
    )
    is_plain = recipe.quantization.kv != "float" and KV_CACHE not in chosen
    kv: KvFormat = "float" if is_plain else recipe.quantization.kv
    held: KvFormat | None = (
        "float" if is_plain else recipe.kv_format
    )  # the original's float32, not a default of the target
    quantization = dataclasses.replace(recipe.quantization, schemes=schemes, kv=kv)
    head_bits = recipe.head_bits if HEAD in chosen else 32
    changed = dataclasses.replace(
        recipe, quantization=quantization, float_type="float32", head_bits=head_bits, kv_format=held
    )
    return Mixed(checkpoint.spec, weights, changed)


def _layer_of(name: str) -> str:
    """Return the layer that a weight or a product belongs to; norms and embeddings outside of blocks are the head's."""
    return ".".join(name.split(".")[:2]) if name.startswith("layers.") else HEAD


class _MixedWeights:
    """A WeightSource: the quantized checkpoint's where a layer is quantized, the original's elsewhere."""

    def __init__(self, quantized: WeightSource, original: WeightSource, chosen: frozenset[str]) -> None:
        self._quantized, self._original, self._chosen = quantized, original, chosen

    def names(self) -> tuple[str, ...]:
        return self._quantized.names()

    def shape(self, name: str) -> tuple[int, ...]:
        return self._quantized.shape(name)

    def get(self, name: str) -> npt.NDArray[Any]:
        if _layer_of(name) in self._chosen:
            return self._quantized.get(name)
        if name == "lm_head.weight" and name not in self._original.names():
            name = "embed.weight"  # the original's head is tied, the quantized one's a copy
        return self._original.get(name)

    def quantized(self, name: str) -> QuantizedWeight:
        return self._quantized.quantized(name)  # type: ignore[attr-defined, no-any-return]

    def quantized_input(self, name: str) -> QuantizedInput:
        return self._quantized.quantized_input(name)  # type: ignore[attr-defined, no-any-return]

    def kv_scales(self, layer: int) -> tuple[float, float]:
        return self._quantized.kv_scales(layer)  # type: ignore[attr-defined, no-any-return]
