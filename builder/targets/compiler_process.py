"""The parent's side of a compile in a process of its own: starts it, passes its progress on, says why it failed."""

from __future__ import annotations

import dataclasses
import errno
import json
import os
import select
import signal
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, Any

import onnx_ir as ir

from ...runtime.errors import BuildError, OutOfMemoryError
from ..graph.save import save

LOG_TAIL_LINES = 30
_STOP_POLL_S = 0.2

Progress = Callable[[str, int, int], None]
"""Called with (phase, steps done, steps in all) in the thread that called compile_plan."""


class Stopped(Exception):
    """The compile was stopped by the caller's event."""


@dataclasses.dataclass(frozen=True)
class CompileResult:
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


@dataclasses.dataclass(frozen=True)
class Compiler:
    """Who compiles what, in words, and the module that does it.

    module : run as `python -m MODULE JOB.json FD`, see compiler_child.py
    name, target : for messages, e.g. "TensorRT-RTX" and "sm89"
    python : the interpreter
    """

    module: str
    name: str
    target: str
    python: str = sys.executable


def save_for_compiler(lowered: ir.Model, path: str | Path) -> None:
    """Write a lowered graph with its weights beside it, one weight in memory at a time.

    raises : OutOfMemoryError where the disk is full; OSError
    """
    try:
        save(lowered, path)
    except OSError as error:
        if error.errno != errno.ENOSPC:
            raise
        raise OutOfMemoryError(
            f"no disk space for the graph's weights in {Path(path).parent}, where they lie during a compile; "
            "free as much as the checkpoint's size"
        ) from error


def run_child(
    compiler: Compiler,
    job: dict[str, Any],
    scratch: Path,
    log_path: Path,
    progress: Progress | None,
    stop: threading.Event | None,
) -> CompileResult:
    """Run one job and return how it went, without flags; blocks until the process has ended.

    scratch : an existing directory for the job's files, the process' working directory
    log_path : gets all that the process prints
    raises : BuildError, OutOfMemoryError or Stopped; the process is dead then
    """
    job_path = scratch / "job.json"
    job_path.write_text(json.dumps(job), encoding="utf-8")
    start = time.monotonic()
    last: dict[str, Any] = {}
    peak = 0
    with log_path.open("wb") as log, _child(compiler, job_path, scratch, log) as (process, events_fd):
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
        raise _failure(compiler, code, last, log_path, peak)
    return CompileResult(
        version=last["version"],
        flags=(),
        seconds=time.monotonic() - start,
        peak_rss_bytes=peak,
        warnings=tuple(last["warnings"]),
    )


@contextmanager
def _child(
    compiler: Compiler, job_path: Path, scratch: Path, log: IO[bytes]
) -> Iterator[tuple[subprocess.Popen[bytes], int]]:
    """Start the child and yield it with the descriptor of its events; it is dead when the block is left."""
    read_fd, write_fd = os.pipe()
    try:
        # `-m` puts the working directory first on sys.path: the scratch directory, which holds no Python.
        process = subprocess.Popen(
            [compiler.python, "-m", compiler.module, job_path.name, f"{write_fd:06}"],
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
    compiler: Compiler, code: int, last: dict[str, Any], log_path: Path, peak: int
) -> BuildError | OutOfMemoryError:
    lines = tail(log_path)
    where = f"the whole log is {log_path}"
    if last.get("event") == "error":
        return BuildError(
            f"{compiler.name} built no plan for {compiler.target}: {last['message']}; {where}", lines
        )
    if code == -signal.SIGKILL:
        return OutOfMemoryError(
            f"the compiler for {compiler.target} was killed after it held {peak / 1e9:.1f} GB, most likely because "
            f"memory ran out; build fewer targets at a time or on a larger machine; {where}"
        )
    how = f"was ended by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"
    return BuildError(
        f"the compiler for {compiler.target} {how}: {lines[-1] if lines else 'no output'}; {where}", lines
    )


def tail(log_path: Path, count: int = LOG_TAIL_LINES) -> list[str]:
    """Return the last lines of a log."""
    with log_path.open(encoding="utf-8", errors="replace") as log:
        return [line.rstrip("\n") for line in deque(log, maxlen=count)]
