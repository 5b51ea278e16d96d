"""Names of targets -> what compiles them, and what can be said about a build before it starts."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Sequence
from typing import NoReturn, cast

from ...runtime.errors import InvalidArgumentError, UnsupportedError
from ...sizing.releases import CPU_PLAN_FORMAT
from ..checkpoint import Checkpoint
from ..precision import PRECISIONS, RECIPES, FloatType, Precision, of_checkpoint, precision
from ..spec import DecoderSpec
from .rtx import targets as rtx
from .support import check_support, takes
from .support_table import Need
from .tensorrt import targets as tensorrt

CPU = "cpu"


@dataclasses.dataclass(frozen=True)
class Target:
    """A target of --target.

    name : also its directory below targets/
    compiler : "cpu", "rtx" or "tensorrt", the folder beside this file
    sm : compute capabilities that the plan runs on; () without a GPU
    """

    name: str
    compiler: str
    sm: tuple[str, ...]


def target_names() -> list[str]:
    """Return every name that --target takes."""
    return [CPU, *rtx.TARGETS, *tensorrt.TARGETS]


def find_targets(names: Sequence[str]) -> list[Target]:
    """Return the targets of --target's words; each may hold several names with commas between.

    raises InvalidArgumentError for an unknown name and an empty list, UnsupportedError for a GPU that no compiler
        here builds for, naming what it would take.
    """
    words = [word.strip() for name in names for word in name.split(",") if word.strip()]
    if not words:
        raise InvalidArgumentError(f"--target is empty; choose one or more of {', '.join(target_names())}")
    return list(dict.fromkeys(_find(word) for word in words))


def _find(typed: str) -> Target:
    word = typed.lower()
    if word == CPU:
        return Target(CPU, "cpu", ())
    number = re.fullmatch(r"(?:sm_?([0-9]{2,3}[a-z]?)|([0-9]{1,2})\.([0-9]))(-tensorrt)?", word)
    name = word if number is None else f"sm{number[1] or number[2] + number[3]}{number[4] or ''}"
    if name in rtx.TARGETS:
        capabilities = rtx.TARGETS[name].capabilities
        return Target(name, "rtx", tuple(one.lower() for one in capabilities))
    if (
        name.removesuffix(tensorrt.SUFFIX) in tensorrt.TARGETS
    ):  # the only compiler that has it: both spellings
        name = name.removesuffix(tensorrt.SUFFIX)
    if name in tensorrt.TARGETS:
        return Target(name, "tensorrt", (tensorrt.TARGETS[name].sm,))
    if number is None:
        _refuse(typed)
    raise UnsupportedError(
        f"{_no_compiler(name)}{', '.join(target_names()[1:])}, or cpu, which runs anywhere"
    )


def _no_compiler(name: str) -> str:
    return f"this version cannot build for {name}: neither compiler's targets have that GPU; choose one of "


def _refuse(typed: str) -> NoReturn:
    """Raise the error for a word that is no target; for the name of a GPU it says which target that is."""
    sm = rtx.gpu_sm(typed)
    if sm is None:
        raise InvalidArgumentError(
            f"--target {typed!r} is not known; choose one or more of {', '.join(target_names())}"
        )
    if sm in target_names():
        raise InvalidArgumentError(f"--target {typed!r} is {sm}; give --target {sm}")
    names = ", ".join(target_names()[1:])
    raise UnsupportedError(
        f"--target {typed!r} is {sm}; {_no_compiler(sm)}{names}, or cpu, which runs anywhere"
    )


def compute_dtype(target: Target, spec: DecoderSpec, recipe: Precision) -> str:
    """Return the type of the activations, and of KV pools that are not quantized: `compute` of build_graph."""
    return "float32" if target.compiler == "cpu" else rtx.compute_type(spec, recipe.name)


def recipe_for(target: Target, recipe: Precision) -> Precision:
    """Return a recipe as a target runs it: cpu rounds inputs of int8's and int4's products and has float16 pools."""
    return recipe.on_cpu() if target.compiler == "cpu" else recipe


def activation_quantization(target: Target, recipe: Precision) -> str:
    """Return what the inputs of quantized products are rounded to: none, int8, fp8, fp4, or mixed."""
    recipe = recipe_for(target, recipe)
    if recipe.quantization is None:
        return "int8" if recipe.rounds_inputs else "none"
    formats = {one.input for _, one in recipe.quantization.schemes} or {"float"}
    return "mixed" if len(formats) > 1 else formats.pop().replace("float", "none")


def kv_dtype(target: Target, spec: DecoderSpec, recipe: Precision) -> str:
    """Return the type of the KV pools' values."""
    held = {"float16": "float16", "fp8": "float8_e4m3fn", "int8": "int8"}
    return held.get(recipe_for(target, recipe).kv) or compute_dtype(target, spec, recipe)


