"""Jobs side by side: each starts when its memory fits beside those that work."""

from __future__ import annotations

import dataclasses
import functools
import queue
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor

from ..runtime.errors import Error, OutOfMemoryError
from .budget import Budget

# Between two questions whether another builder is done with a job.
BUSY_PAUSE_S = 1.0

LetGo = Callable[[], None]
"""Called by a job whose work is done: what is left of it, such as storing what it made, counts no more."""


@dataclasses.dataclass(frozen=True)
class Job:
    """A piece of work.

    memory_bytes : that it is expected to take at its peak
    run : does it, in a thread of its own; False = another process is doing it now, ask again later
    lane : jobs of one lane work one after another; "" = in none
    """

    name: str
    memory_bytes: int
    run: Callable[[LetGo], bool]
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
        self._working: set[str] = set()  # of those that run
        self._news: queue.SimpleQueue[str | Future[bool]] = queue.SimpleQueue()
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
        with ThreadPoolExecutor(self._most_at_once, thread_name_prefix="fleet") as pool:
            try:
                while self._running or (waiting and not self._stop.is_set()):
                    for job in self._startable(waiting):
                        waiting.remove(job)
                        self._start(job, pool)
                    waiting += self._finished(errors)
            except BaseException:
                self._stop.set()
                raise
        return errors

    @property
    def _most_at_once(self) -> int:
        """The most jobs that run: as many as may work, and as many again that were let go."""
        return 2 * self._budget.workers

    def _start(self, job: Job, pool: ThreadPoolExecutor) -> None:
        self._working.add(job.name)
        future = pool.submit(job.run, functools.partial(self._news.put, job.name))
        self._running[future] = job
        future.add_done_callback(self._news.put)

    def _could_fit(self, job: Job) -> bool:
        return self._base_bytes + job.memory_bytes <= self._budget.memory_bytes

    def _startable(self, waiting: Sequence[Job]) -> list[Job]:
        """Return the jobs that begin now: the first ones that fit beside those that work."""
        if self._stop.is_set():
            return []
        now, chosen = time.monotonic(), list[Job]()
        for job in waiting:
            beside = [*(one for one in self._running.values() if one.name in self._working), *chosen]
            held = self._base_bytes + sum(one.memory_bytes for one in beside)
            fits = held + job.memory_bytes <= self._budget.memory_bytes and len(beside) < self._budget.workers
            is_free = not job.lane or all(one.lane != job.lane for one in beside)
            has_thread = len(self._running) + len(chosen) < self._most_at_once
            if fits and is_free and has_thread and self._busy_until.get(job.name, 0.0) <= now:
                chosen.append(job)
        return chosen

    def _finished(self, errors: dict[str, Error]) -> list[Job]:
        """Wait a moment for a job to end or to let go; note errors, and return those that are to be asked again."""
        if not self._running:
            time.sleep(BUSY_PAUSE_S / 4)  # all that wait are with another builder
            return []
        try:
            news = self._news.get(timeout=BUSY_PAUSE_S)
        except queue.Empty:
            return []
        if isinstance(news, str):
            self._working.discard(news)
            return []
        job = self._running.pop(news)
        self._working.discard(job.name)
        error = news.exception()
        if isinstance(error, Error):
            errors[job.name] = error
        elif error is not None:
            raise error
        elif not news.result():
            self._busy_until[job.name] = time.monotonic() + BUSY_PAUSE_S
            return [job]
        return []

    def _too_large(self, job: Job) -> OutOfMemoryError:
        base, budget = _mb(self._base_bytes), _mb(self._budget.memory_bytes)
        wanted = _mb(self._base_bytes + job.memory_bytes).replace(" ", "")
        return OutOfMemoryError(
            f"{job.name} needs about {_mb(job.memory_bytes)} beside the {base} that this process holds, the budget is "
            f"{budget}; give --memory {wanted} if this machine has it, or build it on a larger one"
        )


def _mb(num_bytes: int) -> str:
    """Return megabytes, rounded up; bytes where there is less than one."""
    return f"{num_bytes} bytes" if num_bytes < 10**6 else f"{-(-num_bytes // 10**6)} MB"
