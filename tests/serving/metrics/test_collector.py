"""EngineMetrics over real engines: what it counts adds up."""

from __future__ import annotations

import dataclasses
import math
import threading
import time
from pathlib import Path

import pytest
from fake_executor import INFO, FakeModel, fake_executor
from plansmith.runtime import errors
from plansmith.runtime.engine import Engine, SamplingParams
from plansmith.runtime.executor import PythonExecutor
from plansmith.runtime.native_engine import EngineOptions
from plansmith.runtime.stats import RequestStats
from plansmith.serving.metrics.collector import EngineMetrics, failure_kind, observations
from plansmith.serving.metrics.families import BY_NAME, COUNTER, FAMILIES, HISTOGRAM

GREEDY = SamplingParams(max_tokens=8, temperature=0.0, ignore_eos=True, detokenize=False)
Values = dict[tuple[str, str | None], float]


def values(metrics: EngineMetrics) -> Values:
    return {(one.family.name, one.key): one.value for one in metrics.samples()}


def test_every_series_is_there_before_the_first_request() -> None:
    with Engine.from_executor(fake_executor()) as engine:
        metrics = EngineMetrics(engine)
        found = values(metrics)
        assert set(found) == {(f.name, key) for f in FAMILIES if f.kind != HISTOGRAM for key in f.keys}
        assert found["nv_trt_llm_request_metrics", "max"] == INFO.max_batch_size
        assert (
            found["nv_trt_llm_kv_cache_block_metrics", "free"]
            == found["nv_trt_llm_kv_cache_block_metrics", "max"]
        )
        assert found["nv_trt_llm_kv_cache_block_metrics", "tokens_per"] == INFO.tokens_per_block
        assert found["nv_trt_llm_general_metrics", "timestamp"] == 0
        assert found["nv_trt_llm_runtime_memory_metrics", "cpu"] > 10_000_000  # a Python process
        assert all(state.counts[-1] == 0 and state.total == 0 for state in metrics.histograms())


def test_the_totals_are_those_of_the_requests(engine_dir: Path) -> None:
    prompts = [list(range(3, 3 + length)) for length in (5, 20, 40, 20)]
    with Engine.open(engine_dir, num_threads=1) as engine:
        metrics = EngineMetrics(engine)
        before = time.time()
        done = [engine.generate(prompt, GREEDY)[0] for prompt in prompts]
        for one in done:
            metrics.observe(one.stats, one.finish_reason)
        found = values(metrics)
        states = {state.family.name: state for state in metrics.histograms()}
        engine_stats = engine.stats()
    reused = sum(one.stats.reused_tokens for one in done)
    assert reused > 0  # the prompts begin the same
    assert found["plansmith_prefix_cache_tokens_total", None] == reused
    assert found["plansmith_prompt_tokens_total", None] == sum(map(len, prompts)) - reused
    assert found["plansmith_generation_tokens_total", None] == 4 * 8
    assert found["plansmith_requests_submitted_total", None] == 4
    assert found["plansmith_requests_finished_total", "length"] == 4
    assert found["nv_trt_llm_kv_cache_block_metrics", "used"] == 0
    assert found["nv_trt_llm_kv_cache_block_metrics", "fraction"] == 0
    assert found["nv_trt_llm_kv_cache_block_metrics", "reused"] == sum(o.stats.reused_blocks for o in done)
    assert found["nv_trt_llm_general_metrics", "iteration_counter"] == engine_stats.iter > 0
    assert before * 1e6 <= found["nv_trt_llm_general_metrics", "timestamp"] <= time.time() * 1e6
    for kind in ("active", "scheduled", "context", "waiting"):
        assert found["nv_trt_llm_request_metrics", kind] == 0, "nothing runs any more"
    assert states["nv_llm_input_token_len"].total == sum(map(len, prompts))
    assert states["nv_llm_input_token_len"].buckets == [
        ("10", 1), ("50", 4), ("100", 4), ("500", 4), ("1000", 4), ("+Inf", 4),
    ]  # fmt: skip
    assert states["nv_llm_output_token_len"].total == 4 * 8
    first, last = states["plansmith_time_to_first_token_seconds"], states["plansmith_request_latency_seconds"]
    between = states["plansmith_inter_token_latency_seconds"]
    assert 0 < first.total < last.total
    assert last.total == pytest.approx(first.total + 7 * between.total)


