"""The recipes of `plansmith quantize`: what each rounds, as data, and as a configuration of ModelOpt."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from ..runtime.errors import InvalidArgumentError
from .layers import Layer

GROUP_SIZES = (128, 64, 32)  # of int4, the largest that divides a layer's inputs
FP4_BLOCK = 16
DEFAULT_ALPHA = 0.7  # of SmoothQuant, where nothing is searched

FP4_WEIGHT, FP4_INPUT = (
    "plansmith_fp4_weight",
    "plansmith_fp4_input",
)  # names of fp4.py's functions in ModelOpt

_E4M3, _E2M1 = (4, 3), (2, 1)
_FP4 = {"num_bits": _E2M1, "block_sizes": {-1: FP4_BLOCK, "type": "dynamic", "scale_bits": _E4M3}}
KV_CACHES = ("none", "fp8", "int8")
_KV_BITS: dict[str, Any] = {"fp8": _E4M3, "int8": 8}


@dataclasses.dataclass(frozen=True)
class Recipe:
    """How the weights and inputs of linear layers are rounded.

    name : as in --recipe
    weight : ModelOpt's attributes of the weight's quantizer; of int4 without the group size
    input : those of the input's quantizer; None leaves the input alone
    algorithm : ModelOpt's way to find scales: "max", "smoothquant" or "awq_lite"
    about : one line for people
    """

    name: str
    weight: Mapping[str, Any]
    input: Mapping[str, Any] | None
    algorithm: str
    about: str

    @property
    def is_int4(self) -> bool:
        """Whether weights have groups whose size is chosen for each layer."""
        return bool(self.weight["num_bits"] == 4)

    @property
    def is_fp4(self) -> bool:
        """Whether weights are NVFP4, in blocks of 16."""
        return bool(self.weight["num_bits"] == _E2M1)

    @property
    def bits(self) -> float:
        """Bits of a weight; NVFP4's scales count, which are half a bit a weight, those of larger groups do not."""
        return 4.5 if self.is_fp4 else 4.0 if self.is_int4 else 8.0

    @property
    def needs_data(self) -> bool:
        """Whether calibration data decides anything: static inputs, or a search."""
        static = self.input is not None and self.input.get("type") != "dynamic"
        return static or self.algorithm != "max"

    @property
    def shares_scales(self) -> bool:
        """Whether the layers that read one input get one vector of factors, folded into the norm before them."""
        return self.algorithm == "awq_lite"


_STATIC_FP8 = {"num_bits": _E4M3, "axis": None}
_TOKEN_FP8 = {"num_bits": _E4M3, "axis": None, "type": "dynamic", "block_sizes": {-1: None}}

RECIPES: dict[str, Recipe] = {
    one.name: one
    for one in (
        Recipe("fp8", _STATIC_FP8, _STATIC_FP8, "max", "FP8 weights and inputs, one scale a tensor"),
        Recipe(
            "fp8_per_channel",
            {"num_bits": _E4M3, "axis": 0},
            _TOKEN_FP8,
            "max",
            "FP8, a scale an output for weights and a scale a token for inputs",
        ),
        Recipe(
            "int8_sq",
            {"num_bits": 8, "axis": 0},
            {"num_bits": 8, "axis": None},
            "smoothquant",
            "INT8 weights and inputs, outliers moved into the weights (SmoothQuant)",
        ),
        Recipe("int8_wo", {"num_bits": 8, "axis": 0}, None, "max", "INT8 weights, a scale an output"),
        Recipe(
            "int4_awq", {"num_bits": 4}, None, "awq_lite", "INT4 weights in groups, scaled by a search (AWQ)"
        ),
        Recipe("int4_wo", {"num_bits": 4}, None, "max", "INT4 weights in groups, rounded to nearest"),
        Recipe("w4a8_awq", {"num_bits": 4}, _STATIC_FP8, "awq_lite", "INT4 weights by AWQ, FP8 inputs"),
        Recipe("nvfp4", _FP4, _FP4, "max", "NVFP4 weights and inputs, blocks of 16"),
        Recipe("nvfp4_wo", _FP4, None, "max", "NVFP4 weights, blocks of 16"),
    )
}

# Names of TensorRT-LLM's quantize.py and of ModelOpt's examples -> ours.
OTHER_NAMES = {
    "fp8_pc_pt": "fp8_per_channel",
    "int8_smoothquant": "int8_sq",
    "nvfp4_weight_only": "nvfp4_wo",
    "w4a16_nvfp4": "nvfp4_wo",
    "w4a8_awq_beta": "w4a8_awq",
}


def find_recipe(name: str) -> Recipe:
    """Return a recipe by its name; InvalidArgumentError lists those there are."""
    if name == "full_prec":
        raise InvalidArgumentError(
            "--recipe full_prec quantizes nothing; run plansmith build on the checkpoint itself"
        )
    try:
        return RECIPES[OTHER_NAMES.get(name, name)]
    except KeyError:
        raise InvalidArgumentError(
            f"--recipe {name!r} is not known; choose one of {', '.join(RECIPES)}"
        ) from None


