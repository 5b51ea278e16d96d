"""`/metrics` of our own server over HTTP: the series of Triton's port, and what its clients did."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from expositions import read_headers, read_series, value
from fake_executor import INFO, FakeModel
from openai_servers import Served, start
from plansmith.runtime.async_engine import AsyncEngine
from plansmith.runtime.executor import PythonExecutor
from plansmith.runtime.tokenizer import Tokenizer
from plansmith.serving.metrics.prometheus import CONTENT_TYPE
from triton_servers import RunningTriton

# What a Prometheus asks for; OpenMetrics would change the old counter's name.
ACCEPT = "application/openmetrics-text;version=1.0.0;q=0.8,text/plain;version=0.0.4;q=0.5,*/*;q=0.1"


@pytest.fixture(scope="module")
def served(engine_dir: Path) -> Iterator[Served]:
    """Return a server of the tiny engine."""
    one = start(lambda: AsyncEngine.open(engine_dir, num_threads=1, max_num_tokens=32))
    yield one
    one.stop()


def text_of(served: Served) -> str:
    with served.http() as http:
        answer = http.get("/metrics", headers={"Accept": ACCEPT})
    assert answer.status_code == 200 and answer.headers["content-type"] == CONTENT_TYPE
    return answer.text


def test_the_series_are_those_of_tritons_port(served: Served, triton: RunningTriton) -> None:
    def without_model(text: str) -> set[object]:
        return {
            (name, frozenset(one for one in labels if one[0] != "model"))
            for name, labels in read_series(text)
        }

    own, port = text_of(served), triton.api.metrics(5)
    assert without_model(own) == without_model(port)
    assert read_headers(own) == read_headers(port)


@pytest.fixture
def slow(engine_dir: Path) -> Iterator[Served]:
    """Return a server whose steps take 20 ms, so that a client surely leaves in the middle."""
    tokenizer = Tokenizer.from_directory(engine_dir / "tokenizer")
    info = dataclasses.replace(INFO, vocab_size=320)  # the tokenizer's
    one = start(
        lambda: AsyncEngine.from_executor(PythonExecutor(FakeModel(info, step_s=0.02)), tokenizer=tokenizer)
    )
    yield one
    one.stop()


def test_requests_and_clients_that_leave_are_counted(slow: Served) -> None:
    body = {"prompt": [5, 6, 7], "max_tokens": 4, "ignore_eos": True}
    with slow.http() as http:
        assert http.post("/v1/completions", json=body).status_code == 200
        assert http.post("/v1/completions", json={**body, "max_tokens": -1}).status_code == 400
        assert http.get("/health").status_code == 200
        with http.stream(
            "POST", "/v1/completions", json={**body, "max_tokens": 60, "stream": True}
        ) as leaving:
            assert leaving.status_code == 200
            text = text_of(slow)
            assert value(text, "plansmith_http_requests_in_flight") == 1
            assert value(text, "plansmith_requests_unfinished") == 1
    deadline = time.monotonic() + 20
    for name in ("plansmith_http_requests_in_flight", "plansmith_requests_unfinished"):
        while value(text := text_of(slow), name) > 0:
            assert time.monotonic() < deadline, name
            time.sleep(0.01)
    assert value(text, "plansmith_http_responses_total", status="2xx") == 2
    assert value(text, "plansmith_http_responses_total", status="4xx") == 1
    assert value(text, "plansmith_requests_finished_total", reason="length") == 1
    assert value(text, "plansmith_requests_finished_total", reason="cancelled") == 1
    assert value(text, "plansmith_requests_submitted_total") == 2
    assert value(text, "nv_llm_input_token_len_sum") == 3
    assert value(text, "nv_llm_output_token_len_sum") == 4
    assert value(text, "nv_trt_llm_kv_cache_block_metrics", kv_cache_block_type="used") == 0
