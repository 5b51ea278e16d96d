"""plansmith verify: what it prints and how it ends."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from plansmith.builder import compare
from plansmith.builder import verify as verify_module

Run = Callable[..., Any]
SMALL = ("--sequences", 2, "--length", 24, "--threads", 1)


def test_an_engine(plansmith: Run, engine_dir: Path) -> None:
    result = plansmith("verify", engine_dir, *SMALL)
    assert result.status == 0, result.out + result.err
    assert "cpu, reference" in result.out and "pass" in result.out
    assert "unrounded" not in result.out  # the legend is of the rows that are there
    assert "plansmith: verify: opening" in result.err  # progress in lines, without a terminal


def test_the_rows_are_explained(plansmith: Run, tiny_checkpoint: Callable[[str], Path]) -> None:
    result = plansmith("verify", tiny_checkpoint("llama"), "-p", "int8", *SMALL)
    text = " ".join(result.out.split())
    assert (
        "cpu: the compiled plan; reference: the same graph in ONNX Runtime; unrounded: that without" in text
    )


def test_a_checkpoint_as_json(plansmith: Run, tiny_checkpoint: Callable[[str], Path]) -> None:
    result = plansmith("verify", tiny_checkpoint("qwen2"), "-p", "int4", "--json", *SMALL)
    content = json.loads(result.out)
    assert result.err == ""
    assert result.status == 0 and content["passed"] and content["precision"] == "int4"
    assert [one["referee"] for one in content["comparisons"]] == ["reference", "unrounded"]


def test_a_failure_exits_with_1(plansmith: Run, engine_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    strict = compare.Threshold(max_diff=0.0)
    monkeypatch.setattr(verify_module, "threshold_of", lambda *_: strict)
    result = plansmith("verify", engine_dir, *SMALL)
    assert result.status == 1
    assert "FAIL" in result.out


def test_all_without_transformers(plansmith: Run, engine_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(verify_module, "has_transformers", lambda: False)
    result = plansmith("verify", engine_dir, "--against", "all", *SMALL)
    assert result.status == 0
    assert "transformers is not installed, so it is left out" in result.err
    result = plansmith("verify", engine_dir, "--against", "transformers", *SMALL)
    assert result.status == 1
    assert "needs torch and transformers" in result.err


def test_usage(plansmith: Run, engine_dir: Path, tmp_path: Path) -> None:
    assert plansmith("verify", engine_dir, "--against", "gpt").status == 2
    result = plansmith("verify", tmp_path / "none")
    assert result.status == 1 and "does not exist" in result.err
