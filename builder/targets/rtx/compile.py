"""Compiling a graph into a TensorRT-RTX plan, in a process of its own."""

from __future__ import annotations

import dataclasses
import errno
import json
import os
import select
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, Any

import onnx_ir as ir

from ....runtime.errors import BuildError, OutOfMemoryError
from ...graph.save import save
from ...limits import Limits
from ...spec import DecoderSpec
from .. import support
from . import contract, lowering, profiles, targets

CHILD_MODULE = f"{__package__}.child"
COMPILER = "tensorrt_rtx"
LOG_TAIL_LINES = 30
_STOP_POLL_S = 0.2

Progress = Callable[[str, int, int], None]
"""Called with (phase, steps done, steps in all) in the thread that called compile_plan."""


class Stopped(Exception):
    """The compile was stopped by the caller's event."""


@dataclasses.dataclass(frozen=True)
class RtxResult:
    """What a compile gave.

    flags : what the compiler was told, for the manifest
    seconds : the whole child process, from its start to its end
    peak_rss_bytes : the most memory the child held
    warnings : the compiler's warnings, none of which changes what is computed
    """

    version: str
    flags: tuple[str, ...]
    seconds: float
    peak_rss_bytes: int
    warnings: tuple[str, ...]


def compile_plan(
    model: ir.Model | str | Path,
    limits: Limits,
    spec: DecoderSpec,
    sm: str,
    out_path: str | Path,
    log_path: str | Path,
    progress: Progress | None = None,
    *,
    causal: lowering.Causal = "mask",
    mixed: bool = False,
    stop: threading.Event | None = None,
    python: str = sys.executable,
) -> RtxResult:
    """Compile one plan into `out_path` and return how it went; blocks until the child process has ended.

    model : the graph of build_graph with float16 or bfloat16 activations, or an ONNX file that save_lowered wrote
    sm : a target of targets.py, e.g. "sm89" or "rtx"
    log_path : every line of the compiler, kept whether it succeeds or not
    causal, mixed : see lowering.lower and profiles.make_profiles
    stop : once set, by any thread, the child is killed and Stopped raised
    raises : UnsupportedError before any work if the target cannot hold the graph's types or the compiler is not
        installed; BuildError with the log's last lines if the compiler refuses, crashes or drops an input;
        OutOfMemoryError if it was killed. No plan and no temporary file is left then, nor on KeyboardInterrupt.
    """
    target = targets.find_target(sm)
    if isinstance(model, ir.Model):
        support.check_types(target, lowering.types_of(model), "the graph")
    targets.check_installed()
    out_path, log_path = Path(out_path).absolute(), Path(log_path).absolute()
    with tempfile.TemporaryDirectory(prefix=".rtx-", dir=out_path.parent) as scratch:
        if isinstance(model, ir.Model):
            onnx_path = Path(scratch) / "graph.onnx"
            save_lowered(model, onnx_path, causal=causal)
        else:
            onnx_path = Path(model).absolute()
        plan = Path(scratch) / "model.plan"
        made = profiles.make_profiles(spec, limits, mixed=mixed)
        job, compute = _job(onnx_path, plan, limits, spec, target, made)
        done = _run_child(job, Path(scratch), log_path, target, progress, stop, python)
        plan.replace(out_path)
    done = dataclasses.replace(done, flags=flags_of(target, causal, [p.name for p in made]))
    if compute == "float16" and targets.residual_may_overflow(spec):
        warning = (
            f"the activations of {spec.family} pass float16's 65504 with some prompts; build precision bf16, or "
            "int8 or int4, whose plans for it compute in bfloat16"
        )
        return dataclasses.replace(done, warnings=(*done.warnings, warning))
    return done


def save_lowered(model: ir.Model, path: str | Path, *, causal: lowering.Causal = "mask") -> None:
    """Lower a graph and write it with its weights beside it, one weight in memory at a time."""
    lowered = lowering.lower(model, causal=causal)
    try:
        save(lowered, path)
    except OSError as error:
        if error.errno != errno.ENOSPC:
            raise
        raise OutOfMemoryError(
            f"no disk space for the graph's weights in {Path(path).parent}, where they lie during a compile; "
            "free as much as the checkpoint's size"
        ) from error


def flags_of(
    target: targets.RtxTarget, causal: lowering.Causal, profile_names: Sequence[str]
) -> tuple[str, ...]:
    """Return what the compiler is told, as the manifest lists it; the profiles are in the order of their index."""
    capabilities = (f"compute_capability={c.lower()}" for c in target.capabilities)
    return (*capabilities, "strongly_typed", f"causal={causal}", f"profiles={'+'.join(profile_names)}")


