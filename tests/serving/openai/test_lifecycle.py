"""The server's health, its end, and an engine that fails."""

from __future__ import annotations

import contextlib
import json
import threading
import time
from typing import Any

import httpx
import openai
import pytest
from openai_servers import ScriptedModel, Served, scripted, start
from plansmith.runtime.tokenizer import Tokenizer

LONG = {"prompt": "a", "max_tokens": 300, "stream": True}


def test_a_draining_server_finishes_what_runs_and_takes_nothing_new(tokenizer: Tokenizer) -> None:
    model = ScriptedModel(tokenizer, step_s=0.005)
    server = start(scripted(model, tokenizer), drain_s=20.0)
    texts: list[str] = []
    begun = threading.Barrier(5, timeout=20)

    def stream() -> None:
        text = ""
        first = True
        for chunk in server.client().completions.create(
            model="tiny", prompt="a", max_tokens=300, stream=True
        ):
            text += chunk.choices[0].text
            if first:
                begun.wait()
                first = False
        texts.append(text)

    threads = [threading.Thread(target=stream) for _ in range(4)]
    for thread in threads:
        thread.start()
    with server.http() as http:
        assert http.get("/health/ready").status_code == 200
        begun.wait()
        server.start_stop()
        until(lambda: http.get("/health/ready").status_code == 503)
        assert http.get("/health/live").status_code == 200
        refused = http.post("/v1/completions", json={"prompt": "a"})
        assert refused.status_code == 503 and int(refused.headers["retry-after"]) >= 1
        assert refused.json()["error"]["code"] == "shutting_down"
        assert refused.headers["connection"] == "close"
    for thread in threads:
        thread.join(30)
    server.thread.join(10)
    assert not server.thread.is_alive()
    assert texts == ["a" * 300] * 4
    with pytest.raises(httpx.ConnectError), server.http() as http:
        http.get("/health")


def until(condition: Any, seconds: float = 10.0) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.01)


def test_what_does_not_end_in_time_is_told(tokenizer: Tokenizer) -> None:
    server = start(scripted(ScriptedModel(tokenizer, step_s=0.02), tokenizer), drain_s=0.3)
    with (
        server.http() as http,
        http.stream("POST", "/v1/completions", json={**LONG, "max_tokens": 1900}) as got,
    ):
        lines = got.iter_lines()
        assert next(lines).startswith("data: ")
        begin = time.monotonic()
        server.start_stop()
        rest = [line[6:] for line in lines if line]
    assert json.loads(rest[-2])["error"]["code"] == "shutting_down" and rest[-1] == "[DONE]"
    server.thread.join(10)
    assert not server.thread.is_alive() and time.monotonic() - begin < 5


def test_a_whole_answer_cut_by_the_end_is_503(tokenizer: Tokenizer) -> None:
    server = start(scripted(ScriptedModel(tokenizer, step_s=0.02), tokenizer), drain_s=0.2)
    found: list[int] = []

    def ask() -> None:
        with server.http() as http:
            found.append(http.post("/v1/completions", json={"prompt": "a", "max_tokens": 1900}).status_code)

    thread = threading.Thread(target=ask)
    thread.start()
    until(lambda: server.engine.num_open_requests)
    server.stop()
    thread.join(10)
    assert found == [503]


def test_a_step_that_fails_is_500_for_its_requests_alone(tokenizer: Tokenizer) -> None:
    model = ScriptedModel(tokenizer, fail_at_step=5)
    server = start(scripted(model, tokenizer))
    try:
        create = server.client().completions.create
        with pytest.raises(openai.InternalServerError) as error:
            create(model="tiny", prompt="a", max_tokens=100)
        assert error.value.status_code == 500 and error.value.type == "server_error"
        assert "told to fail" in error.value.message
        model._fail_at_step = -1
        assert create(model="tiny", prompt="a", max_tokens=3).choices[0].text == "aaa"
        with server.http() as http:
            assert http.get("/health/live").status_code == 200
    finally:
        server.stop()


def test_a_stream_whose_step_fails_ends_with_an_error(tokenizer: Tokenizer) -> None:
    model = ScriptedModel(tokenizer, fail_at_step=5)
    server = start(scripted(model, tokenizer))
    try:
        stream = server.client().completions.create(model="tiny", prompt="a", max_tokens=100, stream=True)
        with pytest.raises(openai.APIError, match="told to fail"):
            for _ in stream:
                pass
    finally:
        server.stop()


