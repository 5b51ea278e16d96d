"""Jobs side by side: each starts when its memory fits beside those that run."""

from __future__ import annotations

import dataclasses
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait

from ..runtime.errors import Error, OutOfMemoryError
from .budget import Budget

# Between two questions whether another builder is done with a job.
BUSY_PAUSE_S = 1.0


@dataclasses.dataclass(frozen=True)
class Job:
    """A piece of work.

    memory_bytes : that it is expected to take at its peak
    run : does it, in a thread of its own; False = another process is doing it now, ask again later
    lane : jobs of one lane run one after another; "" = in none
    """

    name: str
    memory_bytes: int
    run: Callable[[], bool]
    lane: str = ""


class JobQueue:
    """Runs jobs within a budget.

    base_bytes : what this process holds anyway
    stop : set by whoever wants no further job to begin, and by run() on an interrupt; jobs that run look at it
        themselves
    """

    def __init__(self, budget: Budget, base_bytes: int, stop: threading.Event) -> None:
        self._budget = budget
        self._base_bytes = base_bytes
        self._stop = stop
        self._running: dict[Future[bool], Job] = {}
        self._busy_until: dict[str, float] = {}

    def run(self, jobs: Sequence[Job]) -> dict[str, Error]:
        """Run all jobs, in order where memory allows, and return the errors of those that failed by name.

        A job that fits no budget fails with OutOfMemoryError; the others run. An exception that is no Error is a bug or
        an interrupt: it stops the rest, and is raised once those that run have ended.
        """
        errors: dict[str, Error] = {
            job.name: self._too_large(job) for job in jobs if not self._could_fit(job)
        }
        waiting = [job for job in jobs if job.name not in errors]
        with ThreadPoolExecutor(self._budget.workers, thread_name_prefix="fleet") as pool:
            try:
                while self._running or (waiting and not self._stop.is_set()):
                    for job in self._startable(waiting):
                        waiting.remove(job)
                        self._running[pool.submit(job.run)] = job
                    waiting += self._finished(errors)
            except BaseException:
                self._stop.set()
                raise
        return errors

    def _could_fit(self, job: Job) -> bool:
        return self._base_bytes + job.memory_bytes <= self._budget.memory_bytes

    def _startable(self, waiting: Sequence[Job]) -> list[Job]:
        """Return the jobs that begin now: the first ones that fit beside those that run."""
        if self._stop.is_set():
            return []
        now, chosen = time.monotonic(), list[Job]()
        for job in waiting:
            beside = [*self._running.values(), *chosen]
            held = self._base_bytes + sum(one.memory_bytes for one in beside)
            fits = held + job.memory_bytes <= self._budget.memory_bytes and len(beside) < self._budget.workers
            is_free = not job.lane or all(one.lane != job.lane for one in beside)
            if fits and is_free and self._busy_until.get(job.name, 0.0) <= now:
                chosen.append(job)
        return chosen

    def _finished(self, errors: dict[str, Error]) -> list[Job]:
        """Wait a moment for jobs to end; note errors, and return those that are to be asked again."""
        if not self._running:
            time.sleep(BUSY_PAUSE_S / 4)  # all that wait are with another builder
            return []
        done, _ = wait(self._running, timeout=BUSY_PAUSE_S, return_when=FIRST_COMPLETED)
        again = []
        for future in done:
            job = self._running.pop(future)
            error = future.exception()
            if isinstance(error, Error):
                errors[job.name] = error
            elif error is not None:
                raise error
            elif not future.result():
                self._busy_until[job.name] = time.monotonic() + BUSY_PAUSE_S
                again.append(job)
        return again

    def _too_large(self, job: Job) -> OutOfMemoryError:
        needed = self._base_bytes + job.memory_bytes
        return OutOfMemoryError(
            f"{job.name} needs about {needed / 1e9:.1f} GB to compile, the budget is "
            f"{self._budget.memory_bytes / 1e9:.1f} GB; give --memory {-(-needed // 10**9)}GB if this machine has it, "
            "or build it on a larger one"
        )