def _job(
    onnx_path: Path,
    plan: Path,
    limits: Limits,
    spec: DecoderSpec,
    target: targets.RtxTarget,
    made: Sequence[profiles.Profile],
) -> tuple[dict[str, Any], str]:
    compute = _pool_type(onnx_path)
    inputs = contract.plan_inputs(spec, limits, compute)
    outputs = contract.plan_outputs(spec, limits, compute)

    def listed(tensors: Sequence[contract.TensorSpec]) -> list[dict[str, Any]]:
        return [{"name": t.name, "dtype": t.dtype, "shape": list(t.shape)} for t in tensors]

    job = {
        "onnx": str(onnx_path),
        "plan": str(plan),
        "capabilities": list(target.capabilities),
        "inputs": listed(inputs),
        "outputs": listed(outputs),
        "profiles": profiles.as_json(made, inputs),
        "kv_updates": 2 * spec.num_layers,
        "parent_pid": os.getpid(),
    }
    return job, compute


def _pool_type(onnx_path: Path) -> str:
    """Return the pools' type of a lowered file; the weights are not read."""
    try:
        model = ir.load(onnx_path)
    except Exception as error:
        raise BuildError(
            f"{onnx_path} is no ONNX file that can be read ({error}); give a graph that save_lowered wrote"
        ) from error
    return lowering.compute_type_of(model)


def _run_child(
    job: dict[str, Any],
    scratch: Path,
    log_path: Path,
    target: targets.RtxTarget,
    progress: Progress | None,
    stop: threading.Event | None,
    python: str,
) -> RtxResult:
    job_path = scratch / "job.json"
    job_path.write_text(json.dumps(job), encoding="utf-8")
    start = time.monotonic()
    last: dict[str, Any] = {}
    peak = 0
    with log_path.open("wb") as log, _child(python, job_path, scratch, log) as (process, events_fd):
        for line in _lines(events_fd, stop):
            event = json.loads(line)
            peak = max(peak, event.get("peak_rss_bytes", 0))
            if event["event"] == "step":
                if progress is not None:
                    progress(event["phase"], event["step"], event["steps"])
            else:
                last = event
        code = process.wait()
    if code != 0 or last.get("event") != "done":
        raise _failure(code, last, log_path, peak, target)
    return RtxResult(
        version=last["version"],
        flags=(),
        seconds=time.monotonic() - start,
        peak_rss_bytes=peak,
        warnings=tuple(last["warnings"]),
    )


@contextmanager
def _child(
    python: str, job_path: Path, scratch: Path, log: IO[bytes]
) -> Iterator[tuple[subprocess.Popen[bytes], int]]:
    """Start the child and yield it with the descriptor of its events; it is dead when the block is left."""
    read_fd, write_fd = os.pipe()
    try:
        # `-m` puts the working directory first on sys.path: the scratch directory, which holds no Python.
        process = subprocess.Popen(
            [python, "-m", CHILD_MODULE, str(job_path), str(write_fd)],
            cwd=scratch,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(str(Path(p).absolute()) for p in sys.path)},
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            pass_fds=(write_fd,),
        )
    except OSError:
        os.close(read_fd)
        raise
    finally:
        os.close(write_fd)
    try:
        yield process, read_fd
    finally:
        os.close(read_fd)
        with suppress(ProcessLookupError):
            process.kill()
        process.wait()


def _lines(fd: int, stop: threading.Event | None) -> Iterator[bytes]:
    """Yield lines until the other end is closed; Stopped soon after `stop` is set."""
    rest = b""
    while True:
        if stop is not None and stop.is_set():
            raise Stopped
        if not select.select([fd], [], [], _STOP_POLL_S)[0]:
            continue
        data = os.read(fd, 1 << 16)
        if not data:
            return
        *lines, rest = (rest + data).split(b"\n")
        yield from lines


def _failure(
    code: int, last: dict[str, Any], log_path: Path, peak: int, target: targets.RtxTarget
) -> BuildError | OutOfMemoryError:
    lines = tail(log_path)
    where = f"the whole log is {log_path}"
    if last.get("event") == "error":
        return BuildError(f"TensorRT-RTX built no plan for {target.name}: {last['message']}; {where}", lines)
    if code == -signal.SIGKILL:
        return OutOfMemoryError(
            f"the compiler for {target.name} was killed after it held {peak / 1e9:.1f} GB, most likely because "
            f"memory ran out; build fewer targets at a time or on a larger machine; {where}"
        )
    how = f"was ended by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"
    return BuildError(
        f"the compiler for {target.name} {how}: {lines[-1] if lines else 'no output'}; {where}", lines
    )


def tail(log_path: Path, count: int = LOG_TAIL_LINES) -> list[str]:
    """Return the last lines of a log."""
    with log_path.open(encoding="utf-8", errors="replace") as log:
        return [line.rstrip("\n") for line in deque(log, maxlen=count)]