def check_layers(recipe: Recipe, layers: Sequence[Layer], group_size: int | None) -> None:
    """Check that a recipe can round these layers; InvalidArgumentError names those that it cannot.

    group_size : of int4, None = the largest of 128, 64 and 32 that divides a layer's inputs
    """
    if group_size is not None and not recipe.is_int4:
        raise InvalidArgumentError(
            f"--group-size {group_size} is for int4 weights, --recipe {recipe.name} has none; leave it out"
        )
    if group_size is not None and group_size < 1:
        raise InvalidArgumentError(f"--group-size is {group_size}, it must be 1 or more, e.g. 128")
    if recipe.is_int4:
        sizes = (group_size,) if group_size is not None else GROUP_SIZES
        _refuse(
            [one for one in layers if all(one.in_features % size for size in sizes)],
            f"groups of {' or '.join(map(str, sizes))} do not divide the inputs of",
            "give another --group-size, or leave them out with --exclude",
        )
        _refuse(
            [one for one in layers if one.out_features % 2],
            "int4 weights are stored in pairs of outputs, an odd number have",
            "leave them out with --exclude",
        )
    if recipe.is_fp4:
        _refuse(
            [one for one in layers if one.in_features % FP4_BLOCK],
            f"NVFP4's blocks of {FP4_BLOCK} do not divide the inputs of",
            "leave them out with --exclude, or take another --recipe",
        )


def _refuse(layers: Sequence[Layer], what: str, fix: str) -> None:
    if layers:
        shown = ", ".join(f"{one.name} [{one.out_features}, {one.in_features}]" for one in layers[:3])
        more = f" and {len(layers) - 3} more" if len(layers) > 3 else ""
        raise InvalidArgumentError(f"{what} {shown}{more}; {fix}")


def group_size_of(recipe: Recipe, layer: Layer, forced: int | None) -> int:
    """Return the inputs that share a weight's scale; 0 where there are no groups."""
    if recipe.is_fp4:
        return FP4_BLOCK
    if not recipe.is_int4:
        return 0
    return forced or next(size for size in GROUP_SIZES if layer.in_features % size == 0)


def weight_attributes(recipe: Recipe, group_size: int, torch_fp4: bool) -> Any:
    """Return ModelOpt's attributes of a weight's quantizer; of W4A8 a list of two, INT4 first and FP8 over it.

    group_size : as group_size_of gives it
    torch_fp4 : round to NVFP4 with fp4.py; ModelOpt's own kernel needs CUDA
    """
    if not recipe.is_int4:
        return _with_backend(recipe.weight, FP4_WEIGHT if torch_fp4 else None)
    int4 = {**recipe.weight, "block_sizes": {-1: group_size, "type": "static"}}
    return [int4, dict(_STATIC_FP8)] if recipe.input is not None else int4


def input_attributes(recipe: Recipe, torch_fp4: bool) -> Any:
    """Return ModelOpt's attributes of an input's quantizer; None where it is off."""
    return None if recipe.input is None else _with_backend(recipe.input, FP4_INPUT if torch_fp4 else None)


def _with_backend(attributes: Mapping[str, Any], backend: str | None) -> dict[str, Any]:
    if backend is not None and attributes["num_bits"] == _E2M1:
        return {**attributes, "backend": backend}
    return dict(attributes)


def algorithm_of(recipe: Recipe, alpha: float) -> dict[str, Any]:
    """Return ModelOpt's algorithm; alpha is SmoothQuant's migration strength, 0..1."""
    return {"method": recipe.algorithm, **({"alpha": alpha} if recipe.algorithm == "smoothquant" else {})}


def kv_entries(kv_cache: str) -> list[dict[str, Any]]:
    """Return the entries of ModelOpt's configuration that round K and V, one scale a layer for each."""
    if kv_cache == "none":
        return []
    return [{"quantizer_name": "*[kv]_bmm_quantizer", "cfg": {"num_bits": _KV_BITS[kv_cache], "axis": None}}]


def modelopt_config(
    recipe: Recipe,
    layers: Sequence[Layer],
    *,
    group_size: int | None,
    kv_cache: str,
    alpha: float,
    torch_fp4: bool,
) -> dict[str, Any]:
    """Return ModelOpt's configuration that rounds exactly these layers, each named in full."""
    entries: list[dict[str, Any]] = [{"quantizer_name": "*", "enable": False}]
    inputs = input_attributes(recipe, torch_fp4)
    for layer in layers:
        weight = weight_attributes(recipe, group_size_of(recipe, layer, group_size), torch_fp4)
        entries.append({"quantizer_name": f"{layer.name}.weight_quantizer", "cfg": weight})
        if inputs is not None:
            entries.append({"quantizer_name": f"{layer.name}.input_quantizer", "cfg": inputs})
    return {"quant_cfg": entries + kv_entries(kv_cache), "algorithm": algorithm_of(recipe, alpha)}
