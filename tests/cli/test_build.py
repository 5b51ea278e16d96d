"""plansmith build: options, trtllm-build's names, exit codes, signals."""

from __future__ import annotations

import json
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from plansmith.builder import build as build_module
from plansmith.cli import legacy
from plansmith.runtime.errors import InvalidArgumentError
from plansmith.runtime.manifest import load_manifest

Run = Callable[..., Any]
LIMITS = ("--max-seq-len", 64, "--max-num-tokens", 32, "--max-batch-size", 4)


@pytest.fixture
def checkpoint(tiny_checkpoint: Callable[[str], Path]) -> Path:
    return tiny_checkpoint("llama")


def test_build_and_report(plansmith: Run, checkpoint: Path, tmp_path: Path) -> None:
    out = tmp_path / "engine"
    result = plansmith("build", checkpoint, "-o", out, "-p", "int8", *LIMITS)
    assert result.status == 0, result.err
    assert "built" in result.out and "cpu" in result.out
    assert "plansmith: cpu: packing" in result.err  # progress in lines, without a terminal
    assert "kept" in plansmith("build", checkpoint, "-o", out, "-p", "int8", *LIMITS).out


def test_json_is_alone_on_stdout(plansmith: Run, checkpoint: Path, tmp_path: Path) -> None:
    result = plansmith("build", checkpoint, "-o", tmp_path / "engine", "--json", *LIMITS)
    report = json.loads(result.out)
    assert result.err == ""
    assert report["targets"]["cpu"]["status"] == "built"
    assert report["limits"]["max_batch_size"] == 4


def test_trtllm_build_command_line(plansmith: Run, checkpoint: Path, tmp_path: Path) -> None:
    out = tmp_path / "engine"
    result = plansmith(
        *("build", "--checkpoint_dir", checkpoint, f"--output_dir={out}", "--max_batch_size", 4),
        *("--max_num_tokens=32", "--max_input_len", 48, "--max_seq_len", 64, "--max_beam_width", 1),
        *("--tokens_per_block", 8, "--kv_cache_type=PAGED", "--workers", 2, "--gemm_plugin", "auto"),
        *("--remove_input_padding", "enable", "--use_paged_context_fmha=enable", "--monitor_memory"),
    )
    assert result.status == 0, result.err
    limits = load_manifest(out).limits
    assert (limits.max_batch_size, limits.max_num_tokens, limits.max_input_len) == (4, 32, 48)
    assert (limits.max_seq_len, limits.tokens_per_block) == (64, 8)
    for name in ("--gemm_plugin auto", "--remove_input_padding enable", "--monitor_memory"):
        assert f"note: {name} is ignored: " in result.err


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--lora_dir", "x"), "--lora_dir x of trtllm-build is not available: LoRA"),
        (("--weight_streaming",), "--weight-streaming is for plans of GPUs, and none is among the targets"),
        (("--strip_plan",), "--strip_plan of trtllm-build is not available"),
        (("--paged_kv_cache", "disable"), "--paged_kv_cache disable of trtllm-build is not available"),
        (("--speculative_decoding_mode=medusa",), "--speculative_decoding_mode=medusa of"),
        (("--max_output_len", 64), "--max_output_len 64 of trtllm-build is not available: use --max_seq_len"),
        (("--use_prompt_tuning",), "--use_prompt_tuning of trtllm-build is not available: prompt tuning"),
        (("--enable_fp8_kv_cache",), "run plansmith quantize CHECKPOINT --kv-cache fp8 -o OUT"),
        (("--qformat", "fp8"), "run plansmith quantize CHECKPOINT --recipe NAME -o OUT"),
        (("--max_beam_width", 65), "--max_beam_width is 65, it must be between 1 and 64"),
        (("--draft", "fp8"), "--draft 'fp8' is not known; choose one of fp32"),
        (("--precision", "int4", "--draft", "int4"), "--draft int4 is no smaller than the engine's int4"),
        (("--kv_cache_type", "continuous"), "--kv_cache_type is 'continuous'"),
        (("--max_seq_len", 100000), "--max_seq_len is 100000, it must be between 2 and 256"),
        (("--target", "sm70"), "this version cannot build for sm70"),
        (
            ("--target", "sm90"),
            "sm90 (H100, H200) is compiled by TensorRT 11 on a machine with that GPU, but here",
        ),
        (("--precision", "fp8"), "--precision fp8 needs calibrated scales"),
        (("--kv_cache_dtype", "int8"), "--kv-cache-dtype int8 needs calibrated scales"),
    ],
)
def test_refused_in_one_sentence(
    plansmith: Run, checkpoint: Path, tmp_path: Path, words: tuple[Any, ...], message: str
) -> None:
    result = plansmith("build", checkpoint, "-o", tmp_path / "engine", *words)
    assert result.status == 1
    assert message in result.err and result.err.count("\n") == 1
    assert list(tmp_path.iterdir()) == []


