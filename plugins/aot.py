"""Compiles kernels ahead of time, for GPUs that need not be there, in processes of their own.

    python -m plansmith.plugins.aot [--output DIR] [--sm 80,90] [--op sampling] [--jobs 2] [--json]

compiles all of the catalog and reports registers, shared memory and spills; what was compiled is kept in DIR.
"""

from __future__ import annotations

import base64
import collections
import contextlib
import dataclasses
import importlib.metadata
import json
import os
import pathlib
import re
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import IO, Any

from ..runtime.errors import BuildError, Error, OutOfMemoryError, UnsupportedError
from . import compile_cache
from .kernel import Kernel
from .resources import Resources

ALL_SMS = (75, 80, 86, 89, 90, 100, 103, 120, 121)
"""The compute capabilities that kernels can be compiled for."""

WORKER_MODULE = f"{__package__}.compile_worker"
_MIN_VERSION = (3, 6)
_END_S = 10.0  # what a worker without input may take to end
_EXTRA = "pip install 'plansmith[kernels]' (triton: 286 MB to fetch, 1 GB installed, no GPU needed)"

Progress = Callable[[str, int, int, int], None]
"""Called as (kernel's name, SM, done, in all) after each; from other threads, one at a time."""


@dataclasses.dataclass(frozen=True)
class CompiledKernel:
    """A kernel for one compute capability.

    symbol : its function in the cubin
    cubin : runs where runtime/executors/kernel_bundle.py says; the same bytes for the same sources, on any machine
    ptx : where its target has an "a" (from sm90 on), it is for that capability alone as well
    shared_bytes : shared memory that a launch asks for, per program
    seconds : CPU time of the compilation, assembler included
    """

    kernel: Kernel
    sm: int
    symbol: str
    cubin: bytes
    ptx: str
    shared_bytes: int
    num_warps: int
    resources: Resources
    seconds: float


def triton_version() -> str:
    """Return the version of the Triton language, without importing it.

    raises : UnsupportedError where there is none, or too old a one, naming what to install
    """
    try:
        text = importlib.metadata.version("triton")
    except importlib.metadata.PackageNotFoundError:
        raise UnsupportedError(
            f"the compiler of the Triton language is not installed; run: {_EXTRA}"
        ) from None
    if tuple(int(part) for part in re.findall(r"\d+", text)[:2]) < _MIN_VERSION:
        raise UnsupportedError(f"triton is {text}, at least 3.6 is needed; run: {_EXTRA} with -U")
    return text


def compile_kernels(
    kernels: Sequence[Kernel],
    sms: Sequence[int],
    jobs: int | None = None,
    cache_dir: str | os.PathLike[str] | None = None,
    progress: Progress | None = None,
    *,
    python: str = sys.executable,
) -> list[CompiledKernel]:
    """Return each kernel compiled for each SM from its min_sm on; blocks until all are done.

    jobs : processes side by side, each with a core and about 400 MB; None = one a core
    cache_dir : kept results are taken from here, and new ones left; None = all are compiled
    python : the interpreter of those processes
    raises : UnsupportedError without triton; BuildError (log_lines: the compiler's words) for the first kernel that
        does not compile; OutOfMemoryError where a compiler was killed. No process and no temporary file is left.
    """
    tasks = [(kernel, sm) for kernel in kernels for sm in sms if sm >= kernel.min_sm]
    return compile_tasks(tasks, jobs, cache_dir, progress, python=python)


def compile_tasks(
    tasks: Sequence[tuple[Kernel, int]],
    jobs: int | None = None,
    cache_dir: str | os.PathLike[str] | None = None,
    progress: Progress | None = None,
    *,
    python: str = sys.executable,
) -> list[CompiledKernel]:
    """Return each kernel compiled for its own SM, in order; everything else is as in compile_kernels."""
    version = triton_version()
    results: list[CompiledKernel | None] = [None] * len(tasks)
    cache = None if cache_dir is None else compile_cache.Cache(pathlib.Path(cache_dir), version)
    if cache is not None:
        results = [_result(*task, cache.find(*task)) for task in tasks]
    pending = collections.deque(n for n, result in enumerate(results) if result is None)
    count = len(tasks) - len(pending)
    lock = threading.Lock()

    def one_worker(worker: _Worker) -> None:
        nonlocal count
        while True:
            with lock:
                if not pending:
                    return
                n = pending.popleft()
            answer = worker.compile(*tasks[n])
            results[n] = _result(*tasks[n], answer)
            if cache is not None:
                cache.keep(*tasks[n], answer)
            with lock:
                count += 1
                if progress is not None:
                    progress(tasks[n][0].name, tasks[n][1], count, len(tasks))

    num_workers = min(jobs or len(os.sched_getaffinity(0)), len(pending))
    if num_workers > 0:
        _run_workers(num_workers, one_worker, pending, python)
    done = [result for result in results if result is not None]
    assert len(done) == len(tasks)
    return done


