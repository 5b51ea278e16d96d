"""Random weights in every quantized form, in memory, for tests that need no checkpoint.

Usage: `held = quantization(spec, SCHEMES["fp8"])` says how each layer of `spec = quantized_spec()` is held, and
`build_graph(spec, RandomQuantizedWeights(spec, held), of_checkpoint(held, "float32"), limits)` is its graph.
"""

from __future__ import annotations

import dataclasses
import zlib
from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt
from plansmith.builder.scheme import (
    FP4_GROUP,
    FP4_MAX,
    FP8_MAX,
    INT8_MAX,
    ROW,
    WHOLE,
    KvFormat,
    Quantization,
    QuantizedInput,
    QuantizedWeight,
    Scheme,
)
from plansmith.builder.spec import DecoderSpec, weight_shapes
from tiny_graph import tiny_spec

Array = npt.NDArray[Any]

SCHEMES: dict[str, Scheme] = {
    "int8_wo": Scheme("int8", ROW),
    "int8_groups": Scheme("int8", 32),
    "int4_32": Scheme("int4", 32),
    "int4_64": Scheme("int4", 64),
    "int4_128": Scheme("int4", 128),
    "int4_outputs": Scheme("int4", ROW),
    "int4_zeros": Scheme("int4", 32, zero_points=True),
    "int4_awq": Scheme("int4", 32, pre_scale=True),
    "int4_awq_zeros": Scheme("int4", 64, zero_points=True, pre_scale=True),
    "int8_sq": Scheme("int8", ROW, input="int8", input_group=WHOLE, pre_scale=True),
    "int8_static": Scheme("int8", ROW, input="int8", input_group=WHOLE),
    "int8_rows": Scheme("int8", ROW, input="int8", input_group=ROW),
    "int8_row_groups": Scheme("int8", ROW, input="int8", input_group=32),
    "int4_int8_rows": Scheme("int4", 32, input="int8", input_group=ROW),
    "int4_int8_groups": Scheme("int4", 32, input="int8", input_group=32),
    "fp8_wo": Scheme("fp8", ROW),
    "fp8": Scheme("fp8", WHOLE, input="fp8", input_group=WHOLE),
    "fp8_rows": Scheme("fp8", ROW, input="fp8", input_group=ROW),
    "fp8_blocks": Scheme("fp8", 32, input="fp8", input_group=32),
    "fp8_blocks_128": Scheme("fp8", 128, input="fp8", input_group=128),
    "w4a8": Scheme("int4", 32, input="fp8", input_group=WHOLE, pre_scale=True, fp8_grid=True),
    "nvfp4_wo": Scheme("fp4", FP4_GROUP),
    "nvfp4": Scheme("fp4", FP4_GROUP, input="fp4", input_group=FP4_GROUP),
}
"""Every kind of scheme that the graph writes; all fit quantized_spec()."""

_SITES = {"q": "qkv", "k": "qkv", "v": "qkv", "gate": "gate_up", "up": "gate_up"}
_INPUT_MAX = {"int8": INT8_MAX, "fp8": FP8_MAX, "fp4": FP4_MAX * FP8_MAX}


def quantized_spec(**fields: Any) -> DecoderSpec:
    """Return a two-layer decoder whose products have 128 or 256 inputs, so that every group size divides them."""
    return tiny_spec(**{"hidden_size": 128, "intermediate_size": 256, "tie_embeddings": False, **fields})


def linear_layers(spec: DecoderSpec) -> list[str]:
    """Return the canonical names of all linear layers, without ".weight"; the head's where it is not tied."""
    units = ("q", "k", "v", "o", "gate", "up", "down")
    names = [f"layers.{n}.{unit}" for n in range(spec.num_layers) for unit in units]
    return names if spec.tie_embeddings else [*names, "lm_head"]


def quantization(
    spec: DecoderSpec, scheme: Scheme, *, kv: KvFormat = "float", name: str = "test"
) -> Quantization:
    """Return a quantization with the scheme on every linear layer; ValueError where its groups do not divide one."""
    shapes, names = weight_shapes(spec), linear_layers(spec)
    for layer in names:
        k = shapes[f"{layer}.weight"][1]
        for group in (scheme.weight_group, scheme.input_group):
            if group > 0 and k % group:
                raise ValueError(f"groups of {group} do not divide the {k} inputs of {layer}")
    return Quantization(name, "tests", tuple((layer, scheme) for layer in names), kv)


