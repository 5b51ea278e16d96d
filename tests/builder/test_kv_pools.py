"""What the KV pools of an engine hold: its precision's default, --kv-cache-dtype, and what verify and commands say."""

from __future__ import annotations

import pathlib
from collections.abc import Callable
from typing import Any

import pytest
from plansmith.builder.build import build_engine, plan_build
from plansmith.builder.precision import PRECISIONS, draft_precision, precision
from plansmith.builder.targets.cpu.plan_reader import read_plan
from plansmith.builder.verify import verify
from plansmith.builder.verify_subject import open_subject
from plansmith.runtime.errors import InvalidArgumentError, UnsupportedError
from plansmith.runtime.executor import cpu_executor
from plansmith.runtime.manifest import Manifest, load_manifest
from tiny_quantized import make_modelopt

LIMITS = {"max_batch_size": 4, "max_num_tokens": 32, "max_seq_len": 64, "tokens_per_block": 8}
BYTES = {"float32": 4, "float16": 2}


@pytest.fixture
def checkpoint(tiny_checkpoint: Callable[[str], pathlib.Path]) -> pathlib.Path:
    return tiny_checkpoint("llama")


def build(checkpoint: pathlib.Path, out: pathlib.Path, **options: Any) -> Manifest:
    build_engine(plan_build(checkpoint, ["cpu"], limits=LIMITS, **options), out)
    return load_manifest(out)


def block_bytes(manifest: Manifest) -> int:
    executor = cpu_executor(str(manifest.plan_path("cpu")))
    try:
        return executor.describe().kv_bytes_per_block
    finally:
        executor.close()


def test_pools_are_float16_but_at_fp32() -> None:
    held = {name: one.on_cpu().kv for name, one in PRECISIONS.items()}
    assert held == {
        "fp32": "float",
        "fp16": "float16",
        "bf16": "float16",
        "int8": "float16",
        "int4": "float16",
    }
    assert {one.kv for one in PRECISIONS.values()} == {"float"}  # of other targets: like the activations


@pytest.mark.parametrize(
    ("name", "asked", "held"),
    [
        ("fp32", "auto", "float32"),
        ("fp32", "float16", "float16"),
        ("int8", "auto", "float16"),
        ("int8", "float32", "float32"),
        ("bf16", "auto", "float16"),
    ],
)
def test_an_engine_says_and_holds_what_was_asked_for(
    checkpoint: pathlib.Path, tmp_path: pathlib.Path, name: str, asked: str, held: str
) -> None:
    manifest = build(checkpoint, tmp_path / "engine", precision=name, kv_cache_dtype=asked)
    assert manifest.target("cpu").kv_dtype == held
    assert read_plan(manifest.plan_path("cpu")).kv_format.name == {"float32": "F32", "float16": "F16"}[held]
    model = manifest.model
    values = 2 * model.num_layers * model.num_kv_heads * model.head_dim * LIMITS["tokens_per_block"]
    assert block_bytes(manifest) == values * BYTES[held]
    assert model.kv_bytes_per_token(held) * LIMITS["tokens_per_block"] == values * BYTES[held]
    option = f" --kv-cache-dtype {held}"
    assert manifest.build_command("cpu").endswith(option) is (asked != "auto")
    assert option not in manifest.build_command("sm89")
    # An engine is verified with the pools it has, not with those of a build of today.
    with open_subject(tmp_path / "engine") as subject:
        assert subject.recipe.kv == ("float" if held == "float32" else "float16")
        report = verify(subject, num_sequences=2, max_length=20)
    assert all(one.passed for one in report.comparisons), report.comparisons


def test_groups_and_pools_are_chosen_together(checkpoint: pathlib.Path, tmp_path: pathlib.Path) -> None:
    plain = build(checkpoint, tmp_path / "plain", precision="int4").build_command("cpu")
    chosen = {"precision": "int4", "group_size": 64, "kv_cache_dtype": "float32"}
    manifest = build(checkpoint, tmp_path / "engine", **chosen)
    wanted = plain.replace(str(tmp_path / "plain"), str(tmp_path / "engine"))
    assert manifest.build_command("cpu") == f"{wanted} --group-size 64 --kv-cache-dtype float32"
    with open_subject(tmp_path / "engine") as subject:
        assert subject.recipe == plan_build(checkpoint, ["cpu"], **chosen).recipe.on_cpu()
        found = read_plan(subject.plan)
        assert found.kv_format.name == "F32"
        assert {t.group_size for t in found.tensors if t.name == "layers.0.q|k|v.weight"} == {64}
        assert all(one.passed for one in verify(subject, num_sequences=2, max_length=20).comparisons)


def test_other_pools_are_another_plan(checkpoint: pathlib.Path, tmp_path: pathlib.Path) -> None:
    first = build(checkpoint, tmp_path / "engine", precision="int8").targets["cpu"].key
    kept = (
        build(checkpoint, tmp_path / "engine", precision="int8", kv_cache_dtype="float16").targets["cpu"].key
    )
    other = (
        build(checkpoint, tmp_path / "engine", precision="int8", kv_cache_dtype="float32").targets["cpu"].key
    )
    assert first == kept != other


def test_a_draft_has_the_pools_that_were_chosen_for_its_engine(
    checkpoint: pathlib.Path, tmp_path: pathlib.Path
) -> None:
    manifest = build(
        checkpoint, tmp_path / "engine", precision="fp32", draft="int4", kv_cache_dtype="float32"
    )
    assert manifest.draft is not None and manifest.draft.targets["cpu"].kv_dtype == "float32"
    alone = draft_precision("int4", precision("bf16"))
    assert alone is not None and alone.on_cpu() == precision("int4").on_cpu()


def test_what_is_refused(checkpoint: pathlib.Path, tmp_path: pathlib.Path) -> None:
    with pytest.raises(
        InvalidArgumentError, match="--kv-cache-dtype 'half' is not known; choose one of auto, float32"
    ):
        plan_build(checkpoint, ["cpu"], kv_cache_dtype="half")
    with pytest.raises(
        InvalidArgumentError, match=r"--kv-cache-dtype fp8 needs calibrated scales.*--kv-cache fp8 -o"
    ):
        plan_build(checkpoint, ["cpu"], kv_cache_dtype="fp8")
    with pytest.raises(
        UnsupportedError, match="float32, float KV pools of sm89 have the type of its activations"
    ):
        plan_build(checkpoint, ["cpu", "sm89"], precision="fp16", kv_cache_dtype="float32")
    quantized, _ = make_modelopt("fp8", tmp_path / "fp8", kv="FP8")
    assert plan_build(quantized, ["cpu"], kv_cache_dtype="fp8").recipe.on_cpu().kv == "fp8"
    with pytest.raises(InvalidArgumentError, match=r"is float16, the KV cache of .* is calibrated as fp8"):
        plan_build(quantized, ["cpu"], kv_cache_dtype="float16")


def test_a_quantized_checkpoint_without_kv_scales_has_float16_pools(tmp_path: pathlib.Path) -> None:
    quantized, _ = make_modelopt("fp8", tmp_path / "fp8")
    manifest = build(quantized, tmp_path / "engine")
    assert manifest.target("cpu").kv_dtype == "float16"
