"""Whether a target can run a recipe of a model, asked before any work; the table is in support_table.py."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

from ...runtime.errors import UnsupportedError
from ..precision import PRECISIONS, Precision
from ..scheme import ROW, WHOLE, Scheme
from ..spec import DecoderSpec, weight_shapes
from .rtx import targets as rtx
from .support_table import SUPPORT, WORDS, Need
from .tensorrt import targets as tensorrt

if TYPE_CHECKING:
    from .registry import Target


@dataclasses.dataclass(frozen=True)
class _Recipe:
    """A recipe that can be named instead of one that does not work.

    is_calibrated : made by `plansmith quantize`; the others are names of --precision
    """

    name: str
    bits: int
    needs: frozenset[Need]
    rounds_inputs: bool = False
    is_calibrated: bool = True


# Of those with the same bits the first is the best where quality is all that counts.
_RECIPES: tuple[_Recipe, ...] = (
    _Recipe("nvfp4", 4, frozenset({"nvfp4"}), rounds_inputs=True),
    _Recipe("w4a8_awq", 4, frozenset({"w4a8"}), rounds_inputs=True),
    _Recipe("int4_awq", 4, frozenset({"int4"})),
    _Recipe("nvfp4_wo", 4, frozenset({"nvfp4_weights"})),
    _Recipe("int4", 4, frozenset({"int4", "int8_weights"}), is_calibrated=False),
    _Recipe("fp8", 8, frozenset({"fp8"}), rounds_inputs=True),
    _Recipe("int8_sq", 8, frozenset({"w8a8"}), rounds_inputs=True),
    _Recipe("int8", 8, frozenset({"int8_weights"}), is_calibrated=False),
    _Recipe("int8_wo", 8, frozenset({"int8_weights"})),
    _Recipe("fp16", 16, frozenset({"fp16"}), is_calibrated=False),
    _Recipe("bf16", 16, frozenset({"bf16"}), is_calibrated=False),
)


def need_of(scheme: Scheme) -> Need | None:
    """Return what a product held like this needs; None for one of floats."""
    weight, rounds = scheme.weight, scheme.input
    if weight == "float":
        return {"float": None, "int8": "w8a8", "fp8": "fp8", "fp4": "nvfp4"}[rounds]
    if rounds == "fp4":
        return "nvfp4"
    if weight == "int4" and rounds != "float":
        return "w4a8" if rounds == "fp8" else "w4a8_int8"
    if weight == "int4":
        return "int4_zeros" if scheme.zero_points else "int4"
    if weight == "fp4":
        return "nvfp4_weights"
    if rounds == "float":
        return "int8_weights" if weight == "int8" else "fp8_weights"
    if rounds == "int8":
        return "w8a8"
    groups = {scheme.weight_group, scheme.input_group}
    if groups - {WHOLE, ROW}:
        return "fp8_blocks"
    return "fp8_channels" if ROW in groups else "fp8"


def needs_of(precision: Precision, spec: DecoderSpec) -> dict[Need, str]:
    """Return what a recipe of a model needs besides its activations, with the first product that does."""
    found: dict[Need, str] = {}
    for name, scheme in _schemes(precision, spec):
        need = need_of(scheme)
        if need is not None:
            found.setdefault(need, name)
    if precision.kv in ("fp8", "int8"):
        found["kv_fp8" if precision.kv == "fp8" else "kv_int8"] = "the KV cache"
    return found


def _schemes(precision: Precision, spec: DecoderSpec) -> Iterator[tuple[str, Scheme]]:
    if precision.quantization is not None:
        yield from precision.quantization.schemes
        return
    for name, shape in weight_shapes(spec).items():
        if len(shape) == 2 and name.startswith("layers."):
            layer = name.removesuffix(".weight")
            yield layer, precision.scheme(layer, shape[1])
    yield "lm_head", precision.scheme("lm_head", spec.hidden_size)


def takes(compiler: str, sms: Sequence[str], need: Need) -> bool:
    """Return whether a compiler takes it on all of these compute capabilities; () is no GPU."""
    return set(sms or ("cpu",)) <= SUPPORT[compiler].cells[need]


def check_support(target: Target, precision: Precision, spec: DecoderSpec) -> None:
    """Raise UnsupportedError if a target cannot run this recipe of this model, before any work.

    The message names what is missing, the targets that have it, and the nearest recipe that works on this one with
    the command that makes it: of the same bits first, then the next higher quality.
    """
    compute = _compute(target, precision, spec)
    needs = {compute: "the activations", **needs_of(precision, spec)}
    missing = [need for need in needs if not takes(target.compiler, target.sm, need)]
    if not missing:
        return
    what = f"precision {precision.name}"
    if missing == ["bf16"] and precision.name != "bf16":
        what += f" of {spec.family}, whose activations overflow float16,"
    elif len(set(needs.values())) > 1 and needs[missing[0]] not in ("the activations", "the KV cache"):
        what += f" ({needs[missing[0]]})"
    lacks = " and no ".join(WORDS[need] for need in missing)
    raise UnsupportedError(
        f"{_about(target)} has no {lacks}, which {what} needs; build it for {_able(target, needs)}, or give "
        f"{target.name} {_nearest(target, precision, spec, missing)}"
    )


def check_types(target: rtx.RtxTarget, types: frozenset[str], what: str) -> None:
    """Raise UnsupportedError if a TensorRT-RTX target cannot hold one of a graph's types (lowering.types_of)."""
    needs: dict[str, Need] = {"int8": "int8_weights", "fp8": "fp8_weights", "fp4": "nvfp4_weights"}
    sms = tuple(one.lower() for one in target.capabilities)
    missing = [one for one in sorted(types - {"fp32"}) if not takes("rtx", sms, needs.get(one, one))]  # type: ignore[arg-type]
    if missing:
        raise UnsupportedError(
            f"{target.name} ({target.gpus}) has no {' and no '.join(missing)}, which {what} needs; give a graph of a "
            "recipe that check_support admits"
        )


