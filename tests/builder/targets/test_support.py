"""What is refused before any work, in which words, and what is offered instead."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
from plansmith.builder.precision import Precision, of_checkpoint, precision
from plansmith.builder.scheme import FLOAT, KvFormat, Quantization, Scheme
from plansmith.builder.spec import DecoderSpec
from plansmith.builder.targets.registry import find_targets
from plansmith.builder.targets.rtx import targets as rtx
from plansmith.builder.targets.support import check_support, check_types, need_of, needs_of, takes
from plansmith.builder.targets.support_table import SUPPORT, WORDS
from plansmith.runtime.errors import UnsupportedError
from quantized_weights import SCHEMES, quantization, quantized_spec

SPEC = quantized_spec()
GEMMA = dataclasses.replace(SPEC, family="gemma2", norm_offset=1.0, embed_scale=8.0)


def checkpoint(scheme: str, name: str = "", kv: KvFormat = "float") -> Precision:
    return of_checkpoint(quantization(SPEC, SCHEMES[scheme], kv=kv, name=name or scheme), "bfloat16")


def refused(target: str, recipe: Precision, spec: DecoderSpec = SPEC) -> str:
    with pytest.raises(UnsupportedError) as error:
        check_support(find_targets([target])[0], recipe, spec)
    return str(error.value)


def is_taken(target: str, recipe: Precision, spec: DecoderSpec = SPEC) -> bool:
    try:
        check_support(find_targets([target])[0], recipe, spec)
    except UnsupportedError:
        return False
    return True


NEEDS = {
    "int8_wo": "int8_weights",
    "int8_groups": "int8_weights",
    "int4_32": "int4",
    "int4_outputs": "int4",
    "int4_zeros": "int4_zeros",
    "int4_awq": "int4",
    "int8_sq": "w8a8",
    "int8_rows": "w8a8",
    "int8_row_groups": "w8a8",
    "int4_int8_rows": "w4a8_int8",
    "fp8_wo": "fp8_weights",
    "fp8": "fp8",
    "fp8_rows": "fp8_channels",
    "fp8_blocks_128": "fp8_blocks",
    "w4a8": "w4a8",
    "nvfp4_wo": "nvfp4_weights",
    "nvfp4": "nvfp4",
}


@pytest.mark.parametrize(("scheme", "need"), NEEDS.items())
def test_what_a_scheme_needs(scheme: str, need: str) -> None:
    assert need_of(SCHEMES[scheme]) == need
    assert set(needs_of(checkpoint(scheme), SPEC)) == {need}


def test_what_our_own_recipes_need() -> None:
    assert needs_of(precision("fp16"), SPEC) == {}
    assert set(needs_of(precision("int8"), SPEC)) == {"int8_weights"}
    assert needs_of(precision("int4"), SPEC) == {"int4": "layers.0.q", "int8_weights": "lm_head"}
    assert need_of(FLOAT) is None


def test_every_compiler_has_a_cell_for_every_need_and_only_tensorrt_is_not_tried() -> None:
    assert all(support.cells.keys() == WORDS.keys() for support in SUPPORT.values())
    assert [name for name, support in SUPPORT.items() if not support.is_tried] == ["tensorrt"]


def test_cpu_takes_everything() -> None:
    for scheme in SCHEMES:
        for kv in ("float", "fp8", "int8"):
            assert is_taken("cpu", checkpoint(scheme, kv=kv))  # type: ignore[arg-type]
    assert all(is_taken("cpu", precision(name)) for name in ("fp32", "fp16", "bf16", "int8", "int4"))


def test_every_precision_of_every_target() -> None:
    names = ("fp16", "bf16", "int8", "int4")
    wrong = {(sm, name) for sm in rtx.TARGETS for name in names if not is_taken(sm, precision(name))}
    assert wrong == {("sm75", "bf16"), ("sm75", "int4")}


@pytest.mark.parametrize(
    ("scheme", "taken"),
    [
        ("int8_sq", "sm75 sm80 sm86 sm89 sm120 rtx"),
        ("int4_awq_zeros", "sm80 sm86 sm89 sm120 rtx"),
        ("fp8", "sm89 sm120"),
        ("fp8_blocks", "sm89 sm120"),
        ("w4a8", "sm89 sm120"),
        ("nvfp4", "sm120"),
        ("nvfp4_wo", "sm120"),
    ],
)
def test_who_takes_a_quantized_checkpoint(scheme: str, taken: str) -> None:
    assert " ".join(sm for sm in rtx.TARGETS if is_taken(sm, checkpoint(scheme))) == taken


@pytest.mark.parametrize(
    ("target", "scheme", "words"),
    [
        (
            "sm80",
            "fp8",
            "sm80 (A100) has no FP8 products, which precision fp8 (layers.0.q) needs; build it for sm89 or sm120 or "
            "cpu, or give sm80 int8_sq: plansmith quantize CHECKPOINT --recipe int8_sq -o OUT",
        ),
        ("sm89", "nvfp4", "give sm89 w4a8_awq: plansmith quantize CHECKPOINT --recipe w4a8_awq -o OUT"),
        ("sm89", "nvfp4_wo", "give sm89 int4_awq: plansmith quantize CHECKPOINT --recipe int4_awq -o OUT"),
        ("sm80", "w4a8", "give sm80 int4_awq: plansmith quantize CHECKPOINT --recipe int4_awq -o OUT"),
        ("sm75", "int4_awq", "give sm75 int8_wo: plansmith quantize CHECKPOINT --recipe int8_wo -o OUT"),
        ("rtx", "fp8", "rtx (any of sm80, sm86, sm89, sm120) has no FP8 products"),
    ],
)
def test_a_refusal_names_what_is_missing_and_the_nearest_that_works(
    target: str, scheme: str, words: str
) -> None:
    assert words in refused(target, checkpoint(scheme))


def test_what_needs_no_calibration_is_answered_in_kind() -> None:
    assert refused("sm75", precision("int4")).endswith(
        "build it for sm80 or sm86 or sm89 or sm120 or rtx or cpu, or give sm75 int8: plansmith build CHECKPOINT "
        "--target sm75 --precision int8"
    )
    assert "has no plans in float32" in refused("sm89", precision("fp32"))
    assert refused("sm89", precision("fp32")).endswith(
        "give sm89 fp16: plansmith build CHECKPOINT --target sm89 --precision fp16"
    )


@pytest.mark.parametrize("kv", ["fp8", "int8"])
def test_quantized_pools_are_for_cpu_and_the_other_compiler(kv: KvFormat) -> None:
    text = refused("sm120", checkpoint("fp8", kv=kv))
    assert f"has no {kv.upper()} KV pools" in text and "build it for sm120-tensorrt or cpu, " in text
    assert text.endswith("plansmith quantize CHECKPOINT --recipe fp8 --kv-cache none -o OUT")


def test_a_model_whose_activations_overflow_float16() -> None:
    text = refused("sm75", precision("int8"), GEMMA)
    assert (
        "has no bfloat16, which precision int8 of gemma2, whose activations overflow float16, needs" in text
    )
    assert text.endswith("give sm75 fp16: plansmith build CHECKPOINT --target sm75 --precision fp16")


def test_of_mixed_schemes_the_refused_layer_is_named() -> None:
    schemes = (("layers.0.q", SCHEMES["int8_sq"]), ("layers.1.down", SCHEMES["fp8"]))
    mixed = of_checkpoint(Quantization("mixed", "tests", schemes), "float16")
    assert "sm86 (A10, RTX 30) has no FP8 products, which precision mixed (layers.1.down) needs" in refused(
        "sm86", mixed
    )
    assert is_taken("sm89", mixed)


def test_every_refusal_offers_what_is_then_taken() -> None:
    recipes: dict[str, Any] = {
        "w4a8_awq": "w4a8",
        "int4_awq": "int4_awq",
        "nvfp4": "nvfp4",
        "nvfp4_wo": "nvfp4_wo",
        "fp8": "fp8",
        "int8_sq": "int8_sq",
        "int8_wo": "int8_wo",
    }
    for target in rtx.TARGETS:
        for scheme in SCHEMES:
            if is_taken(target, checkpoint(scheme)):
                continue
            offered = refused(target, checkpoint(scheme)).split(f"give {target} ")[1].split(":")[0]
            recipe = checkpoint(recipes[offered]) if offered in recipes else precision(offered)
            assert is_taken(target, recipe) and recipe.weight_bits >= checkpoint(scheme).weight_bits


def test_a_graph_s_types_are_checked_by_the_same_table() -> None:
    check_types(rtx.TARGETS["sm89"], frozenset({"fp32", "fp16", "fp8", "int4"}), "the graph")
    with pytest.raises(UnsupportedError, match=r"sm80 \(A100\) has no fp8, which the graph needs"):
        check_types(rtx.TARGETS["sm80"], frozenset({"fp16", "fp8"}), "the graph")
    assert takes("tensorrt", ("sm90",), "fp8") and not takes("tensorrt", ("sm90",), "nvfp4")
    assert need_of(Scheme("fp8", 128, input="fp8", input_group=128)) == "fp8_blocks"