def test_an_engine_without_progress_is_not_alive(tokenizer: Tokenizer) -> None:
    gate = threading.Event()
    server = start(scripted(ScriptedModel(tokenizer, gate=gate), tokenizer), stall_s=1.0)
    try:
        with server.http() as http:
            time.sleep(1.5)
            assert http.get("/health/live").status_code == 200  # idle is no stall
            with contextlib.suppress(httpx.ReadTimeout), server.http() as other:
                other.post("/v1/completions", json={"prompt": "a"}, timeout=2.5)
            got = http.get("/health/live")
            assert got.status_code == 503 and "no step" in got.json()["status"]
            assert http.get("/health/ready").status_code == 503
            gate.set()
            until(lambda: http.get("/health/live").status_code == 200)
    finally:
        gate.set()
        server.stop()


def test_a_dead_engine_is_503_and_not_alive(tokenizer: Tokenizer) -> None:
    server = start(scripted(ScriptedModel(tokenizer), tokenizer))
    try:
        server.engine._core.close()
        with server.http() as http:
            until(lambda: http.get("/health/live").status_code == 503)
            assert http.post("/v1/completions", json={"prompt": "a"}).status_code == 503
            assert http.get("/metrics").status_code == 200
    finally:
        server.stop()


@pytest.fixture
def keyed(tokenizer: Tokenizer) -> Any:
    """Return a server with two keys, whose prefixes are apart."""
    server = start(
        scripted(ScriptedModel(tokenizer), tokenizer), api_keys=("sk-one", "sk-two"), salt_by_key=True
    )
    yield server
    server.stop()


def test_keys_are_asked_for_on_all_but_probes(keyed: Served) -> None:
    with keyed.http() as http:
        for path in ("/health", "/health/live", "/health/ready"):
            assert http.get(path).status_code == 200
        for path in ("/v1/models", "/metrics", "/version", "/nowhere"):
            got = http.get(path)
            assert got.status_code == 401 and got.headers["www-authenticate"] == "Bearer", path
        for wrong in ("Bearer sk-on", "Bearer sk-onee", "Basic sk-one", "sk-one", "Bearer", "Bearer \xe9"):
            got = http.get("/v1/models", headers=[(b"authorization", wrong.encode("latin-1"))])
            assert (got.status_code, got.json()["error"]["code"]) == (401, "invalid_api_key")
        for key in ("sk-one", "sk-two"):
            assert http.get("/v1/models", headers={"authorization": f"bearer {key}"}).status_code == 200
    with pytest.raises(openai.AuthenticationError):
        keyed.client(api_key="sk-three").models.list()


def test_keys_keep_their_prefixes_apart(keyed: Served) -> None:
    prompt = "the quick brown fox jumps over the lazy dog " * 4

    def cached(key: str, **extra: Any) -> int:
        got = keyed.client(api_key=key).completions.create(
            model="tiny", prompt=prompt, max_tokens=1, extra_body=extra
        )
        assert got.usage is not None and got.usage.prompt_tokens_details is not None
        return got.usage.prompt_tokens_details.cached_tokens or 0

    assert cached("sk-one") == 0
    assert cached("sk-one") >= 16
    assert cached("sk-two") == 0
    assert cached("sk-one", cache_salt="mine") == 0
    assert cached("sk-one", cache_salt="mine") >= 16


def test_prefix_hashes_tell_how_much_is_shared(keyed: Served) -> None:
    def hashes(prompt: str, key: str = "sk-one", **headers: str) -> dict[str, str]:
        with keyed.http(headers={"authorization": f"Bearer {key}", **headers}) as http:
            told = http.post("/tokenize", json={"prompt": prompt})
            done = http.post("/v1/completions", json={"prompt": prompt, "max_tokens": 1})
        value = done.headers.get("x-plansmith-prefix-hash", "")
        assert told.headers.get("x-plansmith-prefix-hash", "") == value
        return dict(part.split("=") for part in value.split(", ") if part)

    long, other = "the quick brown fox " * 20, "the quick brown fox " * 10 + "then something else " * 10
    first, second = hashes(long), hashes(other)
    assert list(first) == ["1", "2", "4"][: len(first)] or list(first)[:3] == ["1", "2", "4"]
    assert first == hashes(long)
    shared = [count for count in first if second.get(count) == first[count]]
    assert shared == list(first)[: len(shared)] and 0 < len(shared) < len(first)
    assert hashes("a") == {}
    assert set(hashes(long, "sk-two").values()).isdisjoint(first.values())
    assert set(hashes(long, **{"x-cache-salt": "s"}).values()).isdisjoint(first.values())