def test_waiting_is_active_without_the_scheduled_when_the_kv_cache_is_full() -> None:
    # 6 blocks of 4 tokens: two requests of 3 blocks run, the other six wait for blocks though slots are free.
    options = EngineOptions(manual_step=True, kv_cache_bytes=6 * INFO.kv_bytes_per_block)
    with Engine.from_executor(fake_executor(), options) as engine:
        metrics = EngineMetrics(engine)
        handles = [engine.submit([i, 2, 3, 4], GREEDY) for i in range(8)]
        assert values(metrics)["nv_trt_llm_request_metrics", "waiting"] == 8
        engine.step()
        found = values(metrics)
        assert found["nv_trt_llm_kv_cache_block_metrics", "max"] == 6
        shown = {
            kind: found["nv_trt_llm_request_metrics", kind]
            for kind in BY_NAME["nv_trt_llm_request_metrics"].keys
        }
        assert shown == {"active": 8, "max": 8, "scheduled": 2, "context": 2, "waiting": 6}
        assert found["nv_trt_llm_inflight_batcher_metrics", "total_context_tokens"] == 8
        assert found["plansmith_requests", "running"] == 2
        assert found["plansmith_requests", "queued"] == 6
        used = found["nv_trt_llm_kv_cache_block_metrics", "used"]
        assert 0 < used <= 6
        assert found["nv_trt_llm_kv_cache_block_metrics", "fraction"] == used / 6
        engine.step()
        found = values(metrics)
        assert found["nv_trt_llm_inflight_batcher_metrics", "generation_requests"] == 2
        assert found["nv_trt_llm_request_metrics", "context"] == 0
        assert all(len(handle.result().token_ids) == 8 for handle in handles)
        assert values(metrics)["nv_trt_llm_request_metrics", "active"] == 0


@pytest.mark.parametrize(
    "options",
    [
        EngineOptions(enable_block_reuse=False),
        EngineOptions(iter_stats_max_iterations=0),
        EngineOptions(max_queue_size=1, max_batch_size=1),
        EngineOptions(draft_mode="ngram", ngram_min=1, adaptive_draft_len=False),
    ],
    ids=["no reuse", "no records", "one at a time", "drafts"],
)
def test_every_kind_of_engine_has_metrics(options: EngineOptions) -> None:
    with Engine.from_executor(fake_executor(), options) as engine:
        metrics = EngineMetrics(engine)
        for _ in range(3):
            engine.generate([1, 2, 3, 1, 2, 3, 1, 2], GREEDY)
        found = values(metrics)
    assert found["plansmith_generation_tokens_total", None] == 24
    assert found["plansmith_steps_total", None] > 0
    assert all(math.isfinite(number) for number in found.values())
    if not options.enable_block_reuse:
        assert found["plansmith_prefix_cache_hit_ratio", None] == 0
    if options.draft_mode == "ngram":
        assert found["plansmith_draft_tokens_total", "proposed"] > 0


def test_pauses_are_counted() -> None:
    options = EngineOptions(
        scheduler_policy="max_utilization",
        kv_cache_bytes=6 * INFO.kv_bytes_per_block,
        enable_block_reuse=False,
    )
    with Engine.from_executor(fake_executor(), options) as engine:
        metrics = EngineMetrics(engine)
        engine.generate([[i, 2, 3, 4] for i in range(4)], dataclasses.replace(GREEDY, max_tokens=12))
        assert values(metrics)["plansmith_pauses_total", None] > 0


def test_counters_never_fall_while_threads_read_and_requests_run() -> None:
    with Engine.from_executor(fake_executor()) as engine:
        metrics = EngineMetrics(engine)
        counters = [(f.name, key) for f in FAMILIES if f.kind == COUNTER for key in f.keys]
        falls: list[object] = []
        stop = threading.Event()

        def read() -> None:
            before = values(metrics)
            while not stop.is_set():
                now = values(metrics)
                falls.extend((key, before[key], now[key]) for key in counters if now[key] < before[key])
                if now["nv_trt_llm_request_metrics", "waiting"] < 0:
                    falls.append("waiting below 0")
                before = now

        readers = [threading.Thread(target=read) for _ in range(3)]
        for reader in readers:
            reader.start()
        for i in range(10):
            for one in engine.generate([[i, j, 3] for j in range(8)], GREEDY):
                metrics.observe(one.stats, one.finish_reason)
        stop.set()
        for reader in readers:
            reader.join()
        assert not falls
        assert values(metrics)["plansmith_requests_finished_total", "length"] == 80


def test_a_closed_engine_keeps_its_totals_and_runs_nothing() -> None:
    gate = threading.Event()
    model = FakeModel(gate=gate)
    engine = Engine.from_executor(PythonExecutor(model))
    metrics = EngineMetrics(engine)
    gate.set()
    engine.generate([1, 2, 3], GREEDY)
    gate.clear()
    entered = model.num_entered
    handle = engine.submit([1, 2, 3, 4], GREEDY)
    while model.num_entered == entered:
        time.sleep(0.001)
    found = values(metrics)  # in the middle of its first step
    assert found["plansmith_requests_unfinished", None] == 1
    closing = threading.Thread(target=engine.close)
    closing.start()
    gate.set()
    closing.join()
    with pytest.raises(errors.ShutdownError):
        handle.result()
    found = values(metrics)
    assert found["plansmith_generation_tokens_total", None] >= 8
    assert found["plansmith_requests_unfinished", None] == 0
    assert found["plansmith_requests", "running"] == found["plansmith_requests", "queued"] == 0
    assert found["nv_trt_llm_kv_cache_block_metrics", "used"] == 0


