"""Several compiles side by side, as many as the cores and the memory allow."""

from __future__ import annotations

import dataclasses
import os
import tempfile
import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import onnx_ir as ir

from ...limits import Limits
from ...machine import available_memory_bytes
from ...spec import DecoderSpec
from .. import support
from ..compiler_process import CompileResult, Progress, Stopped
from . import fixed_layout, lowering, targets
from .compile import compile_plan, save_lowered
from .peak_memory import predicted_peak_bytes


@dataclasses.dataclass(frozen=True)
class CompileJob:
    """The arguments of one compile_plan.

    lowered : the model's file as save_lowered wrote it, where the caller has it already
    """

    model: ir.Model
    limits: Limits
    spec: DecoderSpec
    sm: str
    out_path: Path
    log_path: Path
    progress: Progress | None = None
    weight_streaming: bool = False
    lowered: Path | None = None


def workers_for(jobs: Sequence[CompileJob], max_workers: int | None = None) -> int:
    """Return how many jobs to run side by side: the cores, the memory over the largest peak, and max_workers."""
    if not jobs:
        return 1
    cores = len(os.sched_getaffinity(0))
    peak = max(predicted_peak_bytes(job.model) for job in jobs)
    fitting = available_memory_bytes() // peak
    return max(1, min(cores, fitting, len(jobs), max_workers or len(jobs)))


def compile_many(
    jobs: Sequence[CompileJob], max_workers: int | None = None, stop: threading.Event | None = None
) -> list[CompileResult]:
    """Compile all jobs and return their results in order; jobs that share a model share its lowered file.

    Each compile keeps one core busy. A job's progress is called in a thread of its own.
    stop : once set, by any thread, all are stopped, and Stopped is raised
    raises : what compile_plan raises, from the first job that fails; the others are stopped, plans that were done
        stay. Refusals that need no compiling are raised before any starts.
    """
    for job in jobs:
        support.check_types(targets.find_target(job.sm), lowering.types_of(job.model), "the graph")
    targets.check_installed()
    fixed_layout.check_reproducible()
    if not jobs:
        return []
    with tempfile.TemporaryDirectory(prefix=".rtx-", dir=Path(jobs[0].out_path).absolute().parent) as scratch:
        files: dict[int, Path] = {}
        for job in jobs:
            if job.lowered is not None:
                files[id(job.model)] = job.lowered
            elif id(job.model) not in files:
                # The file's own name reaches the compiler, see fixed_layout.py: it is the same wherever it lies.
                files[id(job.model)] = Path(scratch) / str(len(files)) / "graph.onnx"
                files[id(job.model)].parent.mkdir()
                save_lowered(job.model, files[id(job.model)])
        return _run_all(jobs, files, workers_for(jobs, max_workers), StopSignal(stop))


class StopSignal(threading.Event):
    """An event that is also set once another one is."""

    def __init__(self, other: threading.Event | None) -> None:
        super().__init__()
        self._other = other

    def is_set(self) -> bool:
        """Return whether either is."""
        return super().is_set() or (self._other is not None and self._other.is_set())


def _run_all(
    jobs: Sequence[CompileJob], files: dict[int, Path], workers: int, stop: threading.Event
) -> list[CompileResult]:

    def one(job: CompileJob) -> CompileResult:
        if stop.is_set():
            raise Stopped
        path = files[id(job.model)]
        try:
            return compile_plan(
                path,
                job.limits,
                job.spec,
                job.sm,
                job.out_path,
                job.log_path,
                job.progress,
                weight_streaming=job.weight_streaming,
                stop=stop,
            )
        except BaseException:
            stop.set()
            raise

    with ThreadPoolExecutor(workers, thread_name_prefix="rtx-compile") as pool:
        futures = [pool.submit(one, job) for job in jobs]
        try:
            errors = [error for f in futures if (error := f.exception()) is not None]
        except BaseException:
            stop.set()
            raise
    for error in sorted(
        errors, key=lambda one: isinstance(one, Stopped)
    ):  # the reason before what it stopped
        raise error
    return [f.result() for f in futures]
