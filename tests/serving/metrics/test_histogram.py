"""Histograms count as Prometheus does, from any thread; the requests' gauges agree with each other."""

from __future__ import annotations

import dataclasses
import math
import threading

import pytest
from hypothesis import given
from hypothesis import strategies as st
from plansmith.runtime.stats import EngineStats, IterationStats
from plansmith.serving.metrics.families import BY_NAME, FAMILIES, HISTOGRAM
from plansmith.serving.metrics.histogram import Histogram
from plansmith.serving.metrics.readings import read_state

TIMES = BY_NAME["plansmith_queue_time_seconds"]


@given(st.lists(st.one_of(st.sampled_from(TIMES.bounds), st.floats(-1e6, 1e6))))
def test_a_bucket_has_all_up_to_its_bound(observed: list[float]) -> None:
    histogram = Histogram(TIMES)
    for one in observed:
        histogram.observe(one)
    state = histogram.state()
    for (text, count), bound in zip(state.buckets, [*TIMES.bounds, math.inf], strict=True):
        assert count == sum(one <= bound for one in observed)
        assert float(text) == bound
    assert state.total == pytest.approx(sum(observed), abs=1e-6)


def test_what_is_no_number_is_left_out() -> None:
    histogram = Histogram(TIMES)
    for one in (math.nan, math.inf, -math.inf, 1.0):
        histogram.observe(one)
    assert histogram.state().counts[-1] == histogram.state().total == 1


def test_threads_lose_nothing() -> None:
    histogram = Histogram(TIMES)

    def observe() -> None:
        for _ in range(5000):
            histogram.observe(0.5)

    threads = [threading.Thread(target=observe) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert histogram.state().counts[-1] == 20_000
    assert histogram.state().total == 10_000


def test_every_histogram_has_room_on_both_sides() -> None:
    for family in FAMILIES:
        if family.kind == HISTOGRAM:
            assert family.bounds[0] > 0 and len(family.bounds) >= 5


NO_STATS = EngineStats(**{field.name: 0 for field in dataclasses.fields(EngineStats)})
NO_STEP = IterationStats(**{field.name: 0 for field in dataclasses.fields(IterationStats)})
COUNT = st.integers(0, 100)


@given(COUNT, COUNT, COUNT, st.integers(1, 64), st.one_of(st.none(), st.tuples(COUNT, COUNT)))
def test_the_requests_agree_whatever_the_last_record_says(
    running: int, paused: int, queued: int, most: int, last: tuple[int, int] | None
) -> None:
    stats = dataclasses.replace(
        NO_STATS,
        num_active_requests=min(running + paused, most),
        num_paused_requests=min(paused, most),
        num_queued_requests=queued,
        max_num_active_requests=most,
    )
    record = last and dataclasses.replace(
        NO_STEP, num_scheduled_requests=max(last), num_context_requests=min(last), timestamp_ns=1
    )
    found = read_state(stats, record)["nv_trt_llm_request_metrics"]
    assert found["waiting"] == found["active"] - found["scheduled"] >= 0
    assert 0 <= found["context"] <= found["scheduled"] <= found["active"] <= found["max"]
    assert found["active"] == min(most, stats.num_active_requests + queued)
