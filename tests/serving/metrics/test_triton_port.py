"""The metrics on a real tritonserver's port: the same as in our own text, through reloads, and never in the way."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tritonclient.http
from expositions import read_headers, read_series, value
from fake_executor import fake_executor
from metrics_model import make_repository
from plansmith.runtime.engine import Engine
from plansmith.serving.metrics.collector import EngineMetrics
from plansmith.serving.metrics.families import FAMILIES
from plansmith.serving.metrics.prometheus import exposition, registry_of
from triton_servers import RunningTriton, TritonServers
from tritonclient.utils import InferenceServerException


def infer(server: RunningTriton, model: str, ids: list[int], max_tokens: int, hold_ms: int = 0) -> list[int]:
    """Run one request and return its tokens."""
    inputs: list[Any] = []
    for name, numbers in (("IDS", ids), ("MAX_TOKENS", [max_tokens]), ("HOLD_MS", [hold_ms])):
        one = tritonclient.http.InferInput(name, [len(numbers)], "INT32")
        one.set_data_from_numpy(np.array(numbers, np.int32))
        inputs.append(one)
    with tritonclient.http.InferenceServerClient(server.http, network_timeout=60) as client:
        found: list[int] = client.infer(model, inputs).as_numpy("OUT").tolist()
        return found


def text_when(server: RunningTriton, name: str, wanted: float, timeout_s: float = 10.0, **labels: str) -> str:
    """Return the metrics once a series has the wanted number."""
    deadline = time.monotonic() + timeout_s
    while True:
        text = server.api.metrics(5)
        if value(text, name, **labels) == wanted:
            return text
        assert time.monotonic() < deadline, (name, wanted, value(text, name, **labels), server.log())
        time.sleep(0.02)


def idle_text(server: RunningTriton) -> str:
    """Return the metrics when all that has happened is in them."""
    time.sleep(0.2)  # updates are 50 ms apart
    return server.api.metrics(5)


def test_the_port_shows_what_our_own_text_shows(triton: RunningTriton) -> None:
    text = idle_text(triton)
    with Engine.from_executor(fake_executor()) as engine:
        own = exposition(registry_of(EngineMetrics(engine), "engine", "1")).decode()
    assert set(read_series(text)) == set(read_series(own))
    assert read_headers(text) == read_headers(own)


def test_the_port_adds_up(triton: RunningTriton) -> None:
    before = read_series(idle_text(triton))
    for length in (5, 20, 40):
        assert len(infer(triton, "engine", list(range(3, 3 + length)), 8)) == 8
    with pytest.raises(InferenceServerException, match="max_input_len"):
        infer(triton, "engine", [5] * 500, 8)
    after = read_series(idle_text(triton))

    def grown(name: str, **labels: str) -> float:
        wanted = set(labels.items())
        found = [series for series in after if series[0] == name and wanted <= series[1]]
        assert len(found) == 1, (name, labels, found)
        return after[found[0]] - before[found[0]]

    assert grown("nv_llm_input_token_len_count") == 3
    assert grown("nv_llm_input_token_len_sum") == 65
    assert grown("nv_llm_input_token_len_bucket", le="10") == 1
    assert grown("nv_llm_input_token_len_bucket", le="+Inf") == 3
    assert grown("nv_llm_output_token_len_sum", response_metric_type="total_output_tokens") == 24
    assert grown("plansmith_generation_tokens_total") == 24
    assert grown("plansmith_prompt_tokens_total") + grown("plansmith_prefix_cache_tokens_total") == 65
    assert grown("plansmith_requests_finished_total", reason="length") == 3
    assert grown("plansmith_requests_failed_total", kind="invalid") == 1
    assert grown("plansmith_time_to_first_token_seconds_count") == 3
    text = idle_text(triton)
    assert value(text, "nv_trt_llm_kv_cache_block_metrics", kv_cache_block_type="used") == 0
    assert value(text, "nv_trt_llm_kv_cache_block_metrics", kv_cache_block_type="max") > 0
    assert value(text, "nv_trt_llm_runtime_memory_metrics", memory_type="cpu") > 10_000_000
    assert abs(value(text, "plansmith_last_update_timestamp_seconds") - time.time()) < 10


def test_totals_live_on_when_the_model_is_loaded_anew(triton: RunningTriton, repository: Path) -> None:
    tokens = "plansmith_generation_tokens_total"
    before = value(idle_text(triton), tokens)
    # The old instance is still answering when the new one starts, so both hold the same series for a while.
    slow = threading.Thread(target=infer, args=(triton, "engine", [3, 4, 5], 4, 1500))
    slow.start()
    text_when(triton, tokens, before + 4)
    os.utime(repository / "engine" / "1" / "model.py")
    triton.api.load("engine", 60)
    infer(triton, "engine", [3, 4, 5, 6], 4)
    slow.join()
    text_when(triton, tokens, before + 8)
    # The old one's last word, when it ends, does not stay.
    text_when(triton, "nv_trt_llm_request_metrics", 8, request_type="max")

    triton.api.unload("engine", 60)
    text_when(triton, "nv_trt_llm_request_metrics", 0, request_type="max")
    text = text_when(triton, "plansmith_last_update_timestamp_seconds", 0)
    assert value(text, tokens) == before + 8
    triton.api.load("engine", 60)
    infer(triton, "engine", [3, 4, 5], 4)
    text = text_when(triton, tokens, before + 12)
    assert value(text, "nv_trt_llm_request_metrics", request_type="max") == 8
    assert triton.process.poll() is None


def stub_of(server: RunningTriton, model: str) -> int:
    """Return the id of the process that runs a model."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            words = (folder / "cmdline").read_bytes().split(b"\0")
            parent = int((folder / "stat").read_text().rsplit(")", 1)[1].split()[1])
            if parent == server.process.pid and any(f"/{model}/1/model.py".encode() in one for one in words):
                found.append(int(folder.name))
    assert len(found) == 1, found
    return found[0]


def test_an_engine_whose_process_died_is_seen_and_replaced(triton: RunningTriton, repository: Path) -> None:
    tokens = "plansmith_generation_tokens_total"
    infer(triton, "engine", [3, 4, 5], 4)
    before = value(idle_text(triton), tokens)
    os.kill(stub_of(triton, "engine"), signal.SIGKILL)
    time.sleep(0.5)
    stale = value(triton.api.metrics(5), "plansmith_last_update_timestamp_seconds")
    time.sleep(0.5)  # many updates of a living one
    assert value(triton.api.metrics(5), "plansmith_last_update_timestamp_seconds") == stale
    os.utime(repository / "engine" / "1" / "model.py")
    triton.api.load("engine", 60)
    infer(triton, "engine", [3, 4, 5], 4)
    text = text_when(triton, tokens, before + 4)
    assert value(text, "plansmith_last_update_timestamp_seconds") > stale + 0.5
    assert triton.process.poll() is None


def test_a_metric_that_fails_is_logged_once_and_hurts_nothing(
    servers: TritonServers, engine_dir: Path, tmp_path: Path
) -> None:
    # The model `other` takes plansmith_pauses_total for a gauge first, which the metrics have as a counter.
    server = servers(make_repository(tmp_path / "models", engine_dir), ["other"])
    assert len(infer(server, "other", [3, 4, 5], 4)) == 4
    text = text_when(server, "plansmith_generation_tokens_total", 4)
    names = {name for name, _ in read_series(text)}
    missing = {family.name for family in FAMILIES if not any(name.startswith(family.name) for name in names)}
    assert missing == {"plansmith_pauses_total"}
    assert server.log_path.read_text().count("the metric plansmith_pauses_total failed") == 1
