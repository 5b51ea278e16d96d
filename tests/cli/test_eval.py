"""plansmith eval: what it prints, writes, and how it ends."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

Run = Callable[..., Any]
SMALL = ("--length", 120, "--contexts", "16,64", "--threads", 1)


@pytest.fixture(scope="module")
def int8_engine(tiny_checkpoint: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    from tiny_engines import build_tiny

    return build_tiny(tiny_checkpoint("llama"), tmp_path_factory.mktemp("engine") / "int8", "int8")


def test_an_engine(plansmith: Run, int8_engine: Path, tmp_path: Path) -> None:
    page = tmp_path / "page.html"
    result = plansmith("eval", int8_engine, *SMALL, "--gate", "kl<=0.1,top1@long>=0.5", "--html", page)
    assert result.status == 0, result.out + result.err
    assert "int8 against" in result.out and "greedy outputs agree" in result.out
    assert result.out.count("pass") == 2
    assert "plansmith: eval: opening" in result.err
    content = page.read_text()
    assert "gate passed" in content and "plansmith-cpu" in content  # the engine's build is on it


def test_a_checkpoint_with_everything_as_json(
    plansmith: Run, tiny_checkpoint: Callable[[str], Path], tmp_path: Path
) -> None:
    text = tmp_path / "a.jsonl"
    text.write_text(json.dumps({"text": "the quick brown fox jumps over the lazy dog " * 20}) + "\n")
    words = ("-p", "int4", "--text", text, "--tasks", "--sensitivity", "--sensitivity-tokens", 32, "--json")
    result = plansmith("eval", tiny_checkpoint("llama"), *SMALL, *words, "--gate", "kl<=0.0001,task_acc>=0")
    assert result.status == 1
    assert "gate: kl is" in result.err
    content = json.loads(result.out)
    assert content["text"] == "a.jsonl" and content["precision"] == "int4"
    assert [one["context"] for one in content["contexts"]] == [16, 64]
    assert content["tasks"]["overall"]["items"] >= 100
    assert [one["layer"] for one in content["sensitivity"]["layers"]] == ["layers.0", "layers.1", "lm_head"]
    assert [one["passed"] for one in content["gate"]["bounds"]] == [False, True]


def test_tables(plansmith: Run, tiny_checkpoint: Callable[[str], Path]) -> None:
    words = (
        "-p",
        "int4",
        "--tasks",
        "--sensitivity",
        "--sensitivity-tokens",
        32,
        "--sensitivity-mode",
        "both",
    )
    result = plansmith("eval", tiny_checkpoint("llama"), *SMALL, *words)
    assert result.status == 0, result.err
    assert "the 3 layers that cost most, of 3" in result.out and "lm_head" in result.out
    assert "sentiment" in result.out


def test_an_engine_without_a_cpu_target(
    plansmith: Run, int8_engine: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The manifest's one target renamed, as if a GPU's: a cpu plan of the same recipe takes its place."""
    from plansmith.calibration import eval_subject

    engine = shutil.copytree(int8_engine, tmp_path / "engine")
    load = eval_subject.load_manifest

    def renamed(path: Path) -> Any:
        import dataclasses

        manifest = load(path)
        return dataclasses.replace(manifest, targets={"sm89": manifest.targets["cpu"]})

    with_cpu = json.loads(plansmith("eval", engine, *SMALL, "--json").out)
    monkeypatch.setattr(eval_subject, "load_manifest", renamed)
    result = plansmith("eval", engine, *SMALL, "--json")
    content = json.loads(result.out)
    assert "has no cpu target (sm89)" in content["notes"][0]
    assert content["overall"] == with_cpu["overall"]
    other = plansmith("eval", engine, *SMALL, "--checkpoint", tmp_path / "none")
    assert other.status == 1 and "is not at" in other.err


def test_pipes_in_the_engine_are_not_waited_for(plansmith: Run, int8_engine: Path, tmp_path: Path) -> None:
    engine = shutil.copytree(int8_engine, tmp_path / "engine")
    page = tmp_path / "page.html"
    (engine / "build_report.json").unlink()
    os.mkfifo(engine / "build_report.json")
    result = plansmith("eval", engine, *SMALL, "--html", page)
    assert result.status == 0 and page.exists(), (
        result.err
    )  # as without the report, which is no part of an engine
    (engine / "manifest.json").unlink()
    os.mkfifo(engine / "manifest.json")
    for command in ("eval", "verify"):
        result = plansmith(command, engine)
        assert result.status == 1 and "manifest.json is a FIFO, not a file" in result.err


def test_against(plansmith: Run, tiny_checkpoint: Callable[[str], Path], int8_engine: Path) -> None:
    result = plansmith("eval", int8_engine, *SMALL, "--json", "--against", tiny_checkpoint("llama3"))
    content = json.loads(result.out)
    assert result.status == 0 and content["overall"]["kl"] > 0.5  # another model altogether
    assert content["against"] == str(tiny_checkpoint("llama3"))


def test_a_page_that_cannot_be_written_is_said_before_any_work(
    plansmith: Run, int8_engine: Path, tmp_path: Path
) -> None:
    for page, words in (
        (tmp_path, "is a directory; give a file's name"),
        (tmp_path / "nowhere" / "page.html", "there is no directory"),
    ):
        result = plansmith("eval", int8_engine, *SMALL, "--html", page)
        assert result.status == 1 and f"--html {page}" in result.err and words in result.err
        assert "opening" not in result.err


def test_sensitivities_of_floats_are_refused_before_any_work(
    plansmith: Run, tiny_checkpoint: Callable[[str], Path]
) -> None:
    result = plansmith("eval", tiny_checkpoint("llama"), "-p", "fp32", *SMALL, "--sensitivity")
    assert result.status == 1 and "fp32 quantizes no layer" in result.err
    assert "windows" not in result.err and "original" not in result.err


def test_usage(plansmith: Run, int8_engine: Path, tmp_path: Path) -> None:
    assert plansmith("eval", int8_engine, "--contexts", "a,b").status == 2
    assert plansmith("eval", int8_engine, "--sensitivity-mode", "some").status == 2
    result = plansmith("eval", int8_engine, "--gate", "bleu>=3")
    assert result.status == 1 and "bleu" in result.err
    result = plansmith("eval", int8_engine, *SMALL, "--text", tmp_path / "none.txt")
    assert result.status == 1 and "not a file" in result.err
