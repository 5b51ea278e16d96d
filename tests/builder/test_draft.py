"""build --draft: what is compiled, kept, replaced and refused, and what the manifest says of it."""

from __future__ import annotations

import dataclasses
import pathlib
from collections.abc import Callable
from typing import Any

import pytest
from plansmith.builder.build import build_engine, check_build, plan_build
from plansmith.builder.build_report import BuildReport, read_targets
from plansmith.builder.targets.cpu import read_plan
from plansmith.runtime.errors import EngineFileError, InvalidArgumentError
from plansmith.runtime.executor import cpu_executor
from plansmith.runtime.manifest import Manifest, load_manifest, parse_manifest
from tiny_quantized import make_modelopt

LIMITS = {"max_batch_size": 4, "max_num_tokens": 32, "max_seq_len": 64, "tokens_per_block": 8}


@pytest.fixture
def checkpoint(tiny_checkpoint: Callable[[str], pathlib.Path]) -> pathlib.Path:
    return tiny_checkpoint("llama")


@pytest.fixture
def out(tmp_path: pathlib.Path) -> pathlib.Path:
    return tmp_path / "engine"


def build(
    checkpoint: pathlib.Path, out: pathlib.Path, draft: str | None, precision: str = "fp32", **options: Any
) -> BuildReport:
    limits = {**LIMITS, **options.pop("limits", {})}
    plan = plan_build(checkpoint, ["cpu"], precision=precision, limits=limits, draft=draft)
    return build_engine(plan, out, **options)


def statuses(report: BuildReport) -> dict[str, str]:
    return {name: one.status for name, one in report.targets.items()}


def test_a_draft_lies_beside_its_target(checkpoint: pathlib.Path, out: pathlib.Path) -> None:
    report = build(checkpoint, out, "int4")
    assert statuses(report) == {"cpu": "built", "cpu/draft": "built"} and report.draft == "int4"
    manifest = load_manifest(out)
    assert manifest.draft is not None and manifest.draft.precision == "int4"
    (file,) = manifest.draft.targets["cpu"].files
    assert file.path == "targets/cpu/draft/model.plan"
    assert file.size < manifest.targets["cpu"].files[0].size
    assert manifest.draft.targets["cpu"].activation_quantization == "int8"
    assert (out / "targets/cpu/draft/build.log").is_file()
    manifest.check_files(hashes=True)
    assert parse_manifest(manifest.to_text().encode(), out) == manifest
    assert manifest.build_command("cpu").endswith("--draft int4")
    assert read_targets(out) == report.targets


def test_its_plan_is_that_of_an_engine_of_its_precision(
    checkpoint: pathlib.Path, out: pathlib.Path, tmp_path: pathlib.Path
) -> None:
    build(checkpoint, out, "int4")
    build(checkpoint, tmp_path / "int4", None, precision="int4")
    alone = load_manifest(tmp_path / "int4")
    manifest = load_manifest(out)
    assert manifest.draft is not None
    entry = manifest.draft.targets["cpu"]
    assert manifest.path(entry.files[0]).read_bytes() == alone.plan_path("cpu").read_bytes()
    assert entry.key == alone.targets["cpu"].key


def test_a_draft_has_its_targets_kv_format_and_scales(out: pathlib.Path, tmp_path: pathlib.Path) -> None:
    checkpoint, _ = make_modelopt("fp8", tmp_path / "fp8", kv="FP8")
    build(checkpoint, out, "int4", precision="auto")
    manifest = load_manifest(out)
    assert manifest.draft is not None
    assert manifest.draft.targets["cpu"].kv_dtype == manifest.targets["cpu"].kv_dtype == "float8_e4m3fn"
    plans = manifest.plan_path("cpu"), draft_plan(manifest)
    scales, blocks = [], []
    for plan in plans:
        executor = cpu_executor(str(plan))
        blocks.append(executor.describe().kv_bytes_per_block)
        executor.close()
        tensors = read_plan(plan).tensors
        scales.append({one.name: one.data.tolist() for one in tensors if "k_scale" in one.name})
    assert blocks[0] == blocks[1] and scales[0] == scales[1] and len(scales[0]) == 2
    assert statuses(build(checkpoint, out, None, precision="auto")) == {"cpu": "kept", "cpu/draft": "kept"}
    for twice in ("int8", "int4_awq"):
        with pytest.raises(
            InvalidArgumentError, match=rf"quantized already \(fp8\).*{twice} would round it twice"
        ):
            plan_build(checkpoint, ["cpu"], precision=twice)


def draft_plan(manifest: Manifest) -> pathlib.Path:
    assert manifest.draft is not None
    return manifest.path(manifest.draft.targets["cpu"].files[0])


