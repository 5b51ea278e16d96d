"""plansmith triton-repo on a tiny engine."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from plansmith.serving.supervisor.install import IMAGE

sys.path.insert(0, str(Path(__file__).parents[1] / "serving" / "repository"))
from old_repos import FILLED, write_old

Run = Callable[..., Any]


def test_a_repository_is_written(plansmith: Run, engine_dir: Path, tmp_path: Path) -> None:
    out = tmp_path / "repo"
    result = plansmith("triton-repo", engine_dir, "-o", out)
    assert result.status == 0, result.err
    assert f"plansmith triton start {out}" in result.out and not result.err
    text = (out / "tensorrt_llm" / "config.pbtxt").read_text()
    assert f'string_value: "{engine_dir}"' in text and "max_batch_size: 8" in text and "${" not in text


def test_the_last_line_names_what_start_needs(
    plansmith: Run, engine_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if IMAGE.exists():
        pytest.skip("start finds the image's own server")
    monkeypatch.setenv("PLANSMITH_TRITON_ENV", str(tmp_path / "env"))
    last = plansmith("triton-repo", engine_dir, "-o", tmp_path / "repo").out.splitlines()[-1]
    assert " --triton-env DIR (" in last
    server = tmp_path / "env/lib/python3.11/site-packages/pytriton/tritonserver/bin/tritonserver"
    server.parent.mkdir(parents=True)
    server.touch()
    last = plansmith("triton-repo", engine_dir, "-o", tmp_path / "repo", "--force").out.splitlines()[-1]
    assert last == f"serve it with: plansmith triton start {tmp_path / 'repo'}"


def test_options_go_where_they_belong(plansmith: Run, engine_dir: Path, tmp_path: Path) -> None:
    out = tmp_path / "repo"
    options = [
        "--max-batch-size=3", "--no-decoupled", "--max-queue-size=7", "--logits-dtype=float16",
        "--preprocessing-instances=2", "--postprocessing-instances=4", "--bls-instances=5",
        "--set", "num_threads=2", "--set", "postprocessing.skip_special_tokens=false", "--relative",
    ]  # fmt: skip
    assert plansmith("triton-repo", engine_dir, "-o", out, *options).status == 0
    configs = {one.parent.name: one.read_text() for one in out.glob("*/config.pbtxt")}
    engine = configs["tensorrt_llm"]
    assert "preferred_batch_size: [ 3 ]" in engine and "decoupled: false" in engine
    assert "max_queue_size: 7" in engine and '"context_logits" data_type: TYPE_FP16' in engine
    assert 'key: "num_threads" value: { string_value: "2" }' in engine
    assert 'key: "gpt_model_path" value: { string_value: "../' in engine
    assert 'key: "skip_special_tokens" value: { string_value: "false" }' in configs["postprocessing"]
    counts = {"preprocessing": 2, "postprocessing": 4, "tensorrt_llm_bls": 5, "tensorrt_llm": 1}
    for model, count in counts.items():
        assert f"count: {count} }}" in configs[model]


def test_json(plansmith: Run, engine_dir: Path, tmp_path: Path) -> None:
    old = write_old(tmp_path / "old", FILLED)
    content = json.loads(
        plansmith("triton-repo", engine_dir, "-o", tmp_path / "new", "--from", old, "--json").out
    )
    assert content["models"]["ensemble"] == "ensemble" and content["notes"] == []
    rows = {(one["model"], one["key"]): one for one in content["carried"]}
    assert rows["tensorrt_llm", "max_tokens_in_paged_kv_cache"]["state"] == "carried"
    assert rows["tensorrt_llm", "gpt_model_path"]["new"] == str(engine_dir)
    assert content["unfilled_variables"] > 0


def test_the_report_on_an_older_repository(plansmith: Run, engine_dir: Path, tmp_path: Path) -> None:
    old = write_old(tmp_path / "old", FILLED)
    result = plansmith("triton-repo", engine_dir, "-o", tmp_path / "new", "--from", old)
    assert result.status == 0
    assert "max_tokens_in_paged_kv_cache = 2560" in result.out
    assert "  changed gpt_model_path: /models/engines/llama/1-gpu ->" in result.out
    assert "kv_cache_free_gpu_mem_fraction = 0.85" in result.out
    assert "variables of its templates were not filled" in result.out
    assert re.search(r"^  tensorrt_llm: .*\bgpu_device_ids\b", result.out, re.M)


def test_ours_is_renewed_in_its_place_with_its_changes(
    plansmith: Run, engine_dir: Path, tmp_path: Path
) -> None:
    out = tmp_path / "repo"
    relative = ["--relative"]
    assert plansmith("triton-repo", engine_dir, "-o", out, *relative).status == 0
    path = out / "tensorrt_llm" / "config.pbtxt"
    first = path.read_text()
    path.write_text(
        first.replace('"num_threads" value: { string_value: "0"', '"num_threads" value: { string_value: "1"')
    )
    refused = plansmith("triton-repo", engine_dir, "-o", out)
    assert refused.status == 1 and "was changed since it was written" in refused.err
    assert plansmith("triton-repo", engine_dir, "-o", out, "--from", out, *relative).status == 0
    assert path.read_text() == first.replace(
        '"num_threads" value: { string_value: "0"', '"num_threads" value: { string_value: "1"'
    )


def test_without_effect_is_noted(plansmith: Run, engine_dir: Path, tmp_path: Path) -> None:
    result = plansmith("triton-repo", engine_dir, "-o", tmp_path / "repo", "--set", "gpu_device_ids=0")
    assert (
        result.status == 0
        and "note: gpu_device_ids is '0' and has no effect: the target is cpu" in result.err
    )


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--set", "max_beam_width=4"], "max_beam_width is 4, the engine"),
        (["--set", "decoding_mode=medusa"], "draft heads cannot be run"),
        (["--set", "speculation=model"], "has no draft for cpu"),
        (["--set", "pause_policy=swap"], "pause_policy is 'swap', which needs host memory"),
        (["--set", "ngram_max=1"], "ngram_min is 2, more than ngram_max 1"),
        (["--set", "draft_engine_dir=/nowhere"], "/nowhere does not exist"),
        (["--target", "rtx-sm89"], "no target 'rtx-sm89'"),
        (["--logits-dtype", "bfloat16"], "--logits-dtype is 'bfloat16'"),
        (["--from", "/nowhere"], "/nowhere is no directory"),
    ],
)
def test_errors_leave_nothing(
    plansmith: Run, engine_dir: Path, tmp_path: Path, arguments: list[str], says: str
) -> None:
    out = tmp_path / "repo"
    result = plansmith("triton-repo", engine_dir, "-o", out, *arguments)
    assert result.status == 1 and says in result.err
    assert not list(tmp_path.iterdir())


def test_no_engine(plansmith: Run, tmp_path: Path) -> None:
    result = plansmith("triton-repo", tmp_path, "-o", tmp_path / "repo")
    assert result.status == 1 and "plansmith build" in result.err
    assert plansmith("triton-repo").status == 2


def test_list_of_parameters(plansmith: Run) -> None:
    rows = {
        one["key"]: one for one in json.loads(plansmith("triton-repo", "--list-parameters", "--json").out)
    }
    assert rows["kv_cache_bytes"]["becomes"] == "option kv_cache_bytes"
    lines = plansmith("triton-repo", "--list-parameters").out.splitlines()
    for key, row in rows.items():  # a pipe gets each in a line of its own, whatever its width
        assert [line for line in lines if f" {key} " in line and row["meaning"] in line], key
