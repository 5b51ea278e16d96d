"""What an engine says now, and what its finished requests have said: the one source of all metrics."""

from __future__ import annotations

import contextlib
import dataclasses
import threading
from collections.abc import Mapping
from typing import NamedTuple

from ...runtime import errors
from ...runtime.engine_base import EngineBase
from ...runtime.stats import EngineStats, IterationStats, RequestStats
from .families import BY_NAME, FAMILIES, HISTOGRAM, Family
from .histogram import Histogram, HistogramState
from .readings import Readings, read_state, read_totals

# The most specific first: a ShapeError is an Error too.
_FAILURES: tuple[tuple[str, tuple[type[errors.Error], ...]], ...] = (
    ("queue_full", (errors.QueueFullError,)),
    ("out_of_memory", (errors.OutOfMemoryError,)),
    ("shutdown", (errors.ShutdownError,)),
    (
        "invalid",
        (
            errors.InvalidArgumentError,
            errors.ShapeError,
            errors.NotFoundError,
            errors.UnsupportedError,
            errors.CheckpointError,
        ),
    ),
)
_LIVE = ("num_active_requests", "num_queued_requests", "num_paused_requests", "used_num_blocks")


class Sample(NamedTuple):
    """One number of a gauge or a counter; `key` is its label's value, None where the family has no label."""

    family: Family
    key: str | None
    value: float


class Observation(NamedTuple):
    """One number that went into a histogram."""

    family: Family
    value: float


class EngineMetrics:
    """The metrics of one engine. Any thread may call any method.

    Step records are given once, so an engine has one EngineMetrics; whatever shows them shares it. Counters begin at 0
    here, whatever the engine has done before to warm up.
    """

    def __init__(self, engine: EngineBase) -> None:
        self._engine = engine
        self._lock = threading.Lock()
        self._start = self._stats = engine.stats()
        self._last: IterationStats | None = None
        self._histograms = {family.name: Histogram(family) for family in FAMILIES if family.kind == HISTOGRAM}
        # What no engine counts: family name -> value of its label -> number.
        self._counts: dict[str, dict[str | None, float]] = {
            name: dict.fromkeys(BY_NAME[name].keys, 0.0)
            for name in (
                "plansmith_requests_finished_total",
                "plansmith_requests_failed_total",
                "plansmith_http_requests_in_flight",
                "plansmith_http_responses_total",
            )
        }

    def samples(self) -> list[Sample]:
        """Return every gauge and counter, in the order of FAMILIES. In a closed engine nothing runs; totals stay."""
        with self._lock:
            readings: Readings = {**self._read_engine(), **{k: dict(v) for k, v in self._counts.items()}}
        nothing: Mapping[str | None, float] = {}
        return [
            Sample(family, key, float(readings.get(family.name, nothing).get(key, 0.0)))
            for family in FAMILIES
            if family.kind != HISTOGRAM
            for key in family.keys
        ]

    def histograms(self) -> list[HistogramState]:
        """Return every histogram, in the order of FAMILIES."""
        return [histogram.state() for histogram in self._histograms.values()]

    def observe(
        self, stats: RequestStats, reason: str = "stop", *, num_sequences: int = 1
    ) -> list[Observation]:
        """Count a request that ended with an answer, and return what went into histograms.

        stats : of the whole request
        reason : its first output's finish_reason: "stop", "length", "timeout" or "cancelled"
        num_sequences : outputs that it computed
        raises InvalidArgumentError for another reason
        """
        self._add("plansmith_requests_finished_total", reason)
        with self._lock, contextlib.suppress(errors.ShutdownError):
            self._stats = self._engine.stats()  # the engine may be closed before they are read again
        seen = [
            Observation(BY_NAME[name], value)
            for name, value in observations(stats, num_sequences).items()
            if value is not None
        ]
        for one in seen:
            self._histograms[one.family.name].observe(one.value)
        return seen

    def observe_cancelled(self) -> None:
        """Count a request whose client has left before there were statistics, or whose end nobody waits for."""
        self._add("plansmith_requests_finished_total", "cancelled")

    def observe_error(self, error: BaseException) -> None:
        """Count a request that was refused or ended with an error."""
        self._add("plansmith_requests_failed_total", failure_kind(error))

    def http_started(self) -> None:
        """Note that an HTTP request has come."""
        with self._lock:
            self._counts["plansmith_http_requests_in_flight"][None] += 1

    def http_ended(self, status: int) -> None:
        """Note that an HTTP request has been answered to its end, or that its client has left.

        status : of the answer, 200 to 599
        """
        with self._lock:
            self._counts["plansmith_http_requests_in_flight"][None] -= 1
        self._add("plansmith_http_responses_total", f"{status // 100}xx")

    def _add(self, name: str, key: str) -> None:
        with self._lock:
            counts = self._counts[name]
            if key not in counts:
                raise errors.InvalidArgumentError(
                    f"{name} counts by {BY_NAME[name].label}, which is {key!r}; it must be one of "
                    f"{', '.join(BY_NAME[name].values)}"
                )
            counts[key] += 1

    def _read_engine(self) -> Readings:
        try:
            stats, records = self._engine.stats(), self._engine.iteration_stats()
            device = self._engine.device_use()
        except errors.ShutdownError:
            stats, records, device = _ended(self._stats), [], None
        self._stats = stats
        if records:
            self._last = records[-1]
        return {**read_state(stats, self._last, device), **read_totals(stats.since(self._start))}


def observations(stats: RequestStats, num_sequences: int = 1) -> dict[str, float | None]:
    """Return what a finished request says to each histogram; None where what is timed did not happen."""
    arrival, first = stats.arrival_time_ns, stats.first_token_time_ns
    gaps = stats.num_generated_tokens / max(1, num_sequences) - 1
    is_spread = first > 0 and gaps > 0
    return {
        "nv_llm_input_token_len": stats.num_prompt_tokens,
        "nv_llm_output_token_len": stats.num_generated_tokens,
        "plansmith_time_to_first_token_seconds": _seconds(arrival, first),
        "plansmith_inter_token_latency_seconds": (
            (stats.last_token_time_ns - first) / gaps / 1e9 if is_spread else None
        ),
        "plansmith_request_latency_seconds": _seconds(arrival, stats.last_token_time_ns),
        "plansmith_queue_time_seconds": _seconds(arrival, stats.first_scheduled_time_ns),
    }


def failure_kind(error: BaseException) -> str:
    """Return which of FAILURES an error is; what is none of ours is internal."""
    return next((kind for kind, classes in _FAILURES if isinstance(error, classes)), "internal")


def _seconds(start_ns: int, end_ns: int) -> float | None:
    return (end_ns - start_ns) / 1e9 if end_ns else None


def _ended(stats: EngineStats) -> EngineStats:
    """Return the last totals of a closed engine, in which nothing runs."""
    return dataclasses.replace(
        stats,
        num_completed_requests=stats.num_submitted_requests,
        free_num_blocks=stats.max_num_blocks,
        **dict.fromkeys(_LIVE, 0),
    )