def test_what_has_not_changed_is_kept(checkpoint: pathlib.Path, out: pathlib.Path) -> None:
    build(checkpoint, out, None)
    assert load_manifest(out).draft is None
    assert statuses(build(checkpoint, out, "int4")) == {"cpu": "kept", "cpu/draft": "built"}
    before = (out / "manifest.json").stat().st_ino
    assert statuses(build(checkpoint, out, "int4")) == {"cpu": "kept", "cpu/draft": "kept"}
    assert statuses(build(checkpoint, out, None)) == {"cpu": "kept", "cpu/draft": "kept"}
    assert (out / "manifest.json").stat().st_ino == before
    assert statuses(build(checkpoint, out, None, force=True)) == {"cpu": "built", "cpu/draft": "built"}


def test_another_draft_replaces_it_and_none_removes_it(checkpoint: pathlib.Path, out: pathlib.Path) -> None:
    build(checkpoint, out, "int4")
    assert statuses(build(checkpoint, out, "int8")) == {"cpu": "kept", "cpu/draft": "built"}
    manifest = load_manifest(out)
    assert manifest.draft is not None and manifest.draft.precision == "int8"
    assert statuses(build(checkpoint, out, "none")) == {"cpu": "kept"}
    assert load_manifest(out).draft is None
    assert not (out / "targets/cpu/draft").exists()
    load_manifest(out).check_files(hashes=True)


def test_a_damaged_draft_is_found_and_built_again(checkpoint: pathlib.Path, out: pathlib.Path) -> None:
    build(checkpoint, out, "int4")
    path = out / "targets/cpu/draft/model.plan"
    good = path.read_bytes()
    path.write_bytes(good[:-64] + bytes(64))
    with pytest.raises(EngineFileError, match=r"draft of target cpu.*--draft int4 --force"):
        load_manifest(out).check_files(hashes=True)
    path.write_bytes(good[:-64])
    with pytest.raises(EngineFileError, match="draft of target cpu"):
        load_manifest(out).check_files()
    assert statuses(build(checkpoint, out, None)) == {"cpu": "kept", "cpu/draft": "built"}
    assert path.read_bytes() == good


def test_a_changed_limit_builds_both_again(checkpoint: pathlib.Path, out: pathlib.Path) -> None:
    build(checkpoint, out, "int4")
    report = build(checkpoint, out, None, limits={"max_batch_size": 2})
    assert statuses(report) == {"cpu": "built", "cpu/draft": "built"}


def test_the_number_of_beams_compiles_nothing_again(checkpoint: pathlib.Path, out: pathlib.Path) -> None:
    build(checkpoint, out, "int4")
    report = build(checkpoint, out, None, limits={"max_beam_width": 4})
    assert statuses(report) == {"cpu": "kept", "cpu/draft": "kept"}
    manifest = load_manifest(out)
    assert manifest.limits.max_beam_width == 4 and "--max-beam-width 4" in manifest.build_command("cpu")
    with pytest.raises(InvalidArgumentError, match="--max_beam_width is 5, it must be between 1 and 4"):
        plan_build(checkpoint, ["cpu"], limits={**LIMITS, "max_beam_width": 5})


@pytest.mark.parametrize(
    ("precision", "draft", "text"),
    [
        ("fp32", "fp8", "--draft 'fp8' is not known; choose one of fp32, fp16, bf16, int8, int4, none"),
        ("fp32", "fp32", "no smaller than the engine's fp32.*give fp16 or bf16 or int8 or int4"),
        ("int8", "int8", "no smaller than the engine's int8.*give int4"),
        ("int4", "int8", "no smaller than the engine's int4.*a smaller model's engine"),
    ],
)
def test_drafts_that_cannot_be(checkpoint: pathlib.Path, precision: str, draft: str, text: str) -> None:
    with pytest.raises(InvalidArgumentError, match=text):
        plan_build(checkpoint, ["cpu"], precision=precision, limits=LIMITS, draft=draft)


def test_a_draft_needs_steps_of_two_tokens(checkpoint: pathlib.Path) -> None:
    limits = {**LIMITS, "max_num_tokens": 1, "max_batch_size": 1}
    plan_build(checkpoint, ["cpu"], limits=limits)
    with pytest.raises(
        InvalidArgumentError, match=r"max_num_tokens is 1, and a step .* at least 2; raise it"
    ):
        plan_build(checkpoint, ["cpu"], limits=limits, draft="int4")


def test_the_disk_it_needs_is_counted(checkpoint: pathlib.Path, out: pathlib.Path) -> None:
    plans = [plan_build(checkpoint, ["cpu"], limits=LIMITS, draft=draft) for draft in ("none", "int4")]
    alone, both = (check_build(plan, out)[1] for plan in plans)
    assert both > alone


def test_a_draft_without_its_target_contradicts(checkpoint: pathlib.Path, out: pathlib.Path) -> None:
    build(checkpoint, out, "int4")
    manifest = load_manifest(out)
    assert manifest.draft is not None
    stray = dataclasses.replace(manifest.draft, targets={"sm89": manifest.draft.targets["cpu"]})
    text = dataclasses.replace(manifest, draft=stray).to_text()
    with pytest.raises(EngineFileError, match=r"draft\.targets must be among targets"):
        parse_manifest(text.encode(), out)
