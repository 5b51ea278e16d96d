"""QuantizedWeights: a WeightSource that hands out quantized weights as they are stored, or as plain float32."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping
from typing import Protocol

import numpy as np

from ....runtime.errors import CheckpointError
from ...mapped import release_pages
from ...scheme import FP8_MAX, Quantization, QuantizedInput, QuantizedWeight
from ...spec import DecoderSpec, weight_shapes
from ..families import Family, Part
from ..weights import Array, MappedWeights, TensorStore
from .dequantize import dequantize, slice_rows
from .module import FLOATS, Layer, Module, RawStore
from .ranges import input_fault, number_fault, weight_fault
from .reader import Reader

_LINEARS = ("q", "k", "v", "o", "gate", "up", "down", "lm_head")


class QuantizedStore(TensorStore, RawStore, Protocol):
    """What a directory of safetensors gives."""

    def names(self) -> Iterable[str]:
        """Return the names of all tensors."""


def untie_quantized_head(spec: DecoderSpec, store: QuantizedStore) -> DecoderSpec:
    """Return the spec with a head of its own where a tied one was quantized: it is then no longer the table."""
    leaves = [name for name in store.names() if name.startswith("lm_head.")]
    plain = all(name in ("lm_head.weight", "lm_head.bias") and store.dtype(name) in FLOATS for name in leaves)
    return spec if plain else dataclasses.replace(spec, tie_embeddings=False)


class QuantizedWeights(MappedWeights):
    """WeightSource and QuantizedSource over one directory, everything but values checked when made.

    quantization : what it has
    raises : CheckpointError for tensors that are missing, of another shape or type, left over, or that contradict
        the configuration
    """

    def __init__(self, store: QuantizedStore, spec: DecoderSpec, family: Family, reader: Reader) -> None:
        self._raw, self._reader = store, reader
        shapes, parts = weight_shapes(spec), family.parts(spec)
        modules = _modules(store, shapes, parts)
        layers = {name: layer for name, one in modules.items() if (layer := reader.layer(one)) is not None}
        self._layers: dict[str, Layer] = {}
        # The fused tensor that was unpacked last: q, k and v are rows of one, and asked for in turn.
        self._fused: tuple[str, QuantizedWeight] | None = None
        for canonical in _linears(shapes):
            layer = layers.get(_module_of(parts[canonical]))
            if layer is not None:
                self._layers[canonical] = layer
        reader.finish()
        for name in modules.keys() - layers.keys():
            _check_plain(modules[name])
        self._kv = _kv_tensors(store, spec, parts, reader)
        known = {name for module in modules.values() for name in module.used}
        known |= {name for pair in self._kv for name in pair if name is not None}
        super().__init__(store, spec, family, self._layers.keys(), known)
        _check_float(store, parts, self._layers.keys())
        self.quantization = _quantization(self._layers, reader)

    def get(self, name: str) -> Array:
        """Return a weight, a view of the file; one that is quantized as float32, dequantized."""
        if name not in self._layers:
            return super().get(name)
        layer, weight = self._layers[name], self.quantized(name)
        plain = dequantize(weight, layer.scheme, layer.read_input().pre_scale)
        release_pages(weight.codes)
        return plain

    def dtype(self, name: str) -> str:
        """Return how a weight is stored: a float type, or the format of its codes."""
        return self._layers[name].scheme.weight if name in self._layers else super().dtype(name)

    def quantized(self, name: str) -> QuantizedWeight:
        """Return a weight's stored form by its canonical name with ".weight"; KeyError for one that is float.

        raises CheckpointError for codes that are NaN, and scales that are negative or not finite, or whose products
        with codes are not, or vanish
        """
        part = self._parts[name]
        if part.rows is None:
            return self._read(name)
        if self._fused is None or self._fused[0] != part.name:
            self._fused = None  # let go before the next is read
            self._fused = (part.name, self._read(name))
        return slice_rows(self._fused[1], *part.rows)

    def _read(self, name: str) -> QuantizedWeight:
        """Return the whole tensor that a weight is or is a part of, checked."""
        layer = self._layers[name]
        weight, factors = layer.read(), layer.read_input().pre_scale
        largest = 1.0 if factors is None else float(factors.max(initial=1.0))
        self._check(name, weight_fault(weight, layer.scheme, largest))
        return weight

    def quantized_input(self, name: str) -> QuantizedInput:
        """Return what was calibrated for the input of a quantized weight; KeyError for one that is float.

        raises CheckpointError for numbers that are not positive, or that float32 does not hold once they are multiplied
        """
        layer = self._layers[name]
        found = layer.read_input()
        self._check(name, input_fault(found, layer.scheme))
        return found

    def kv_scales(self, layer: int) -> tuple[float, float]:
        """Return the scales of a layer's K and V, 1 where the checkpoint has none and its format allows that."""
        k, v = self._kv[layer]
        return self._kv_scale(k), self._kv_scale(v)

    def _kv_scale(self, name: str | None) -> float:
        if name is None:
            return 1.0
        value = float(self._raw.raw(name).astype(np.float32).reshape(()))
        fault = number_fault(value, FP8_MAX)
        if fault is not None:
            raise CheckpointError(
                f"{self._raw.where}: tensor {name!r} {fault}; the checkpoint is damaged: get it again"
            )
        return value

    def _check(self, name: str, fault: str | None) -> None:
        if fault is not None:
            raise CheckpointError(
                f"{self._raw.where}: layer {_module_of(self._parts[name])!r} cannot be held in float32: {fault}; the "
                "checkpoint is damaged: get it again"
            )


