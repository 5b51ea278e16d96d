"""bench/gpu_check.sh without a GPU: its stages run, its result is whole, and a kernel that is wrong makes it fail."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
FOLDERS = ("builder", "runtime", "plugins", "calibration", "serving", "triton_repo", "cli")


def check(
    output: Path, *arguments: str, tree: Path | None = None, **environment: str
) -> tuple[subprocess.CompletedProcess[str], dict[str, Any]]:
    """Run a dry run and return (the process, its JSON)."""
    command = ["bash", str(ROOT / "bench" / "gpu_check.sh"), "--dry-run", "--output", str(output), *arguments]
    full = dict(os.environ, PYTHON=sys.executable, OMP_NUM_THREADS="1", **environment)
    if tree is not None:
        full["PLANSMITH_TREE"] = str(tree)
    done = subprocess.run(command, capture_output=True, text=True, env=full, timeout=600)
    return done, json.loads(output.read_text()) if output.exists() else {}


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """Return a folder with the package as it is, its plugins a copy that a test may break."""
    package = tmp_path / "tree" / "plansmith"
    package.mkdir(parents=True)
    (package / "__init__.py").touch()
    for folder in FOLDERS:
        if folder == "plugins":
            shutil.copytree(ROOT / folder, package / folder)
        else:
            (package / folder).symlink_to(ROOT / folder)
    return package.parent


def verdicts(report: dict[str, Any], stage: str) -> list[str]:
    return [row["verdict"] for row in report["stages"][stage]["rows"]]


def test_right_kernels_pass_and_the_result_is_whole(tmp_path: Path) -> None:
    done, report = check(tmp_path / "out.json", "--stages", "correctness,rtx", "--ops", "sampling")
    assert done.returncode == 0, done.stdout + done.stderr
    assert report["dry_run"] is True
    assert list(report["stages"]) == ["correctness", "rtx"]
    assert [stage["status"] for stage in report["stages"].values()] == ["done", "done"]
    found = verdicts(report, "correctness")
    assert len(found) >= 3 and set(found) == {"right"}
    # The table is the last thing printed, with what a reader must not take for a measurement.
    assert "verdict" in done.stdout.splitlines()[0]
    assert "no time here is a measurement" in done.stdout


def test_a_wrong_kernel_makes_it_fail(tmp_path: Path, tree: Path) -> None:
    draw = tree / "plansmith" / "plugins" / "sampling" / "draw.py"
    source = draw.read_text()
    assert "tl.store(" in source
    # Whatever the kernel stores first, it stores one number too far up.
    draw.write_text(source.replace("tl.store(", "tl.store(1 + ", 1))
    done, report = check(tmp_path / "out.json", "--stages", "correctness", "--ops", "sampling", tree=tree)
    assert done.returncode == 1
    assert "WRONG" in verdicts(report, "correctness")
    assert "WRONG" in done.stdout


def test_a_stage_that_crashes_or_hangs_costs_its_own_rows_alone(tmp_path: Path, tree: Path) -> None:
    # The stage's process dies as it would of a lost context: in the middle, without a word to Python.
    (tree / "plansmith" / "plugins" / "sampling" / "run.py").write_text("import os\nos.abort()\n")
    done, report = check(tmp_path / "out.json", "--stages", "sampling,rtx", tree=tree)
    assert done.returncode == 1
    assert report["stages"]["sampling"]["status"] == "killed by SIGABRT"
    assert report["stages"]["rtx"]["status"] == "done"
    (tree / "plansmith" / "plugins" / "sampling" / "run.py").write_text("import time\ntime.sleep(600)\n")
    done, report = check(tmp_path / "hang.json", "--stages", "sampling,rtx", "--budget-s", "12", tree=tree)
    assert done.returncode == 1
    assert report["stages"]["sampling"]["status"] == "timeout"


def test_an_unknown_stage_and_a_missing_gpu_are_told(tmp_path: Path) -> None:
    done, _ = check(tmp_path / "out.json", "--stages", "decod")
    assert done.returncode == 2
    assert "no stage is called 'decod'; there are environment, correctness" in done.stderr
    command = ["bash", str(ROOT / "bench" / "gpu_check.sh"), "--output", str(tmp_path / "out.json")]
    hidden = dict(os.environ, PYTHON=sys.executable, CUDA_VISIBLE_DEVICES="")
    done = subprocess.run(command, capture_output=True, text=True, env=hidden, timeout=120)
    assert done.returncode == 2
    assert re.search(
        r"torch (sees no CUDA device here|\(\S+\) has no CUDA) \(.*\); set PYTHON to one", done.stderr
    )


@pytest.fixture
def bare(tmp_path: Path) -> Path:
    """Return a Python without packages, as `make demo` leaves one without torch."""
    python = tmp_path / "bare"
    python.write_text(f'#!/bin/sh\nexec "{sys._base_executable}" -I -S "$@"\n')  # type: ignore[attr-defined]
    python.chmod(0o755)
    return python


@pytest.mark.parametrize("flags", [[], ["--dry-run"]])
def test_a_python_without_torch_is_told(bare: Path, flags: list[str]) -> None:
    asked = [str(bare), str(ROOT / "bench/gpu/torch_here.py"), *flags]
    done = subprocess.run(asked, capture_output=True, text=True)
    assert done.returncode == 3 and done.stdout == "this Python has no numpy\n" and not done.stderr


def test_the_first_python_that_can_is_taken_and_why_not_the_others(tmp_path: Path, bare: Path) -> None:
    root = tmp_path / "clone"
    (root / "bench").mkdir(parents=True)
    shutil.copy(ROOT / "bench/gpu_check.sh", root / "bench")
    (root / "bench/gpu").symlink_to(ROOT / "bench/gpu")
    (root / ".venv/bin").mkdir(parents=True)
    (root / ".venv/bin/python").symlink_to(bare)
    bin_ = tmp_path / "bin"
    bin_.mkdir()
    (bin_ / "python3").write_text(f'#!/bin/sh\nexec "{sys.executable}" "$@"\n')
    (bin_ / "python3").chmod(0o755)
    environment = {**os.environ, "PATH": f"{bin_}:{os.environ['PATH']}"}
    environment.pop("PYTHON", None)
    command = ["bash", str(root / "bench/gpu_check.sh"), "--dry-run", "--stages", "none"]
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert f"gpu_check: not {root}/.venv/bin/python: this Python has no numpy\n" in done.stderr
    assert "gpu_check: python3 (torch 2" in done.stderr and "no stage is called 'none'" in done.stderr
    (bin_ / "python3").write_text(f'#!/bin/sh\nexec "{bare}" "$@"\n')
    done = subprocess.run(command[:-3], capture_output=True, text=True, env=environment)
    assert "gpu_check: not python3: this Python has no numpy\n" in done.stderr


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--ops", "samplin"], "no operation is called 'samplin'; there are gather_last"),
        (["--budget-s", "-3"], "--budget-s is -3, it must be seconds, 0 or more"),
        (["--budget-s", "nan"], "--budget-s is nan, it must be seconds"),
        (["--output", "/proc/none/out.json"], "/proc/none/out.json cannot be written (No such file"),
        (["--output", "/proc"], "/proc cannot be written (it is a directory); give another --output"),
    ],
)
def test_nonsense_is_told_before_anything_runs(tmp_path: Path, arguments: list[str], words: str) -> None:
    done, _ = check(tmp_path / "out.json", *arguments)
    assert done.returncode == 2 and words in done.stderr and "Traceback" not in done.stderr


def test_a_terminated_check_ends_its_stage(tmp_path: Path, tree: Path) -> None:
    (tree / "plansmith" / "plugins" / "sampling" / "run.py").write_text("import time\ntime.sleep(600)\n")
    command = [sys.executable, str(ROOT / "bench/gpu/check.py"), "--dry-run", "--stages", "sampling"]
    environment = {
        **os.environ,
        "PYTHONPATH": str(tree),
        "PLANSMITH_ROOT": str(ROOT),
        "TMPDIR": str(tmp_path),
    }
    command += ["--output", str(tmp_path / "out.json")]
    with subprocess.Popen(command, env=environment, stderr=subprocess.DEVNULL) as process:
        children = Path(f"/proc/{process.pid}/task/{process.pid}/children")
        while not (stage := children.read_text().split()):
            assert process.poll() is None
            time.sleep(0.05)
        process.terminate()
        assert process.wait(60) == 128 + signal.SIGTERM
    assert not Path(f"/proc/{stage[0]}").exists()
    assert not list(tmp_path.glob("gpu_check_*"))


def test_a_dry_run_tells_no_time_and_has_no_bfloat16(tmp_path: Path) -> None:
    done, report = check(tmp_path / "out.json", "--stages", "environment,correctness", "--ops", "gather_last")
    assert done.returncode == 0, done.stdout + done.stderr
    rows = [row for stage in report["stages"].values() for row in stage["rows"]]
    assert "measured" not in {row["verdict"] for row in rows}
    dry = [row for row in rows if row["verdict"] == "dry run"]
    assert len(dry) >= 2 and {(row["value"], row["peer_value"], row["ratio"]) for row in dry} == {(None,) * 3}
    assert not [row for row in rows if "bf16" in row["case"] or "bfloat16" in row["case"]]


@pytest.mark.slow
def test_every_stage_runs(tmp_path: Path) -> None:
    done, report = check(tmp_path / "out.json")
    assert done.returncode == 0, done.stdout + done.stderr
    assert {stage["status"] for stage in report["stages"].values()} == {"done"}
    assert "WRONG" not in [verdict for stage in report["stages"] for verdict in verdicts(report, stage)]


@pytest.mark.slow
def test_a_bundle_that_is_too_large_is_refused() -> None:
    command = ["bash", str(ROOT / "bench" / "gpu" / "pack.sh")]
    done = subprocess.run(
        command, capture_output=True, text=True, env=dict(os.environ, PYTHON=sys.executable, LIMIT_MIB="1")
    )
    assert done.returncode == 1
    assert "too large by" in done.stderr and not (ROOT / "build" / "gpu_check.tar.gz").exists()
    assert (ROOT / "build" / "gpu" / "kernels" / "kernels.json").exists()
