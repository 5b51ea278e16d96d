"""How one matrix product is quantized, as data: what the weight is stored as, and what its input is rounded to."""

from __future__ import annotations

import dataclasses
from typing import Any, Literal, Protocol

import numpy.typing as npt

Array = npt.NDArray[Any]

WeightFormat = Literal["float", "int8", "int4", "fp8", "fp4"]
InputFormat = Literal["float", "int8", "fp8", "fp4"]

WHOLE = -1  # of a group: one scale for the whole tensor
ROW = 0  # of a group: one scale for an output (weights), for a token (inputs)

FP4_GROUP = 16  # NVFP4 has blocks of this size and no other

INT8_MAX, FP8_MAX, FP4_MAX = 127.0, 448.0, 6.0


@dataclasses.dataclass(frozen=True)
class Scheme:
    """How a matrix product holds its weight and takes its input; the default quantizes nothing.

    weight : fp8 is E4M3, fp4 is NVFP4: E2M1 in blocks of 16 with an E4M3 scale each, and one float32 scale over all
    weight_group : inputs that share a weight's scale: WHOLE, ROW (all inputs of an output), or a number that divides
        the inputs
    zero_points : int4 alone: codes are 0..15 and every group has a zero point
    input : what the input is rounded to before the product. fp4 is NVFP4, with a calibrated float32 scale over all
    input_group : columns that share an input's scale (fp4: always 16): WHOLE is calibrated and fixed (static), ROW and
        numbers are taken from each token's own values (dynamic)
    pre_scale : the input is multiplied by a vector first (AWQ, SmoothQuant); the weight was divided by it
    fp8_grid : int4 alone: the dequantized weight is rounded to FP8 again, so that it can meet FP8 inputs (W4A8)
    """

    weight: WeightFormat = "float"
    weight_group: int = ROW
    zero_points: bool = False
    input: InputFormat = "float"
    input_group: int = WHOLE
    pre_scale: bool = False
    fp8_grid: bool = False

    @property
    def weight_bits(self) -> int:
        """Bits of a weight's code; 16 stands for any float."""
        return {"float": 16, "int8": 8, "fp8": 8, "int4": 4, "fp4": 4}[self.weight]

    @property
    def is_static(self) -> bool:
        """Whether the input's scale was calibrated (NVFP4's outer one is)."""
        return self.input == "fp4" or (self.input != "float" and self.input_group == WHOLE)


FLOAT = Scheme()


KvFormat = Literal["float", "float16", "fp8", "int8"]
"""What the KV pools hold; fp8 and int8 have one calibrated scale a layer for K and one for V.

float is the type of the activations; float16 holds no numbers beyond 65504 (they become that) and needs no scales.
"""


@dataclasses.dataclass(frozen=True)
class QuantizedWeight:
    """A weight [N outputs, K inputs] as a checkpoint stores it, in one form whatever wrote it.

    codes : (N, K) int8 (int8; int4 as -8..7, or 0..15 with zero points), float8_e4m3fn, or float4_e2m1fn (ml_dtypes)
    scale : float32 () for WHOLE, (N,) for ROW, (N, K / group) for groups; of fp4 float8_e4m3fn (N, K / 16)
    zero : (N, K / group) int8 0..15 with zero points: w = (code - zero) * scale
    scale_2 : of fp4, the factor on all its scales; with fp8_grid, the scale of the FP8 grid
    """

    codes: Array
    scale: Array
    zero: Array | None = None
    scale_2: float = 1.0


@dataclasses.dataclass(frozen=True)
class QuantizedInput:
    """What was calibrated for a product's input.

    scale : with a static input, x ~ round(x / scale) * scale; of fp4 the factor on the blocks' scales
    pre_scale : (K,) float32, what the input is multiplied by before anything else; None without
    """

    scale: float = 1.0
    pre_scale: Array | None = None


@dataclasses.dataclass(frozen=True)
class Quantization:
    """How a checkpoint is quantized.

    name : of the recipe, for people and manifests: "fp8", "int4_awq", ... or "mixed"
    producer : what wrote it, e.g. "modelopt 0.47.0", "awq", "compressed-tensors"
    schemes : canonical name of a linear layer, without ".weight" -> its scheme; what is not named is float
    kv : of the KV cache
    """

    name: str
    producer: str
    schemes: tuple[tuple[str, Scheme], ...]
    kv: KvFormat = "float"


class QuantizedSource(Protocol):
    """What a WeightSource of a quantized checkpoint has besides; its `get` returns such weights dequantized.

    `get` of a weight with a pre_scale has it multiplied in again, so that it is the weight of the plain model.
    """

    def quantized(self, name: str) -> QuantizedWeight:
        """Return a weight's stored form by its canonical name with ".weight"; KeyError for one that is float."""

    def quantized_input(self, name: str) -> QuantizedInput:
        """Return what was calibrated for the input of a quantized weight; reads a few numbers."""

    def kv_scales(self, layer: int) -> tuple[float, float]:
        """Return the scales of a layer's K and V: code = round(k / scale); with a quantized KV cache alone."""
