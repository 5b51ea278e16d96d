"""Precisions: what a recipe's name means for every product of a graph, as data."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping
from typing import Literal

from ..runtime.errors import InvalidArgumentError
from .scheme import FLOAT, FP4_GROUP, ROW, WHOLE, KvFormat, Quantization, Scheme

FloatType = Literal["float32", "float16", "bfloat16"]

GROUP_SIZES = (128, 64, 32)  # columns that share a scale, in the order they are tried: of 576 64 and not 128
CPU_GROUP_SIZE = 32  # unless another is asked for
GPU_GROUP_SIZE = 128  # of int4; int8 has one scale an output there


@dataclasses.dataclass(frozen=True)
class Precision:
    """How weights, inputs of products and the KV cache are held in the graph.

    name : the recipe's name, as in --precision, or that of a quantized checkpoint
    weight_bits : 32, 16, 8 or 4 for the linear layers; the most of any where they differ
    head_bits : bits of the embedding and the logits product (they share one table when tied)
    float_type : what is not quantized is stored as
    rounds_inputs : int8 and int4 alone: whether the inputs of products are rounded to int8, as the cpu target does
    group_size : int8 and int4 alone: the most columns that share a scale, one of GROUP_SIZES; None = the target's own
    int8_groups : whether int8 weights have groups of columns as int4's do, as on the cpu target; else one scale a row
    signed_scales : whether int4 weights that are rounded here may have negative scales, as on the cpu target
    scale_type : what scales of weights that are rounded here are rounded to first; None = the compute type
    quantization : of a checkpoint that is quantized already and runs as it is; the rest follows from it
    kept_float : int8 and int4 alone: canonical names of products in the blocks that stay in float_type
    kv_format : of the KV pools where `quantization` has none of its own; None = the target's choice, see on_cpu. fp8
        and int8 of a draft alone, whose scales are those of the checkpoint that it drafts for
    """

    name: str
    weight_bits: int
    head_bits: int
    float_type: FloatType = "float16"
    rounds_inputs: bool = False
    group_size: int | None = None
    int8_groups: bool = False
    signed_scales: bool = False
    scale_type: FloatType | None = None
    quantization: Quantization | None = None
    kept_float: tuple[str, ...] = ()
    kv_format: KvFormat | None = None

    @property
    def is_quantized(self) -> bool:
        """Whether any product is."""
        return self.weight_bits <= 8

    @property
    def weight_groups(self) -> str:
        """What at most shares a scale of a quantized weight, for people: "32 columns", "an output"; "" without any."""
        if self.quantization is not None:
            found = {one.weight_group for _, one in self.quantization.schemes if one.weight != "float"}
        elif not self.is_quantized:
            found = set()
        else:
            is_row = self.weight_bits == 8 and not self.int8_groups
            found = {ROW if is_row else self.group_size or GPU_GROUP_SIZE}
        words = {WHOLE: "a tensor", ROW: "an output"}
        return ", ".join(words.get(size, f"{size} columns") for size in sorted(found))

    @property
    def kv(self) -> KvFormat:
        """What the KV pools hold."""
        if self.quantization is not None and self.quantization.kv != "float":
            return self.quantization.kv
        return self.kv_format or "float"

    def scheme(self, name: str, in_features: int) -> Scheme:
        """Return how the product `name` ("layers.0.q", "lm_head") of that many inputs is quantized.

        raises InvalidArgumentError where groups do not divide the inputs
        """
        if self.quantization is not None:
            found = _schemes(self.quantization).get(name, FLOAT)
            _check_groups(name, found, in_features)
            return found
        bits = self.head_bits if name == "lm_head" else self.weight_bits
        if bits > 8 or name in self.kept_float:
            return FLOAT
        group = self._group(name, bits, in_features)
        if not self.rounds_inputs:
            return Scheme("int8" if bits == 8 else "int4", group)
        return Scheme("int8" if bits == 8 else "int4", group, input="int8", input_group=group)

    def _group(self, name: str, bits: int, in_features: int) -> int:
        """Return how many columns of a weight share a scale; ROW = all of an output."""
        if bits == 8 and not self.int8_groups:
            return ROW
        largest = self.group_size or GPU_GROUP_SIZE
        if (
            name == "lm_head" and self.int8_groups
        ):  # what its input loses to rounding nothing behind it evens out
            largest = GROUP_SIZES[-1]
        group = group_size(in_features, largest)
        if group == ROW and bits == 4:
            raise InvalidArgumentError(
                f"int4 needs an input size divisible by {GROUP_SIZES[-1]}, a layer has {in_features}; build with "
                "--precision int8"
            )
        return group

    def on_cpu(self) -> Precision:
        """Return the precision as the cpu target runs it: int8 and int4 weights meet inputs rounded to int8.

        Weights and inputs share their groups, so that the integer sum of a group meets one factor of each. Scales are
        bfloat16: half the bytes, and nothing is lost, since the weights are rounded by the scale as it is stored.
        float16 would have tiny ones among its subnormal numbers. KV pools are float16 beside weights of 16 bits and
        less, where nothing else is asked for: half the bytes of its float32 activations, and no measured loss.
        """
        rounded = self.quantization is None and self.is_quantized
        scale_type: FloatType | None = "bfloat16" if rounded else None
        chosen: KvFormat = "float" if self.weight_bits > 16 else "float16"
        return dataclasses.replace(
            self,
            rounds_inputs=rounded,
            group_size=(self.group_size or CPU_GROUP_SIZE) if rounded else None,
            int8_groups=rounded,
            signed_scales=rounded,
            scale_type=scale_type,
            kv_format=self.kv_format or chosen,
        )

    def in_groups(self, size: int | None) -> Precision:
        """Return the recipe with at most that many columns to a scale; None = as it is.

        raises InvalidArgumentError for a size that there is not, and of a recipe that rounds nothing itself
        """
        if size is None:
            return self
        if size not in GROUP_SIZES:
            sizes = ", ".join(map(str, sorted(GROUP_SIZES)))
            raise InvalidArgumentError(f"--group-size is {size}; choose one of {sizes}")
        if self.quantization is not None or not self.is_quantized:
            raise InvalidArgumentError(
                f"--group-size is for --precision int8 and int4, {self.name} has no groups to choose; leave it out"
            )
        return dataclasses.replace(self, group_size=size)

    def without_rounding(self) -> Precision:
        """Return the same weights with every input as it is, and KV pools without scales.

        float16 pools stay: like float16 weights they are a type of storage, whose rounding leaves no noise to speak of.
        """
        held: KvFormat | None = "float" if self.kv in ("fp8", "int8") else self.kv_format
        if self.quantization is None:
            return dataclasses.replace(self, rounds_inputs=False, kv_format=held)
        plain = tuple(
            (name, dataclasses.replace(one, input="float", input_group=Scheme.input_group))
            for name, one in self.quantization.schemes
        )
        return dataclasses.replace(
            self,
            quantization=dataclasses.replace(self.quantization, schemes=plain, kv="float"),
            kv_format=held,
        )


PRECISIONS = {
    "fp32": Precision("fp32", 32, 32, "float32"),
    "fp16": Precision("fp16", 16, 16),
    "bf16": Precision("bf16", 16, 16, "bfloat16"),
    "int8": Precision("int8", 8, 8),
    # The tied table is 21 % of a small model and the most sensitive part, so it stays at 8 bits.
    "int4": Precision("int4", 4, 8),
}

# What `plansmith quantize` makes; here so that a build can say so.
RECIPES = (
    "fp8",
    "fp8_per_channel",
    "int8_sq",
    "int8_wo",
    "int4_awq",
    "int4_wo",
    "w4a8_awq",
    "nvfp4",
    "nvfp4_wo",
)


def _check_groups(name: str, scheme: Scheme, in_features: int) -> None:
    blocks = FP4_GROUP if "fp4" in (scheme.weight, scheme.input) else 1
    for group in (scheme.weight_group, scheme.input_group, blocks):
        if group > 0 and in_features % group:
            raise InvalidArgumentError(
                f"{name} has {in_features} inputs, which groups of {group} do not divide; quantize it with a group "
                "size that does, or leave it float"
            )


@functools.lru_cache(maxsize=8)
def _schemes(quantization: Quantization) -> Mapping[str, Scheme]:
    return dict(quantization.schemes)


def of_checkpoint(quantization: Quantization, float_type: FloatType) -> Precision:
    """Return the precision that runs a quantized checkpoint as it is.

    float_type : what its other weights are stored as
    """
    bits = max((one.weight_bits for _, one in quantization.schemes), default=16)
    float_bits = 32 if float_type == "float32" else 16
    head = dict(quantization.schemes).get("lm_head", FLOAT)
    head_bits = float_bits if head == FLOAT else head.weight_bits
    return Precision(quantization.name, bits, head_bits, float_type=float_type, quantization=quantization)


def precision(name: str) -> Precision:
    """Return the recipe of that name; InvalidArgumentError lists those there are."""
    try:
        return PRECISIONS[name]
    except KeyError:
        raise InvalidArgumentError(
            f"--precision {name!r} is not known; choose one of {', '.join(PRECISIONS)}"
        ) from None


def draft_precision(name: str, engine: Precision) -> Precision | None:
    """Return the recipe of a draft for an engine; None for "none".

    Its KV pools are the engine's in kind where those were quantized or chosen: float ones would take most of a budget
    that both share.
    raises InvalidArgumentError for one that is not known, or no smaller than the engine's own and so no faster
    """
    if name == "none":
        return None
    if name not in PRECISIONS:
        raise InvalidArgumentError(
            f"--draft {name!r} is not known; choose one of {', '.join(PRECISIONS)}, none"
        )
    found = PRECISIONS[name]
    if found.weight_bits >= engine.weight_bits:
        smaller = [one.name for one in PRECISIONS.values() if one.weight_bits < engine.weight_bits]
        raise InvalidArgumentError(
            f"--draft {name} is no smaller than the engine's {engine.name}, so it would not save time; give "
            + (
                " or ".join(smaller)
                if smaller
                else "none, and a smaller model's engine as --draft where this one runs"
            )
        )
    held = engine.kv if engine.kv in ("fp8", "int8") else engine.kv_format
    return dataclasses.replace(found, kv_format=held)


def group_size(in_features: int, largest: int) -> int:
    """Return how many columns share a scale: the first of GROUP_SIZES, from `largest` on, that divides them.

    ROW where none does
    """
    return next((size for size in GROUP_SIZES if size <= largest and in_features % size == 0), ROW)
