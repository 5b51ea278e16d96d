"""plansmith quantize: its report, its errors, and the flags of quantize.py."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

Run = Callable[..., Any]
Tiny = Callable[[str], Path]


@pytest.fixture
def texts(tmp_path: Path) -> Path:
    """Return a file that suffices for a few samples."""
    path = tmp_path / "texts.jsonl"
    line = json.dumps(
        {"text": "the quick brown fox jumps over the lazy dog and the other animals stand there"}
    )
    path.write_text(f"{line}\n" * 60, encoding="utf-8")
    return path


def test_a_checkpoint(plansmith: Run, tiny_checkpoint: Tiny, texts: Path, tmp_path: Path) -> None:
    few = ("--calib-data", texts, "--calib-size", 8, "--calib-length", 32)
    done = plansmith("quantize", tiny_checkpoint("llama"), "-o", tmp_path / "out", "--recipe", "fp8", *few)
    assert done.status == 0, done.err
    lines = done.out.splitlines()
    assert lines[0].startswith(f"{tmp_path / 'out'}: ") and "layers: 14 fp8; 1 left out" in lines[0]
    assert f"calibrated with 8 samples of 32 tokens ({texts}), seed 1234" in done.out
    assert lines[-1].startswith("next: plansmith build ")
    # nothing of the libraries: every line on standard error is ours
    assert all(line.startswith("plansmith: ") for line in done.err.splitlines()), done.err


def test_old_flags_and_json(plansmith: Run, tiny_checkpoint: Tiny, texts: Path, tmp_path: Path) -> None:
    done = plansmith(
        *("quantize", "--model_dir", tiny_checkpoint("llama"), "--output_dir", tmp_path / "out", "--json"),
        *("--qformat", "int4_awq", "--awq_block_size", 32, "--kv_cache_dtype", "int8", "--batch_size", 2),
        *("--calib_size", 8, "--calib_max_seq_length", 32, "--calib_dataset", texts, "--seed", 7),
        *("--dtype", "float16", "--device", "cpu", "--tp_size", 1, "--pp_size=1", "--export_format", "hf"),
        *("--tokenizer_max_seq_length", 2048, "--device_map", "auto", "--calib_tp_size", 1),
    )
    assert done.status == 0, done.err
    report = json.loads(done.out)
    assert report["recipe"] == "int4_awq" and report["kv_cache"] == "int8" and report["seed"] == 7
    assert {one["group_size"] for one in report["layers"].values()} == {32}
    assert report["stored_dtype"] == "float16" and report["calibration"]["samples"] == 8
    notes = [line for line in done.err.splitlines() if "is ignored" in line]
    assert len(notes) == 6 and any("--tokenizer_max_seq_length 2048" in line for line in notes)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--tp_size", "2"), "--tp_size 2 of quantize.py is not available: calibration runs on one device"),
        (("--pp_size=4",), "--pp_size=4 of quantize.py is not available"),
        (("--export_format", "tensorrt_llm"), "the output is the unified Hugging Face form"),
        (("--nemo_ckpt_path", "x"), "NeMo checkpoints are not read"),
        (("--num_medusa_heads", "4"), "Medusa heads are not supported"),
        (
            ("--calib_dataset", "cnn_dailymail"),
            "'cnn_dailymail' is a data set of the network; nothing is fetched",
        ),
        (("--qformat", "full_prec"), "quantizes nothing"),
        (("--recipe", "fp3"), "--recipe 'fp3' is not known; choose one of fp8"),
        (("--smoothquant", "much"), "--smoothquant is 'much', it must be a number from 0 to 1, or auto"),
        (("--exclude", "*nothing*"), "matches no layer"),
        (("--device", "cuda"), "finds no CUDA device"),
    ],
)
def test_what_is_refused(
    words: tuple[str, ...], message: str, plansmith: Run, tiny_checkpoint: Tiny, tmp_path: Path
) -> None:
    import torch

    if "cuda" in words and torch.cuda.is_available():
        pytest.skip("there is a CUDA device")
    done = plansmith("quantize", tiny_checkpoint("llama"), "-o", tmp_path / "out", *words)
    assert done.status == 1 and message in done.err and len(done.err.strip().splitlines()) == 1
    assert list(tmp_path.iterdir()) == []


def test_one_checkpoint(plansmith: Run, tiny_checkpoint: Tiny, tmp_path: Path) -> None:
    path = tiny_checkpoint("llama")
    for words in ((), (path, "--model_dir", path)):
        done = plansmith("quantize", *words, "-o", tmp_path / "out")
        assert done.status == 2 and "give one checkpoint" in done.err
    done = plansmith("quantize", tmp_path / "nowhere", "-o", tmp_path / "out")
    assert done.status == 1 and "does not exist" in done.err


def test_a_gate_that_holds_is_reported_and_one_that_does_not_leaves_nothing(
    plansmith: Run, tiny_checkpoint: Tiny, texts: Path, tmp_path: Path
) -> None:
    common = ("--recipe", "int8_wo", "--calib-data", texts, "--calib-size", 8, "--calib-length", 32)
    source, out = tiny_checkpoint("llama"), tmp_path / "out"
    broken = plansmith("quantize", source, "-o", out, *common, "--gate", "kl<=0")
    assert broken.status == 1 and "the accuracy gate failed for int8_wo" in broken.err
    assert "kl is" in broken.err and "layers." in broken.err  # which layers cost most
    assert not out.exists() and [path.name for path in tmp_path.iterdir()] == ["texts.jsonl"]
    held = plansmith("quantize", source, "-o", out, *common, "--gate", "kl<=0.1", "--json")
    assert held.status == 0, held.err
    verdict = json.loads(held.out)["evaluation"]["gate"]
    assert verdict["passed"] and 0 < verdict["bounds"][0]["got"] <= 0.1


def test_a_build_keeps_to_its_gate(
    plansmith: Run, tiny_checkpoint: Tiny, texts: Path, tmp_path: Path
) -> None:
    source, quantized, engine = tiny_checkpoint("llama"), tmp_path / "quantized", tmp_path / "engine"
    few = ("--calib-data", texts, "--calib-size", 8, "--calib-length", 32)
    assert plansmith("quantize", source, "-o", quantized, "--recipe", "int8_wo", *few).status == 0
    broken = plansmith("build", quantized, "-o", engine, "--gate", "top1>=1.1")
    assert broken.status == 1 and "top1 is" in broken.err and not engine.exists()
    assert plansmith("build", quantized, "-o", engine, "--gate", "kl<=0.1").status == 0
    report = json.loads((engine / "build_report.json").read_text())
    assert report["precision"] == "int8_wo" and report["evaluation"]["gate"]["passed"]
    assert "kl" in (engine / "build_report.html").read_text()
    # an engine that is there already is judged too, and stays when it fails
    again = plansmith("build", quantized, "-o", engine, "--gate", "kl<=0")
    assert again.status == 1 and json.loads((engine / "build_report.json").read_text()) == report


def test_a_gate_on_a_precision_of_our_own(plansmith: Run, tiny_checkpoint: Tiny, tmp_path: Path) -> None:
    source, engine = tiny_checkpoint("llama"), tmp_path / "engine"
    assert plansmith("build", source, "-o", engine, "-p", "int4", "--gate", "kl<=0").status == 1
    gate = ("--gate", "kl<=0.1", "--sensitivity")
    assert plansmith("build", source, "-o", engine, "-p", "int8", *gate).status == 0
    costs = json.loads((engine / "build_report.json").read_text())["evaluation"]["sensitivity"]["layers"]
    assert {"layers.0", "lm_head"} <= {one["layer"] for one in costs}
    assert "<svg" in (engine / "build_report.html").read_text()
    nothing = plansmith("build", source, "-o", engine, "--against", source)
    assert nothing.status == 2 and "--gate" in nothing.err
