"""Where a quantization is, with the time that is left of the stage it is in."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable

from ..builder.progress import Progress as Report


class Progress:
    """Reports the stages of a quantization to a callback.

    report : None = nobody listens
    """

    def __init__(self, report: Report | None = None, who: str = "quantize") -> None:
        self._report = report
        self._who = who
        self._phase = ""
        self._began = 0.0

    def stage(self, phase: str) -> None:
        """Begin a stage whose length is not known."""
        self._phase, self._began = phase, time.monotonic()
        self._tell(phase, 0, 0)

    def step(self, done: int, total: int) -> None:
        """Say how many of the stage's steps are done; from the second on with the time left."""
        if done <= 0:
            self._began = time.monotonic()
        left = (time.monotonic() - self._began) / done * (total - done) if done > 0 else 0.0
        text = f"{self._phase}, about {duration_text(left)} left" if left >= 1 else self._phase
        self._tell(text, done, total)

    def counter(self, total: int) -> Callable[[], None]:
        """Begin the stage's steps anew, and return what is called before each of them."""
        done = itertools.count()
        return lambda: self.step(next(done), total)

    def _tell(self, phase: str, done: int, total: int) -> None:
        if self._report is not None:
            self._report(self._who, phase, done, total)


def duration_text(seconds: float) -> str:
    """Return seconds for people: 42 s, 3 min 20 s, 1 h 5 min."""
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60} s"
    return f"{whole // 3600} h {whole % 3600 // 60} min"
