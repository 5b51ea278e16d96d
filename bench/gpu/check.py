"""Everything that only a GPU can tell about plansmith, in one call: correctness, then speed, then a table.

    bench/gpu_check.sh                        all stages on this machine's GPU, under 8 minutes
    bench/gpu_check.sh --dry-run              the same code at tiny sizes on the CPU, interpreted
    bench/gpu_check.sh --stages decode,step   some of them

Each stage is a process of its own with a limit of its own, so that one that crashes or hangs costs its own rows alone.
What a stage has found so far is written after each row, and the whole result after each stage. The exit status is 1
where a result was wrong or a stage did not end; a goal of speed that was missed does not change it.
"""

from __future__ import annotations

import argparse
import contextlib
import errno
import math
import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import results
import stages

HERE = Path(__file__).resolve().parent


def run_stage(
    stage: stages.Stage, options: argparse.Namespace, limit_s: float, scratch: Path
) -> dict[str, Any]:
    """Return {status, seconds, rows, log} of one stage, run in processes of its own for `limit_s` seconds at most."""
    environment = dict(os.environ, PYTHONUNBUFFERED="1", HF_HUB_OFFLINE="1", TOKENIZERS_PARALLELISM="false")
    environment["GPU_CHECK_OPS"] = options.ops
    if options.dry_run:
        environment["TRITON_INTERPRET"] = "1"
    else:
        environment.pop("TRITON_INTERPRET", None)
    number = 1 if options.dry_run else stage.processes
    files = [scratch / f"{stage.name}.{i}" for i in range(number)]
    started = time.monotonic()
    children = []
    for i, file in enumerate(files):
        command = [
            sys.executable,
            str(HERE / "stage_main.py"),
            stage.name,
            str(file.with_suffix(f".{i}.jsonl")),
        ]
        command += [
            "--seed",
            str(options.seed),
            "--limit-s",
            str(limit_s),
            "--shard",
            str(i),
            "--shards",
            str(number),
        ]
        command += ["--dry-run"] if options.dry_run else []
        with file.with_suffix(f".{i}.log").open("w") as log:
            # A session of its own: what a stage starts (compilers, pytest) ends with it.
            child = subprocess.Popen(
                command, stdout=log, stderr=subprocess.STDOUT, env=environment, start_new_session=True
            )
        children.append(child)
    codes = [_wait(child, limit_s - (time.monotonic() - started)) for child in children]
    bad = [code for code in codes if code != 0]
    logs = [file.with_suffix(f".{i}.log").read_text(errors="replace") for i, file in enumerate(files)]
    return {
        "status": _status(bad[0] if bad else 0),
        "seconds": round(time.monotonic() - started, 1),
        "limit_s": round(limit_s, 1),
        "rows": [
            row for i, file in enumerate(files) for row in results.read_rows(file.with_suffix(f".{i}.jsonl"))
        ],
        "log": "".join(log[-4000:] for code, log in zip(codes, logs, strict=True) if code or not bad)[-8000:],
    }


def _wait(child: subprocess.Popen[bytes], limit_s: float) -> int | None:
    """Return how a stage's process ended, None where it had to be ended; its group ends with it."""
    try:
        return child.wait(timeout=max(limit_s, 0.1))
    except subprocess.TimeoutExpired:
        return None
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(child.pid, signal.SIGKILL)
        child.wait()


def _status(code: int | None) -> str:
    """Return how a stage's process ended, in words."""
    if code is None:
        return "timeout"
    if code == 0:
        return "done"
    return f"killed by {signal.Signals(-code).name}" if code < 0 else f"exit status {code}"


