"""Running a workload against an engine, and what is computed from the times.

Times are those a client of the engine sees: a token counts when it reaches Python, and with --rate a request's clock
starts when it was to arrive, whether or not the load generator was on time.
"""

from __future__ import annotations

import dataclasses
import resource
import sys
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from ..runtime.engine import Delta, Engine, RequestHandle, SamplingParams
from ..runtime.errors import Error
from ..runtime.stats import EngineStats
from ._workload import Work

PERCENTILES = (50, 90, 95, 99)


@dataclasses.dataclass
class RequestTimes:
    """One request, in seconds of time.perf_counter."""

    arrival_s: float
    token_times_s: list[float] = dataclasses.field(default_factory=list)
    token_ids: list[int] = dataclasses.field(default_factory=list)
    error: str | None = None


@dataclasses.dataclass(frozen=True)
class Load:
    """How requests come.

    concurrency : most in flight; 0 = no limit
    rate : mean arrivals a second of a Poisson process; 0 = all at once
    """

    concurrency: int = 0
    rate: float = 0.0
    seed: int = 0

    def arrivals_s(self, count: int) -> list[float]:
        """Return when each request arrives, from 0."""
        if self.rate == 0:
            return [0.0] * count
        gaps = np.random.default_rng(self.seed).exponential(1 / self.rate, size=count)
        return [float(t) for t in np.cumsum(gaps) - gaps[0]]


def run_workload(
    engine: Engine,
    works: Sequence[Work],
    load: Load,
    progress: Callable[[], None] = lambda: None,
    cache_salt: int = 0,
) -> dict[str, Any]:
    """Run all requests and return the result of one run, as --json gives it.

    progress : called as each request ends, on the engine's thread
    cache_salt : requests share prefixes with those of the same one
    """
    before = engine.stats()
    engine.iteration_stats()
    cpu_before, begin = time.process_time(), time.perf_counter()
    times = _run(engine, works, load, begin, progress, cache_salt)
    wall_s, cpu_s = time.perf_counter() - begin, time.process_time() - cpu_before
    result = summarize(works, times, wall_s)
    result["cpu_s"] = cpu_s
    result["peak_rss_bytes"] = _peak_rss_bytes()
    return result | _engine_numbers(engine, before)


def _run(
    engine: Engine,
    works: Sequence[Work],
    load: Load,
    begin: float,
    progress: Callable[[], None],
    cache_salt: int,
) -> list[RequestTimes]:
    slots = threading.Semaphore(load.concurrency or len(works))
    times: list[RequestTimes] = []
    handles: list[RequestHandle] = []
    for work, arrival in zip(works, load.arrivals_s(len(works)), strict=True):
        slots.acquire()
        wait = begin + arrival - time.perf_counter()
        if wait > 0:
            time.sleep(wait)
        entry = RequestTimes(begin + arrival if load.rate else time.perf_counter())
        times.append(entry)
        params = SamplingParams(
            max_tokens=work.output_len,
            min_tokens=work.output_len,
            temperature=0.0,
            ignore_eos=True,
            detokenize=False,
            cache_salt=cache_salt,
        )
        sink = _sink(entry, slots, progress)
        try:
            handles.append(engine.submit_when_room(work.prompt_ids, params, on_delta=sink))
        except Error as error:
            sink(error)
    for handle in handles:
        _wait(handle)
    return times


def _sink(
    entry: RequestTimes, slots: threading.Semaphore, progress: Callable[[], None]
) -> Callable[[Delta | Error], None]:
    def take(item: Delta | Error) -> None:
        if isinstance(item, Error):
            entry.error = str(item)
        elif item.token_ids:
            entry.token_times_s.append(time.perf_counter())
            entry.token_ids.extend(item.token_ids)
        if isinstance(item, Error) or item.is_final:
            slots.release()
            progress()

    return take


def _wait(handle: RequestHandle) -> None:
    try:
        handle.result()
    except Error:
        return  # its text is in the request's entry


def summarize(works: Sequence[Work], times: Sequence[RequestTimes], wall_s: float) -> dict[str, Any]:
    """Return throughput, latencies and failures of one run."""
    failures = [
        f"request {i}: {entry.error or f'{len(entry.token_ids)} tokens instead of {work.output_len}'}"
        for i, (work, entry) in enumerate(zip(works, times, strict=True))
        if entry.error or len(entry.token_ids) != work.output_len
    ]
    answered = [entry for entry in times if entry.token_times_s]
    prompt_tokens = sum(len(work.prompt_ids) for work in works)
    generated_tokens = sum(len(entry.token_ids) for entry in times)
    ttft_s = [entry.token_times_s[0] - entry.arrival_s for entry in answered]
    e2e_s = [entry.token_times_s[-1] - entry.arrival_s for entry in answered]
    gaps_s = [gap for entry in answered for gap in np.diff(entry.token_times_s).tolist()]
    return {
        "num_requests": len(works),
        "prompt_tokens": prompt_tokens,
        "generated_tokens": generated_tokens,
        "wall_s": wall_s,
        "generated_tokens_per_s": generated_tokens / wall_s,
        "total_tokens_per_s": (prompt_tokens + generated_tokens) / wall_s,
        "requests_per_s": len(answered) / wall_s,
        "ttft": _distribution(ttft_s),
        "inter_token": _distribution(gaps_s),
        "e2e": _distribution(e2e_s),
        "ttft_s": ttft_s,
        "token_ids": [entry.token_ids for entry in times],
        "failures": failures,
    }


def _distribution(seconds: Sequence[float]) -> dict[str, float] | None:
    """Return mean and percentiles in milliseconds; None of nothing."""
    if not seconds:
        return None
    values = np.asarray(seconds) * 1e3
    points = np.percentile(values, PERCENTILES)
    return {"mean_ms": float(values.mean())} | {
        f"p{p}_ms": float(value) for p, value in zip(PERCENTILES, points, strict=True)
    }


def _engine_numbers(engine: Engine, before: EngineStats) -> dict[str, Any]:
    """Return what the engine itself counted during the run."""
    after, iterations = engine.stats(), engine.iteration_stats()
    run = after.since(before)
    return {
        "steps": run.iter,
        "mean_requests_a_step": _mean([i.num_scheduled_requests for i in iterations]),
        "mean_tokens_a_step": _mean([i.num_ctx_tokens + i.num_gen_tokens for i in iterations]),
        "executor_s": run.step_time_ns / 1e9,
        "scheduler_s": run.schedule_time_ns / 1e9,
        "num_pauses": run.num_pauses,
        "kv": {
            "cache_bytes": after.kv_cache_bytes,
            "max_num_blocks": after.max_num_blocks,
            "tokens_per_block": after.tokens_per_block,
            "peak_used_blocks": max((i.used_num_blocks for i in iterations), default=0),
            "allocated_blocks": run.alloc_total_blocks,
            "reused_blocks": run.reused_blocks,
            "reused_tokens": run.reused_tokens,
            "hit_rate": run.kv_cache_hit_rate,
            "waste": run.kv_waste,
        },
        "speculation": {
            "draft_tokens": run.num_draft_tokens,
            "accepted_tokens": run.num_accepted_draft_tokens,
            "acceptance_rate": run.acceptance_rate,
            "acceptance_length": run.acceptance_length,
            "overhead": run.draft_overhead,
        },
    }


def _mean(values: Sequence[int]) -> float:
    return sum(values) / len(values) if values else 0.0


def _peak_rss_bytes() -> int:
    """Return the process's peak resident memory: ru_maxrss is in KiB on Linux, in bytes on macOS."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024
