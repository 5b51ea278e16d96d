"""Names of targets -> what compiles them, and what can be said about a build before it starts."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Sequence
from typing import NoReturn

from ...runtime.errors import InvalidArgumentError, UnsupportedError
from ..precision import Precision, precision
from ..spec import DecoderSpec
from .rtx import targets as rtx

CPU = "cpu"


@dataclasses.dataclass(frozen=True)
class Target:
    """A target of --target.

    name : also its directory below targets/
    compiler : "cpu" or "rtx", the folder beside this file
    sm : compute capabilities that the plan runs on; () without a GPU
    """

    name: str
    compiler: str
    sm: tuple[str, ...]


def target_names() -> list[str]:
    """Return every name that --target takes."""
    return [CPU, *rtx.TARGETS]


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
    number = re.fullmatch(r"sm_?([0-9]{2,3}[a-z]?)|([0-9]{1,2})\.([0-9])", word)
    if number is None and word not in rtx.TARGETS:
        _refuse(typed)
    name = word if number is None else "sm" + (number[1] or number[2] + number[3])
    found = rtx.find_target(name)
    return Target(found.name, "rtx", tuple(one.lower() for one in found.capabilities))


def _refuse(typed: str) -> NoReturn:
    """Raise the error for a word that is no target; for the name of a GPU it says which target that is."""
    sm = rtx.GPU_NAMES.get(re.sub("[ _-]|nvidia|geforce", "", typed.lower()))
    if sm is None:
        raise InvalidArgumentError(
            f"--target {typed!r} is not known; choose one or more of {', '.join(target_names())}"
        )
    if sm in rtx.TARGETS:
        raise InvalidArgumentError(f"--target {typed!r} is {sm}; give --target {sm}")
    try:
        rtx.find_target(sm)
    except UnsupportedError as error:
        raise UnsupportedError(f"--target {typed!r} is {sm}; {error}") from None
    raise AssertionError("not reached")


def compute_dtype(target: Target, spec: DecoderSpec, recipe: Precision) -> str:
    """Return the type of the activations and the KV pools: what build_graph takes as `compute`."""
    return "float32" if target.compiler == "cpu" else rtx.compute_type(spec, recipe.name)


def activation_quantization(target: Target, recipe: Precision) -> str:
    """Return how activations meet the weights: on cpu they are rounded to int8 beside int8 and int4 weights."""
    return "int8" if target.compiler == "cpu" and recipe.weight_bits <= 8 else "none"


def check_target(target: Target, spec: DecoderSpec, recipe: Precision) -> None:
    """Raise UnsupportedError if this model cannot be compiled for this target at this precision, or not here."""
    if target.compiler == "rtx":
        rtx.check_target(target.name, recipe.name, spec)
        rtx.check_installed()


def compiler_version(target: Target) -> str:
    """Return the version that a plan depends on: of TensorRT-RTX, or of the cpu plan's format."""
    if target.compiler == "rtx":
        return rtx.check_installed()
    from .cpu.plan_file import FORMAT_VERSION

    return f"format-{FORMAT_VERSION}"


def choose_precision(name: str, spec: DecoderSpec, targets: Sequence[Target]) -> Precision:
    """Return the recipe of --precision; "auto" is the checkpoint's own type where every target has it, else fp16."""
    if name != "auto":
        return precision(name)
    own = {"float32": "fp32", "float16": "fp16", "bfloat16": "bf16"}.get(spec.dtype, "bf16")
    gpus = [target for target in targets if target.compiler == "rtx"]
    if any(own not in rtx.TARGETS[target.name].types for target in gpus) or (gpus and own == "fp32"):
        own = "bf16" if rtx.residual_may_overflow(spec) else "fp16"
    return precision(own)