def test_an_error_as_json(plansmith: Run, tmp_path: Path) -> None:
    result = plansmith("build", tmp_path / "none", "--json")
    assert result.status == 1
    assert json.loads(result.out)["error"]["kind"] == "CheckpointError"
    result = plansmith("build", tmp_path / "none", "--json", "--lora_dir", "x")
    assert result.status == 1
    assert json.loads(result.out)["error"]["kind"] == "InvalidArgumentError"


def test_one_checkpoint_is_needed(plansmith: Run, checkpoint: Path) -> None:
    assert plansmith("build").status == 2
    assert plansmith("build", checkpoint, "--checkpoint-dir", checkpoint).status == 2


def test_dry_run_writes_nothing(plansmith: Run, checkpoint: Path, tmp_path: Path) -> None:
    result = plansmith("build", checkpoint, "-o", tmp_path / "engine", "--dry_run", "--json", "-t", "cpu")
    facts = json.loads(result.out)
    assert facts["targets"] == ["cpu"] and facts["needed_disk_bytes"] > 0
    assert "family llama" in plansmith("build", checkpoint, "-o", tmp_path / "e", "--dry-run").out
    gated = plansmith("build", checkpoint, "-o", tmp_path / "e", "--dry-run", "--gate", "kl<=nan")
    assert gated.status == 1 and "'nan' for a number" in gated.err
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("place", "message"),
    [
        ("file", "is a file, an engine is a directory"),
        ("file/engine", "is no directory"),
        ("others", "holds files but no manifest.json"),
        ("engine", "holds an engine of another precision"),
        ("/proc/engine", "/proc cannot be written to"),
        ("/proc", "is a mount point"),
        ("x" * 250, "files beside it have longer ones"),
        ("model", "the checkpoint"),
    ],
)
def test_a_dry_run_is_refused_as_the_build_is(
    plansmith: Run, checkpoint: Path, tmp_path: Path, place: str, message: str
) -> None:
    (tmp_path / "file").write_text("x")
    (tmp_path / "others").mkdir()
    (tmp_path / "others" / "notes").write_text("x")
    model = shutil.copytree(checkpoint, tmp_path / "model")
    (model / "manifest.json").write_text("{}")
    assert plansmith("build", model, "-o", tmp_path / "engine", "-p", "fp32", *LIMITS).status == 0
    before = sorted(tmp_path.rglob("*"))
    words = ("build", model, "-o", tmp_path / place, "-p", "int8", *LIMITS)
    done, dry = plansmith(*words), plansmith(*words, "--dry-run")
    assert dry.status == done.status == 1 and dry.out == ""
    assert message in done.err and done.err.splitlines()[-1] == dry.err.splitlines()[-1]
    assert sorted(tmp_path.rglob("*")) == before
    assert plansmith(*words[:3], tmp_path / "engine", *words[4:], "--force", "--dry-run").status == 0