KV_CACHE_DTYPES = ("auto", "float32", "float16", "fp8", "int8")


def with_kv_cache(
    recipe: Precision, name: str, checkpoint: Checkpoint, targets: Sequence[Target]
) -> Precision:
    """Return the recipe with the KV pools of --kv-cache-dtype; "auto" leaves them to the checkpoint and the targets.

    raises InvalidArgumentError for a name that is not known, and for scales that would have to be calibrated or are
        calibrated for another type; UnsupportedError where a target has no such pools
    """
    held = None if recipe.quantization is None else recipe.quantization.kv
    if name not in KV_CACHE_DTYPES:
        raise InvalidArgumentError(
            f"--kv-cache-dtype {name!r} is not known; choose one of {', '.join(KV_CACHE_DTYPES)}"
        )
    if name in ("auto", held):
        return recipe
    if held in ("fp8", "int8"):
        raise InvalidArgumentError(
            f"--kv-cache-dtype is {name}, the KV cache of {checkpoint.path} is calibrated as {held}; leave it out, or "
            f"quantize without: plansmith quantize CHECKPOINT --kv-cache none -o OUT"
        )
    if name in ("fp8", "int8"):
        raise InvalidArgumentError(
            f"--kv-cache-dtype {name} needs calibrated scales, which {checkpoint.path} does not have; run `plansmith "
            f"quantize {checkpoint.path} --kv-cache {name} -o OUT` and build OUT"
        )
    for target in targets:
        compute = compute_dtype(target, checkpoint.spec, recipe)
        if target.compiler != "cpu" and compute != name:
            raise UnsupportedError(
                f"--kv-cache-dtype is {name}, float KV pools of {target.name} have the type of its activations, "
                f"{compute}; leave it out, or build the targets one by one"
            )
    return dataclasses.replace(recipe, kv_format="float16" if name == "float16" else "float")


def check_target(target: Target, spec: DecoderSpec, recipe: Precision) -> None:
    """Raise UnsupportedError if this model cannot be compiled for this target at this precision, or not here."""
    check_support(target, recipe, spec)
    if recipe.group_size is not None and recipe.weight_bits == 8 and target.compiler != "cpu":
        raise UnsupportedError(
            f"--group-size {recipe.group_size} with --precision int8 is for the cpu target; {target.name} has one "
            "scale an output: leave it out"
        )
    if target.compiler == "rtx":
        rtx.check_installed()
    if target.compiler == "tensorrt":
        tensorrt.check_available(tensorrt.TARGETS[target.name])


def compiler_version(target: Target) -> str:
    """Return the version that a plan depends on: of the compiler, or of the cpu plan's format."""
    if target.compiler == "rtx":
        return rtx.check_installed()
    if target.compiler == "tensorrt":
        return tensorrt.installed_version()
    return f"format-{CPU_PLAN_FORMAT}"


def choose_precision(name: str, checkpoint: Checkpoint, targets: Sequence[Target]) -> Precision:
    """Return the recipe of --precision for a checkpoint.

    "auto" runs a quantized checkpoint as it is, so does its recipe's own name; of a plain one it is the checkpoint's
    type where every target has it, else fp16. A quantized checkpoint can also be run in floats.
    raises InvalidArgumentError for a name that is not known or would quantize twice, and for one that has to be
        calibrated first.
    """
    quantization = checkpoint.quantization
    if quantization is not None and name in ("auto", quantization.name):
        return of_checkpoint(quantization, _float_type(checkpoint.spec))
    if quantization is not None and (
        name in RECIPES or (name in PRECISIONS and precision(name).is_quantized)
    ):
        raise InvalidArgumentError(
            f"{checkpoint.path} is quantized already ({quantization.name}), so --precision {name} would round it "
            "twice; leave --precision out to run it as it is, give fp16 or bf16 to run it in floats, or make "
            f"{name} of the unquantized checkpoint"
        )
    if name in RECIPES:
        raise InvalidArgumentError(
            f"--precision {name} needs calibrated scales, which {checkpoint.path} does not have; run `plansmith "
            f"quantize {checkpoint.path} --recipe {name} -o OUT` and build OUT"
        )
    if name != "auto":
        return precision(name)
    own = {"float32": "fp32", "float16": "fp16", "bfloat16": "bf16"}.get(checkpoint.spec.dtype, "bf16")
    gpus = [target for target in targets if target.compiler != "cpu"]
    if not all(takes(target.compiler, target.sm, cast(Need, own)) for target in gpus):
        own = "bf16" if rtx.residual_may_overflow(checkpoint.spec) else "fp16"
    return precision(own)


def _float_type(spec: DecoderSpec) -> FloatType:
    """Return what a quantized checkpoint's float weights are stored as: its own type."""
    return spec.dtype if spec.dtype in ("float32", "float16") else "bfloat16"  # type: ignore[return-value]