def main() -> int:
    """Run the stages that were asked for; print the table; return the exit status."""
    options = arguments()
    chosen = stages.choose(options.stages)
    budget_s = options.budget_s or (3600.0 if options.dry_run else 460.0)
    started = time.monotonic()
    report: dict[str, Any] = {
        "version": results.VERSION,
        "dry_run": options.dry_run,
        "seed": options.seed,
        "date": time.strftime("%Y-%m-%d"),
        "goals": stages.GOALS,
        "stages": {},
    }
    with tempfile.TemporaryDirectory(prefix="gpu_check_") as scratch:
        for stage in chosen:
            left = budget_s - (time.monotonic() - started)
            limit = min(stage.dry_limit_s if options.dry_run else stage.limit_s, left)
            if limit < 5:
                found: dict[str, Any] = {"status": "no time left", "seconds": 0.0, "rows": [], "log": ""}
            else:
                print(f"{stage.name}: {stage.title} ...", file=sys.stderr, flush=True)
                found = run_stage(stage, options, limit, Path(scratch))
            report["stages"][stage.name] = found
            report["seconds"] = round(time.monotonic() - started, 1)
            results.write(report, options.output)
            print(f"{stage.name}: {found['status']} after {found['seconds']} s", file=sys.stderr, flush=True)
            if found["status"] not in ("done", "no time left"):
                print(found["log"][-1500:], file=sys.stderr, flush=True)
    print(results.table(report))
    print(f"\n{results.summary(report)}\nwritten to {options.output}")
    return 0 if results.is_right(report) else 1


def arguments() -> argparse.Namespace:
    """Return the command line's options, checked."""
    parser = argparse.ArgumentParser(
        prog="bench/gpu_check.sh", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--dry-run", action="store_true", help="tiny sizes on the CPU; measures nothing")
    parser.add_argument(
        "--stages", default="", help=f"names with commas between them: {', '.join(stages.NAMES)}"
    )
    parser.add_argument(
        "--ops", default="", help="of stage correctness, names with commas between them; default: all"
    )
    parser.add_argument("--seed", type=int, default=0, help="of the random inputs")
    parser.add_argument("--budget-s", type=float, default=0.0, help="seconds for all stages (default 460)")
    default = Path(os.environ.get("OUT") or "build") / "gpu_check.json"
    parser.add_argument(
        "--output",
        type=Path,
        default=default,
        help="the JSON file (default $OUT/gpu_check.json, without OUT build/gpu_check.json)",
    )
    options = parser.parse_args()
    if not 0 <= options.budget_s < math.inf:
        parser.error(f"--budget-s is {options.budget_s:g}, it must be seconds, 0 or more")
    if unknown := {name for name in options.ops.split(",") if name} - set(stages.OPS):
        parser.error(f"no operation is called {min(unknown)!r}; there are {', '.join(stages.OPS)}")
    try:
        stages.choose(options.stages)
        options.output.parent.mkdir(parents=True, exist_ok=True)
        # Now, not behind minutes of a GPU's time.
        if options.output.is_dir():
            raise IsADirectoryError(errno.EISDIR, "it is a directory")
        with tempfile.TemporaryFile(dir=options.output.parent):
            pass
    except KeyError as error:
        parser.error(str(error.args[0]))
    except OSError as error:
        parser.error(f"{options.output} cannot be written ({error.strerror}); give another --output")
    if lack := lacking(options.dry_run):
        fix = "set PYTHON to one that has torch and triton 3.6 or later, which make kernels puts into .venv"
        if not options.dry_run:
            fix = "set PYTHON to one whose torch has CUDA, on a machine with a GPU, or give --dry-run"
        parser.error(f"{lack} ({sys.executable}); {fix}")
    return options


def lacking(dry_run: bool) -> str | None:
    """Return what this Python lacks for the check; asked in a process of its own, which lets go of the GPU."""
    command = [sys.executable, str(HERE / "torch_here.py"), *(["--dry-run"] if dry_run else [])]
    asked = subprocess.run(command, capture_output=True, text=True)
    if asked.returncode == 0:
        return None
    said = (asked.stdout.strip() or asked.stderr.strip() or f"exit status {asked.returncode}").splitlines()
    return said[-1]


if __name__ == "__main__":
    # An exception instead of an end at once, so that the stage and temporary files go with it.
    signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))
    sys.exit(main())