def test_a_dry_run_sees_a_disk_that_is_too_small(
    plansmith: Run, checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(build_module, "needed_bytes", lambda request, targets: 10**18)
    for more in ((), ("--dry-run",)):
        result = plansmith("build", checkpoint, "-o", tmp_path / "a" / "engine", *LIMITS, *more)
        assert result.status == 1 and "1000000000000 MB needed" in result.err
    assert list(tmp_path.iterdir()) == []


def test_a_dry_run_counts_what_is_there(plansmith: Run, checkpoint: Path, tmp_path: Path) -> None:
    words = ("build", checkpoint, "-o", tmp_path / "engine", "--json", *LIMITS)
    first = json.loads(plansmith(*words, "--draft", "int4", "--dry-run").out)
    assert plansmith(*words, "--draft", "int4").status == 0
    kept = json.loads(plansmith(*words, "--dry-run").out)
    assert kept["draft"] == "int4" and kept["needed_disk_bytes"] < first["needed_disk_bytes"]


def test_normalize_leaves_values_alone() -> None:
    words = ["build", "--output_dir=a_b", "c_d", "--max_seq_len", "--", "--not_an_option"]
    assert legacy.normalize(words) == [
        "build",
        "--output-dir=a_b",
        "c_d",
        "--max-seq-len",
        "--",
        "--not_an_option",
    ]


def test_no_flag_of_the_table_is_an_option_of_ours(plansmith: Run) -> None:
    text = plansmith("build", "--help").out
    ours = {word.strip(",│") for word in text.split() if word.startswith("--")}
    assert not ours & legacy.FLAGS.keys()
    assert all(name.startswith("--") and "_" not in name for name in legacy.FLAGS)


@pytest.mark.parametrize("name", sorted(legacy.FLAGS))
def test_each_flag_is_dropped_or_refused(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    flag = legacy.FLAGS[name]
    words = [name, "unheard-of"] if flag.takes_value else [name]
    if flag.harmless is None:
        assert legacy.translate([*words, "x"]) == ["x"]
        assert flag.note in capsys.readouterr().err
    else:
        with pytest.raises(InvalidArgumentError, match=name):
            legacy.translate([*words, "x"])
        for value in flag.harmless:
            assert legacy.translate([f"{name}={value}", "x"]) == ["x"]


def test_notes_show_what_was_typed(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--strongly_typed", "--use_custom_all_reduce=disable", "--identity-plugin", "float16", "a_b"]
    words += ["--multiple_profiles", "enable", "--use_fp8_context_fmha", "enable", "--use_embedding_sharing"]
    assert legacy.translate([*words, "--", "--strongly_typed"]) == ["a_b", "--", "--strongly_typed"]
    notes = [line.removeprefix("plansmith: note: ") for line in capsys.readouterr().err.splitlines()]
    assert [note.partition(" is ignored: ")[0] for note in notes] == [
        "--strongly_typed",
        "--use_custom_all_reduce=disable",
        "--identity-plugin float16",
        "--multiple_profiles enable",
        "--use_fp8_context_fmha enable",
        "--use_embedding_sharing",
    ]
    assert "one profile for each kind of step" in notes[3] and "never in fp8" in notes[4]


def test_old_names_are_renamed() -> None:
    assert legacy.translate(["--max-decoder-seq-len", "8", "--model-dir=x"]) == [
        "--max-seq-len",
        "8",
        "--checkpoint-dir=x",
    ]


SLOW = """
import signal, sys, time
signal.signal(signal.SIGHUP, signal.SIG_DFL)  # under nohup it would be ignored, as it should be
from plansmith.builder.targets import cpu
from plansmith.cli import main

def compile_plan(*arguments, **options):
    print("compiling", flush=True)
    time.sleep(60)

cpu.compile_plan = compile_plan
main()
"""


@pytest.mark.parametrize(
    ("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143), (signal.SIGHUP, 129)]
)
def test_signals_leave_nothing(checkpoint: Path, tmp_path: Path, number: int, code: int) -> None:
    child = subprocess.Popen(
        [sys.executable, "-c", SLOW, "build", str(checkpoint), "-o", str(tmp_path / "engine")],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert child.stdout is not None
    assert "compiling" in child.stdout.readline()
    child.send_signal(number)
    _, err = child.communicate(timeout=30)
    assert child.returncode == code
    assert "Traceback" not in err
    assert list(tmp_path.iterdir()) == []