def _compute(target: Target, precision: Precision, spec: DecoderSpec) -> Need:
    if target.compiler == "cpu" or (precision.quantization is None and precision.float_type == "float32"):
        return "fp32"
    return "bf16" if rtx.compute_type(spec, precision.name) == "bfloat16" else "fp16"


def _about(target: Target) -> str:
    gpus = {name: one.gpus for name, one in rtx.TARGETS.items()}
    gpus |= {name: one.gpus for name, one in tensorrt.TARGETS.items()}
    return f"{target.name} ({gpus[target.name]})" if target.name in gpus else target.name


def _able(target: Target, needs: Mapping[Need, str]) -> str:
    """Name the targets of this compiler that take all of it, this GPU's of the other one, and cpu."""
    sms: dict[str, tuple[str, Sequence[str]]] = {}
    if target.compiler == "rtx":
        sms = {one.name: ("rtx", [sm.lower() for sm in one.capabilities]) for one in rtx.TARGETS.values()}
    for one in tensorrt.TARGETS.values():
        if target.compiler == "tensorrt" or one.name == f"{target.name}-tensorrt":
            sms[one.name] = ("tensorrt", [one.sm])
    able = [
        name for name, (compiler, held) in sms.items() if all(takes(compiler, held, need) for need in needs)
    ]
    return " or ".join([*able, "cpu"])


def _nearest(target: Target, precision: Precision, spec: DecoderSpec, missing: Sequence[Need]) -> str:
    """Return the nearest recipe that works on a target, and the command that makes it."""
    is_calibrated = precision.quantization is not None
    if all(need.startswith("kv_") for need in missing):
        command = (
            f"plansmith quantize CHECKPOINT --recipe {precision.name} --kv-cache none -o OUT"
            if is_calibrated
            else f"plansmith build CHECKPOINT --target {target.name} --precision {precision.name}"
        )
        return f"the same recipe with a KV cache of floats: {command}"
    rounds = any(one.input != "float" for _, one in _schemes(precision, spec))
    bits = precision.weight_bits

    def distance(recipe: _Recipe) -> tuple[int, bool, bool]:
        return (recipe.bits, recipe.is_calibrated != is_calibrated, recipe.rounds_inputs != rounds)

    for recipe in sorted(_RECIPES, key=distance):
        twice = is_calibrated and recipe.name in PRECISIONS and recipe.bits < 16
        if recipe.bits < min(bits, 16) or recipe.name == precision.name or twice:
            continue
        if all(takes(target.compiler, target.sm, need) for need in _all_needs(recipe, spec)):
            return f"{recipe.name}: {_command(recipe, target)}"
    return "up: none of the recipes works there"


def _all_needs(recipe: _Recipe, spec: DecoderSpec) -> frozenset[Need]:
    compute: Need = "bf16" if rtx.compute_type(spec, recipe.name) == "bfloat16" else "fp16"
    return recipe.needs | {compute}


def _command(recipe: _Recipe, target: Target) -> str:
    if recipe.is_calibrated:
        return f"plansmith quantize CHECKPOINT --recipe {recipe.name} -o OUT"
    return f"plansmith build CHECKPOINT --target {target.name} --precision {recipe.name}"