def test_the_last_requests_count_though_the_engine_is_closed_before_they_are_read() -> None:
    with Engine.from_executor(fake_executor()) as engine:
        metrics = EngineMetrics(engine)
        done = engine.generate([1, 2, 3], GREEDY)[0]
        metrics.observe(done.stats, done.finish_reason)
    assert values(metrics)["plansmith_generation_tokens_total", None] == 8


def test_a_warm_up_before_does_not_count() -> None:
    with Engine.from_executor(fake_executor()) as engine:
        engine.generate([1, 2, 3], GREEDY)
        running = engine.submit([1, 2], GREEDY)
        metrics = EngineMetrics(engine)
        running.result()
        engine.generate([[1, 2, 3]], GREEDY)
        found = values(metrics)
    assert 8 <= found["plansmith_generation_tokens_total", None] <= 16
    assert found["plansmith_requests_submitted_total", None] == 1
    assert found["plansmith_requests_unfinished", None] == 0


def test_errors_are_counted_by_kind() -> None:
    with Engine.from_executor(fake_executor()) as engine:
        metrics = EngineMetrics(engine)
        for error, _ in KINDS:
            metrics.observe_error(error)
        found = values(metrics)
    for kind in BY_NAME["plansmith_requests_failed_total"].values:
        assert found["plansmith_requests_failed_total", kind] == [k for _, k in KINDS].count(kind) > 0


KINDS = [
    (errors.InvalidArgumentError("x"), "invalid"),
    (errors.ShapeError("x"), "invalid"),
    (errors.NotFoundError("x"), "invalid"),
    (errors.UnsupportedError("x"), "invalid"),
    (errors.CheckpointError("x"), "invalid"),
    (errors.QueueFullError("x"), "queue_full"),
    (errors.OutOfMemoryError("x"), "out_of_memory"),
    (errors.ShutdownError("x"), "shutdown"),
    (errors.ExecutorError("x"), "internal"),
    (errors.InternalError("x"), "internal"),
    (ValueError("x"), "internal"),
]


@pytest.mark.parametrize(("error", "kind"), KINDS, ids=lambda value: type(value).__name__)
def test_an_error_has_one_kind(error: Exception, kind: str) -> None:
    assert failure_kind(error) == kind


def test_http_requests_come_and_go() -> None:
    with Engine.from_executor(fake_executor()) as engine:
        metrics = EngineMetrics(engine)
        metrics.observe_cancelled()
        assert values(metrics)["plansmith_requests_finished_total", "cancelled"] == 1
        for _ in range(3):
            metrics.http_started()
        metrics.http_ended(200)
        metrics.http_ended(499)
        found = values(metrics)
        assert found["plansmith_http_requests_in_flight", None] == 1
        assert found["plansmith_http_responses_total", "2xx"] == 1
        assert found["plansmith_http_responses_total", "4xx"] == 1


def test_an_unknown_reason_is_refused_by_name() -> None:
    with Engine.from_executor(fake_executor()) as engine:
        stats = engine.generate([1, 2], GREEDY)[0].stats
        with pytest.raises(errors.InvalidArgumentError, match=r"reason.*'bored'.*stop, length"):
            EngineMetrics(engine).observe(stats, "bored")


def test_what_did_not_happen_is_not_timed() -> None:
    nothing = RequestStats(**{field.name: 0 for field in dataclasses.fields(RequestStats)})
    cancelled = dataclasses.replace(nothing, arrival_time_ns=10**9, num_prompt_tokens=7)
    assert {name for name, number in observations(cancelled).items() if number is not None} == {
        "nv_llm_input_token_len",
        "nv_llm_output_token_len",
    }
    one_token = dataclasses.replace(
        cancelled,
        first_scheduled_time_ns=2 * 10**9,
        first_token_time_ns=3 * 10**9,
        last_token_time_ns=3 * 10**9,
        num_generated_tokens=1,
    )
    found = observations(one_token)
    assert found["plansmith_queue_time_seconds"] == 1
    assert found["plansmith_time_to_first_token_seconds"] == found["plansmith_request_latency_seconds"] == 2
    assert found["plansmith_inter_token_latency_seconds"] is None  # one token has no next
    two_outputs = dataclasses.replace(one_token, last_token_time_ns=5 * 10**9, num_generated_tokens=10)
    assert observations(two_outputs, 2)["plansmith_inter_token_latency_seconds"] == 0.5  # 5 tokens each
