"""Who counts requests, and what of a request's end is told."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from ...runtime.completion import Completion
from ...runtime.stats import RequestStats

__all__ = ["Nobody", "Observer", "observe_end"]


class Observer(Protocol):
    """What counts requests; TritonMetrics is one. Called from any thread, and must not wait."""

    def observe(self, stats: RequestStats, reason: str = "stop", *, num_sequences: int = 1) -> None:
        """Count a request that ended with an answer."""

    def observe_cancelled(self) -> None:
        """Count a request that was cancelled before the engine had it."""

    def observe_error(self, error: BaseException) -> None:
        """Count a request that was refused or ended with an error."""


class Nobody:
    """An observer that counts nothing."""

    def observe(self, stats: RequestStats, reason: str = "stop", *, num_sequences: int = 1) -> None:
        """Count nothing."""

    def observe_cancelled(self) -> None:
        """Count nothing."""

    def observe_error(self, error: BaseException) -> None:
        """Count nothing."""


def observe_end(observer: Observer, completions: Sequence[Completion], error: BaseException | None) -> None:
    """Tell of a request that has ended.

    completions : of its rows, those that ended with an answer
    error : what the request ended with; None = nothing went wrong
    """
    if error is not None:
        observer.observe_error(error)
    elif not completions:
        observer.observe_cancelled()
    for one in completions:
        observer.observe(one.stats, one.finish_reason, num_sequences=len(one.outputs))