def _run_workers(
    num_workers: int, body: Callable[[_Worker], None], pending: collections.deque[int], python: str
) -> None:
    """Run body over as many workers; an error or an interrupt in one ends them all."""
    with contextlib.ExitStack() as stack:
        scratch = pathlib.Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="plansmith-kernels-")))
        pool = stack.enter_context(ThreadPoolExecutor(num_workers, thread_name_prefix="kernel-compile"))
        # Leaving the stack ends the workers first, so that the threads that wait for them end too.
        workers = [stack.enter_context(_worker(scratch / str(n), python)) for n in range(num_workers)]
        futures = [pool.submit(body, worker) for worker in workers]
        for future in futures:
            try:
                future.result()
            except BaseException:
                pending.clear()
                raise


class _Worker:
    """A process that compiles one kernel at a time."""

    def __init__(self, process: subprocess.Popen[str], log: pathlib.Path) -> None:
        self._process, self._log = process, log

    def compile(self, kernel: Kernel, sm: int) -> dict[str, Any]:
        """Return compile_worker's answer. Raises as compile_kernels does."""
        requests, answers = self._process.stdin, self._process.stdout
        assert requests is not None and answers is not None
        job = {"kernel": dataclasses.asdict(kernel), "sm": sm}
        line = ""
        with contextlib.suppress(BrokenPipeError):
            requests.write(json.dumps(job) + "\n")
            requests.flush()
            line = answers.readline()
        if not line.endswith("\n"):
            raise self._death(kernel, sm)
        answer: dict[str, Any] = json.loads(line)
        if "error" in answer:
            raise BuildError(
                f"the kernel {kernel.name} does not compile for sm{sm}: {answer['error']}", answer["log"]
            )
        return answer

    def _death(self, kernel: Kernel, sm: int) -> Error:
        assert self._process.stdin is not None
        with contextlib.suppress(OSError):
            self._process.stdin.close()  # one that gave no answer and lives would wait for more
        try:
            code = self._process.wait(_END_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            code = self._process.wait()
        lines: list[str] = []
        with contextlib.suppress(OSError):  # one that ended as it does with its input has removed it
            lines = self._log.read_text(encoding="utf-8", errors="replace").splitlines()[-30:]
        what = f"the compiler of kernel {kernel.name} for sm{sm}"
        if code == -signal.SIGKILL:
            return OutOfMemoryError(
                f"{what} was killed, most likely because memory ran out; compile fewer at a time (jobs) or on a "
                "larger machine"
            )
        how = f"was ended by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"
        return BuildError(f"{what} {how}: {lines[-1] if lines else 'no output'}", lines)


@contextlib.contextmanager
def _worker(folder: pathlib.Path, python: str) -> Iterator[_Worker]:
    """Start a worker with a folder of its own; it is dead when the block is left."""
    folder.mkdir()
    log = folder / "log"
    with log.open("wb") as file, _started(folder, python, file) as process:
        yield _Worker(process, log)


@contextlib.contextmanager
def _started(folder: pathlib.Path, python: str, log: IO[bytes]) -> Iterator[subprocess.Popen[str]]:
    process = subprocess.Popen(
        [python, "-m", WORKER_MODULE, str(folder)],
        cwd=folder,  # `-m` puts it first on sys.path: it holds no Python
        env=_environment(folder),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=log,
        text=True,
        encoding="utf-8",
    )
    try:
        yield process
    finally:
        process.kill()
        process.wait()
        for pipe in (process.stdin, process.stdout):
            with contextlib.suppress(OSError):
                pipe.close()  # type: ignore[union-attr]


def _environment(folder: pathlib.Path) -> dict[str, str]:
    """Return a worker's environment, without the settings that change what triton makes."""
    dropped = (
        "TRITON_",
        "PTXAS_OPTIONS",
        "DISABLE_PTXAS_OPT",
        "DISABLE_LLVM_OPT",
        "LLVM_",
        "MLIR_",
        "USE_IR_LOC",
    )
    kept = {name: value for name, value in os.environ.items() if not name.startswith(dropped)}
    return {
        **kept,
        "PYTHONPATH": os.pathsep.join(str(pathlib.Path(p).absolute()) for p in sys.path),
        "TMPDIR": str(folder),
        "TRITON_CACHE_DIR": str(folder / "cache"),
        "TRITON_DISABLE_LINE_INFO": "1",  # lines and paths of our sources
        "TRITON_DUMP_PTXAS_LOG": "1",  # what is spilled
    }


def _result(kernel: Kernel, sm: int, answer: dict[str, Any] | None) -> CompiledKernel | None:
    if answer is None:
        return None
    return CompiledKernel(
        kernel=kernel,
        sm=sm,
        symbol=answer["symbol"],
        cubin=base64.b64decode(answer["cubin"]),
        ptx=answer["ptx"],
        shared_bytes=answer["shared_bytes"],
        num_warps=answer["num_warps"],
        resources=Resources(**answer["resources"]),
        seconds=answer["seconds"],
    )


if __name__ == "__main__":
    from .compile_catalog import main

    # An exception instead of an end at once, so that compilers and temporary files go with it.
    signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))
    sys.exit(main())
