"""Many clients at once through all models, and models that come and go while streams run."""

from __future__ import annotations

import concurrent.futures
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import pytest
from legacy_clients import (
    StreamClient,
    StreamError,
    end_to_end,
    events,
    ids_of,
    inflight,
    one,
    post,
    stop_tensors,
    text_of,
    wait_until,
)
from triton_servers import RunningTriton

LONG = 7000
WORDS = ["fox 🦊", "今日は", "Zwölf", "👩‍👩‍👧", "lazy dog", "\tand\n", "ñandú", "🏳️‍🌈 b"]
Tokens = Callable[..., list[list[int]]]
Text = Callable[[Sequence[int]], str]


class Mixed:
    """Requests of every kind, each with a prompt of its own: what is asked, and what must come."""

    def __init__(self, server: RunningTriton, expected: Tokens, text_of_ids: Text) -> None:
        self._server, self._expected, self._text = server, expected, text_of_ids
        self._base = f"http://{server.http}/v2/models"

    def wanted(self, i: int) -> Any:
        """Return what request i must answer. In one thread, as the engine's own generate is."""
        prompt, params = self._prompt(i), self._params(i)
        ids = self._expected(prompt, self._length(i), ignore_eos=True, **params)
        return ids[0] if i % 4 == 0 else self._text(ids[0])

    def ask(self, i: int) -> Any:
        """Return what it answers."""
        sampling: dict[str, Any] = {"end_id": -1}
        if self._params(i):
            sampling |= {"temperature": 1.0, "seed": np.array([[i]], np.uint64)}
            sampling |= {"runtime_top_k" if i % 4 == 0 else "top_k": 30}
        if i % 4 == 0:
            with StreamClient(self._server.grpc) as client:
                tensors = inflight(self._prompt(i), self._length(i), streaming=True, **sampling)
                return ids_of(client.ask(tensors, f"mixed{i}"))
        model = ["ensemble", "tensorrt_llm_bls"][i // 4 % 2]
        if i % 4 == 1:
            with StreamClient(self._server.grpc, model) as client:
                tensors = end_to_end(self._prompt(i), self._length(i), stream=True, **sampling)
                return text_of(client.ask(tensors, f"mixed{i}"))
        body = {"text_input": self._prompt(i), "max_tokens": self._length(i), "end_id": -1}
        if self._params(i):
            body |= {"top_k": 30, "temperature": 1.0, "seed": i}
        if i % 4 == 2:
            url = f"{self._base}/{model}/generate_stream"
            return "".join(event["text_output"] for event in events(url, {**body, "stream": True}))
        status, answer = post(f"{self._base}/{model}/generate", {**body, "exclude_input_in_output": True})
        assert status == 200, answer
        return answer["text_output"]

    def _prompt(self, i: int) -> Any:
        return [3 + i, 7, 11 + i] if i % 4 == 0 else f"{i}: {WORDS[i % len(WORDS)]}"

    def _length(self, i: int) -> int:
        return 20 + 37 * i % 200

    def _params(self, i: int) -> dict[str, Any]:
        return {"temperature": 1.0, "top_k": 30, "seed": i} if i // 8 % 2 else {}


def test_64_requests_of_all_kinds_have_their_own_answers(
    server: RunningTriton, expected: Tokens, text_of_ids: Text
) -> None:
    mixed = Mixed(server, expected, text_of_ids)
    wanted = [mixed.wanted(i) for i in range(64)]
    with concurrent.futures.ThreadPoolExecutor(64) as threads:
        answers = list(threads.map(mixed.ask, range(64)))
    wrong = [i for i in range(64) if answers[i] != wanted[i]]
    assert not wrong, [(answers[i], wanted[i]) for i in wrong[:2]]
    wait_until(lambda: active(server) == 0)


@pytest.mark.parametrize("model", ["tensorrt_llm", "ensemble", "tensorrt_llm_bls"])
def test_clients_that_all_call_their_request_1(
    server: RunningTriton, expected: Tokens, text_of_ids: Text, model: str
) -> None:
    """They do not know of each other; a stop ends all requests of its id."""
    prompts = [[9 + i, 3, 7] for i in range(8)]
    wanted: list[Any] = [expected(prompt, 200, ignore_eos=True)[0] for prompt in prompts]
    asked = [inflight(prompt, 200, streaming=True) for prompt in prompts]
    read: Callable[..., Any] = ids_of
    if model != "tensorrt_llm":
        wanted = [text_of_ids(expected(f"say {i}", 200, ignore_eos=True)[0]) for i in range(8)]
        asked = [end_to_end(f"say {i}", 200, stream=True, end_id=-1) for i in range(8)]
        read = text_of
    clients = [StreamClient(server.grpc, model) for _ in asked]
    for client, tensors in zip(clients, asked, strict=True):
        client.send(tensors, "1")
    assert [read(client.rest()) for client in clients] == wanted
    longer = "request_output_len" if model == "tensorrt_llm" else "max_tokens"
    for client, tensors in zip(clients, asked, strict=True):
        client.send(tensors | {longer: one(LONG)}, "1")
    for client in clients:
        client.next()
    stop = {"stop": one(True), **({} if model == "tensorrt_llm" else end_to_end("", 0))}
    with StreamClient(server.grpc, model) as other:
        other.ask(stop_tensors() if model == "tensorrt_llm" else stop, "1")
    for client in clients:
        assert client.rest()[-1]["finish_reasons"].tolist() == [[5]]
        client.close()


def active(server: RunningTriton) -> float:
    """Return how many requests the engine of `tensorrt_llm` has."""
    lines = [
        line
        for line in server.api.metrics(5).splitlines()
        if "nv_trt_llm_request_metrics" in line and 'model="tensorrt_llm"' in line and '"active"' in line
    ]
    assert len(lines) == 1, lines
    return float(lines[0].split()[-1])


def test_the_three_ways_to_a_text_agree(server: RunningTriton, text_of_ids: Text) -> None:
    """The ensemble = tensorrt_llm_bls = preprocessing, tensorrt_llm, postprocessing called one by one."""
    for prompt in WORDS:
        texts = []
        for model in ("ensemble", "tensorrt_llm_bls"):
            with StreamClient(server.grpc, model) as client:
                texts.append(text_of(client.ask(end_to_end(prompt, 50, return_log_probs=True))))
        base = f"http://{server.http}/v2/models"
        status, encoded = post(f"{base}/preprocessing/generate", {"QUERY": prompt, "REQUEST_OUTPUT_LEN": 50})
        assert status == 200
        ids = encoded["INPUT_ID"] if isinstance(encoded["INPUT_ID"], list) else [encoded["INPUT_ID"]]
        with StreamClient(server.grpc) as client:
            made = ids_of(client.ask(inflight(ids, 50, end_id=encoded["OUT_END_ID"])))
        body = {"TOKENS_BATCH": made, "SEQUENCE_LENGTH": len(made)}
        infer = {
            "inputs": [
                {"name": "TOKENS_BATCH", "shape": [1, 1, len(made)], "datatype": "INT32", "data": made},
                {"name": "SEQUENCE_LENGTH", "shape": [1, 1], "datatype": "INT32", "data": [len(made)]},
            ]
        }
        status, decoded = post(f"{base}/postprocessing/infer", infer)
        assert status == 200, body
        texts.append(decoded["outputs"][0]["data"][0])
        assert texts[0] == texts[1] == texts[2] == text_of_ids(made), prompt


@pytest.fixture
def reloaded(server: RunningTriton) -> Iterator[None]:
    """Load what a test unloaded, so that the others find it."""
    yield
    for name in ("tensorrt_llm_draft",):
        server.api.load(name, 60)


@pytest.mark.usefixtures("reloaded")
def test_streams_end_well_when_their_model_is_unloaded(server: RunningTriton, drafted: Tokens) -> None:
    """Unloading waits for what runs; new requests are refused; another model's streams do not notice; load again."""
    name = "tensorrt_llm_draft"
    streams = [StreamClient(server.grpc, name) for _ in range(4)]
    for i, stream in enumerate(streams):
        stream.send(inflight([5 + i, 9], LONG, streaming=True), f"u{i}")
    firsts = [stream.next()[0] for stream in streams]
    neighbour = StreamClient(server.grpc)
    neighbour.send(inflight([5, 9], LONG, streaming=True))
    unloading = threading.Thread(target=server.api.unload, args=(name, 60))
    unloading.start()
    wait_until(lambda: not server.api.is_model_ready(name, 5))
    with (
        StreamClient(server.grpc, name) as late,
        pytest.raises(StreamError, match=r"not ready|no available|unknown"),
    ):
        late.ask(inflight([5], 4))
    for i, (stream, first) in enumerate(zip(streams, firsts, strict=True)):
        assert [ids_of([first, *stream.rest()])] == drafted([5 + i, 9], LONG, ignore_eos=True)
        stream.close()
    assert len(ids_of(neighbour.rest())) == LONG
    neighbour.close()
    unloading.join(30)
    server.api.load(name, 60)
    with StreamClient(server.grpc, name) as again:
        assert [ids_of(again.ask(inflight([5, 9], 8, exclude_input_in_output=True)))] == drafted(
            [5, 9], 8, ignore_eos=True
        )


def test_many_outputs_of_text_beside_many_small_requests(server: RunningTriton) -> None:
    """Answers that come close together while other calls are made once locked up the model of text for good."""
    url = f"http://{server.http}/v2/models/tensorrt_llm_bls"
    body = {"text_input": "the quick", "max_tokens": 8, "end_id": -1}
    done = threading.Event()

    def small() -> int:
        count = 0
        while not done.is_set():
            status, answer = post(f"{url}/generate", {**body, "max_tokens": 5})
            assert status == 200, answer
            count += 1
        return count

    with concurrent.futures.ThreadPoolExecutor(6) as threads:
        beside = [threads.submit(small) for _ in range(6)]
        try:
            for _ in range(30):
                several = {
                    **body,
                    "num_return_sequences": 16,
                    "temperature": 1.0,
                    "top_k": 30,
                    "stream": True,
                }
                indices = [event["sequence_index"] for event in events(f"{url}/generate_stream", several)]
                assert set(indices) == set(range(16))
        finally:
            done.set()
        assert all(one.result(30) > 0 for one in beside)