class RandomQuantizedWeights:
    """A WeightSource and QuantizedSource of random codes and scales; the same ones at every call.

    Products of weights and inputs keep a variance near 1. q, k and v share what is calibrated for their input, as do
    gate and up; a few values of an input lie beyond a static scale.
    """

    def __init__(self, spec: DecoderSpec, held: Quantization, seed: int = 0) -> None:
        self._shapes = weight_shapes(spec)
        self._schemes = dict(held.schemes)
        self._offset = spec.norm_offset
        self._kv = held.kv
        self._seed = seed

    def names(self) -> tuple[str, ...]:
        """Return all canonical names."""
        return tuple(self._shapes)

    def shape(self, name: str) -> tuple[int, ...]:
        """Return a weight's shape."""
        return self._shapes[name]

    def get(self, name: str) -> Array:
        """Return float32 values: of a quantized weight those that its codes mean, times its pre_scale."""
        scheme = self._schemes.get(name.removesuffix(".weight"))
        if scheme is None or not name.endswith(".weight"):
            return self._plain(name)
        values = dequantized(self.quantized(name), scheme)
        pre_scale = self.quantized_input(name).pre_scale
        return values if pre_scale is None else values * pre_scale

    def _plain(self, name: str) -> Array:
        shape = self._shapes[name]
        noise = self._rng(name).standard_normal(shape).astype(np.float32)
        if name.endswith("norm.weight"):
            return np.float32(1 - self._offset) + np.float32(0.1) * noise
        scale = 0.1 if len(shape) == 1 else 1.0 if name.startswith("embed") else shape[1] ** -0.5
        return np.float32(scale) * noise

    def quantized(self, name: str) -> QuantizedWeight:
        """Return a weight's codes and scales; KeyError for one that is float."""
        scheme = self._schemes[name.removesuffix(".weight")]
        return random_weight(self._rng(name), scheme, self._shapes[name])

    def quantized_input(self, name: str) -> QuantizedInput:
        """Return the input's scale and factors, as far as the scheme has them."""
        layer = name.removesuffix(".weight")
        scheme = self._schemes[layer]
        stem, _, unit = layer.rpartition(".")
        rng = self._rng(f"{stem}.{_SITES.get(unit, unit)}.input")
        largest, factors = rng.uniform(1.5, 2.5), rng.uniform(0.5, 2.0, self._shapes[name][1])
        return QuantizedInput(
            scale=float(np.float32(largest / _INPUT_MAX[scheme.input])) if scheme.is_static else 1.0,
            pre_scale=factors.astype(np.float32) if scheme.pre_scale else None,
        )

    def kv_scales(self, layer: int) -> tuple[float, float]:
        """Return the scales of a layer's K and V."""
        limit = {"fp8": FP8_MAX, "int8": INT8_MAX}[self._kv]
        k, v = (self._rng(f"layers.{layer}.kv").uniform(3.0, 4.0, 2) / limit).astype(np.float32)
        return float(k), float(v)

    def _rng(self, name: str) -> np.random.Generator:
        return np.random.default_rng([self._seed, zlib.crc32(name.encode())])


def random_weight(rng: np.random.Generator, scheme: Scheme, shape: tuple[int, ...]) -> QuantizedWeight:
    """Return random codes and scales of a weight [N, K] with values near 1 / sqrt(K)."""
    n, k = shape
    codes, spread = _random_codes(rng, scheme, (n, k))
    size = {WHOLE: (), ROW: (n,)}.get(scheme.weight_group, (n, k // max(scheme.weight_group, 1)))
    factors = rng.uniform(0.5, 1.5, size)
    unit = np.float32(k**-0.5 / spread)
    if scheme.weight == "fp4":
        scales = (32 * factors).astype(ml_dtypes.float8_e4m3fn)
        return QuantizedWeight(codes, scales, scale_2=float(unit / np.float32(32)))
    zero = rng.integers(5, 11, size).astype(np.int8) if scheme.zero_points else None
    made = QuantizedWeight(codes, np.asarray(factors * unit, np.float32), zero)
    if not scheme.fp8_grid:
        return made
    plain = dequantized(made, dataclasses.replace(scheme, fp8_grid=False))
    return dataclasses.replace(made, scale_2=float(np.abs(plain).max() / np.float32(FP8_MAX)))


def _random_codes(rng: np.random.Generator, scheme: Scheme, shape: tuple[int, int]) -> tuple[Array, float]:
    """Return codes and about their standard deviation."""
    if scheme.weight == "int8":
        return rng.integers(-128, 128, shape).astype(np.int8), 74.0
    if scheme.weight == "int4":
        low = 0 if scheme.zero_points else -8
        return rng.integers(low, low + 16, shape).astype(np.int8), 4.6
    if scheme.weight == "fp8":
        numbers = np.clip(100 * rng.standard_normal(shape), -FP8_MAX, FP8_MAX)
        return numbers.astype(ml_dtypes.float8_e4m3fn), 100.0
    bits = rng.integers(0, 16, shape).astype(np.uint8)
    return bits.view(ml_dtypes.float4_e2m1fn), 2.9


def dequantized(weight: QuantizedWeight, scheme: Scheme) -> Array:
    """Return the float32 values (N, K) that codes and scales mean, in the order of the graph's nodes."""
    n, k = weight.codes.shape
    scale = weight.scale.astype(np.float32)
    if scheme.weight == "fp4":
        scale = scale * np.float32(weight.scale_2)
    values = weight.codes.astype(np.float32)
    if weight.zero is not None:
        values = values - _wide(weight.zero.astype(np.float32), k)
    values = values * _wide(scale, k)
    if scheme.fp8_grid:
        values = on_fp8_grid(values, weight.scale_2)
    assert values.shape == (n, k)
    return values


def on_fp8_grid(values: Array, scale: float) -> Array:
    """Return float32 values rounded to scale times the nearest E4M3, saturated, as QuantizeLinear does."""
    step = np.float32(scale)
    codes = np.clip(values / step, -FP8_MAX, FP8_MAX).astype(ml_dtypes.float8_e4m3fn)
    return codes.astype(np.float32) * step


def _wide(scale: Array, k: int) -> Array:
    """Return scales or zero points of any granularity, so that they broadcast over (N, K)."""
    if scale.ndim == 0:
        return scale
    if scale.ndim == 1:
        return scale[:, None]
    return np.repeat(scale, k // scale.shape[1], axis=1)
