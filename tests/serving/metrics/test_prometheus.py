"""The text that our own server gives: readable by Prometheus' parser, with no name changed."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest
from expositions import read_headers, read_series, value
from fake_executor import fake_executor
from plansmith.runtime.engine import Engine, SamplingParams
from plansmith.serving.metrics.collector import EngineMetrics
from plansmith.serving.metrics.families import FAMILIES, HISTOGRAM
from plansmith.serving.metrics.prometheus import CONTENT_TYPE, exposition, registry_of
from prometheus_client import Counter, Info
from prometheus_client.parser import text_string_to_metric_families

GREEDY = SamplingParams(max_tokens=8, temperature=0.0, ignore_eos=True)


@pytest.fixture
def metrics() -> Iterator[EngineMetrics]:
    with Engine.from_executor(fake_executor()) as engine:
        yield EngineMetrics(engine)


def test_names_kinds_and_helps_are_those_of_the_families(metrics: EngineMetrics) -> None:
    text = exposition(registry_of(metrics, "tensorrt_llm", "1")).decode()
    assert read_headers(text) == {family.name: (family.kind, family.help) for family in FAMILIES}
    names = {name for name, _ in read_series(text)}
    plain = {family.name for family in FAMILIES if family.kind != HISTOGRAM}
    parts = {f.name + part for f in FAMILIES if f.kind == HISTOGRAM for part in ("_bucket", "_sum", "_count")}
    assert names == plain | parts


def test_prometheus_own_parser_reads_it(metrics: EngineMetrics) -> None:
    text = exposition(registry_of(metrics, 'a "quoted" \\ name', "3")).decode()
    families = list(text_string_to_metric_families(text))
    assert len(families) == len(FAMILIES)
    for family in families:
        assert family.samples
        for sample in family.samples:
            assert sample.labels["model"] == 'a "quoted" \\ name'
            assert sample.labels["version"] == "3"


def test_a_requests_numbers_are_in_the_text(metrics: EngineMetrics) -> None:
    registry = registry_of(metrics, "m")
    done = metrics._engine.generate([list(range(1, 13))], GREEDY)[0]  # type: ignore[attr-defined]
    metrics.observe(done.stats, done.finish_reason)
    text = exposition(registry).decode()
    assert value(text, "nv_llm_input_token_len_sum") == 12
    assert value(text, "nv_llm_input_token_len_bucket", le="10") == 0
    assert value(text, "nv_llm_input_token_len_bucket", le="50") == 1
    assert value(text, "nv_llm_input_token_len_bucket", le="+Inf") == 1
    assert value(text, "nv_llm_output_token_len_sum", response_metric_type="total_output_tokens") == 8
    assert value(text, "plansmith_requests_finished_total", reason="length") == 1
    assert value(text, "plansmith_time_to_first_token_seconds_count", model="m", version="1") == 1
    # A time in microseconds has 16 digits, none of which may go.
    shown = value(text, "nv_trt_llm_general_metrics", general_type="timestamp")
    assert shown == int(shown) > 1.6e15


def test_other_metrics_of_the_registry_keep_their_names(metrics: EngineMetrics) -> None:
    registry = registry_of(metrics, "m")
    Counter("logins", "Logins.", ["kind"], registry=registry).labels(kind="a\nb").inc(2)
    Info("build", "A build.", registry=registry).info({"commit": "abc"})
    text = exposition(registry).decode()
    assert '# TYPE logins_total counter\nlogins_total{kind="a\\nb"} 2.0' in text
    assert '# TYPE build_info gauge\nbuild_info{commit="abc"} 1.0' in text
    assert "_created" not in text
    assert len(list(text_string_to_metric_families(text))) == len(FAMILIES) + 2


def test_scrapes_may_overlap(metrics: EngineMetrics) -> None:
    registry = registry_of(metrics, "m")
    counts: list[int] = []
    threads = [
        threading.Thread(target=lambda: counts.append(len(read_series(exposition(registry).decode()))))
        for _ in range(8)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(set(counts)) == 1 and len(counts) == 8
    assert CONTENT_TYPE.startswith("text/plain; version=0.0.4")