def _linears(shapes: Mapping[str, tuple[int, ...]]) -> list[str]:
    return [name for name in shapes if name.endswith(".weight") and name.split(".")[-2] in _LINEARS]


def _module_of(part: Part) -> str:
    return part.name.removesuffix(".weight")


def _modules(
    store: RawStore, shapes: Mapping[str, tuple[int, ...]], parts: Mapping[str, Part]
) -> dict[str, Module]:
    """Return the checkpoint's linear layers by name; a fused one appears once."""
    modules = {}
    for canonical in _linears(shapes):
        part, (rows, columns) = parts[canonical], shapes[canonical]
        rows = part.total_rows if part.rows is not None else rows
        bias = f"{canonical.removesuffix('.weight')}.bias" in shapes
        modules[_module_of(part)] = Module(store, _module_of(part), (rows, columns), bias)
    return modules


def _check_plain(module: Module) -> None:
    """Raise CheckpointError for a layer that the configuration leaves out and that is no float."""
    if module.has("weight") and not module.is_float:
        raise module.error(
            f"is stored as {module.dtype('weight')}, and only linear layers that the quantization config names may be "
            "quantized; the config and the weights do not belong together"
        )


def _check_float(store: RawStore, parts: Mapping[str, Part], quantized: Iterable[str]) -> None:
    """Raise CheckpointError for a weight that no reader took and that is no float."""
    for part in {part.name: part for name, part in parts.items() if name not in set(quantized)}.values():
        if store.dtype(part.name) not in FLOATS:
            raise CheckpointError(
                f"{store.where}: tensor {part.name!r} is stored as {store.dtype(part.name)}, and only linear layers "
                "that the quantization config names may be quantized; give a checkpoint whose embedding, norms and "
                "biases are float"
            )


def _kv_tensors(
    store: RawStore, spec: DecoderSpec, parts: Mapping[str, Part], reader: Reader
) -> list[tuple[str | None, str | None]]:
    """Return the names of each layer's scales of K and V; none where the cache is float."""
    if reader.kv == "float":
        return []
    found = []
    for n in range(spec.num_layers):
        attention = _module_of(parts[f"layers.{n}.k.weight"]).rpartition(".")[0]
        k, v = (f"{attention}.{leaf}" for leaf in reader.kv_names)
        found.append((_kv_tensor(store, k, reader), _kv_tensor(store, v, reader)))
    return found


def _kv_tensor(store: RawStore, name: str, reader: Reader) -> str | None:
    if not store.has(name):
        if reader.needs_kv_scales:
            raise CheckpointError(
                f"{store.where}: tensor {name!r} is missing, an {reader.kv} KV cache needs it; quantize the checkpoint "
                "again with calibration of the KV cache"
            )
        return None
    if store.dtype(name) not in FLOATS or store.shape(name) not in ((), (1,)):
        raise CheckpointError(
            f"{store.where}: tensor {name!r} is {store.dtype(name)} {list(store.shape(name))}, wanted one float "
            "number: scales of single heads are not supported"
        )
    return name


def _quantization(layers: Mapping[str, Layer], reader: Reader) -> Quantization:
    recipes = {layer.recipe for layer in layers.values()}
    if recipes == {"int4_awq", "int4_wo"}:
        recipes = {"int4_awq"}  # the factors of some layers went into the norm or the layer before
    schemes = tuple((name.removesuffix(".weight"), layer.scheme) for name, layer in layers.items())
    name = "none" if not recipes else recipes.pop() if len(recipes) == 1 else "mixed"
    return Quantization(name, reader.producer, schemes, reader.kv)
