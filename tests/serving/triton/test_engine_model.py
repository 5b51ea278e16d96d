"""`tensorrt_llm` in a real tritonserver: what clients of the older stack send, over gRPC and HTTP."""

from __future__ import annotations

import collections
import http.client
import json
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from plansmith.runtime.engine import Engine
from plansmith.runtime.sampling import SamplingParams
from plansmith.serving.repository.plan import Overrides, make_plan
from plansmith.serving.repository.write import write_repository
from triton_rows import BASIC, PERF_METRICS
from triton_servers import RunningTriton, TritonServers

grpcclient = pytest.importorskip("tritonclient.grpc")
httpclient = pytest.importorskip("tritonclient.http")

_TYPES = {
    np.dtype(np.int32): "INT32",
    np.dtype(np.bool_): "BOOL",
    np.dtype(np.float32): "FP32",
    np.dtype(np.uint64): "UINT64",
}
LONG = 8000  # tokens: a second of this engine, so that a stop comes in the middle


@pytest.fixture(scope="module")
def make_repository(engine_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """Return what makes a repository of the model alone; fields are its parameters, or the template's variables."""

    def make(variables: Mapping[str, str] | None = None, **parameters: str) -> Path:
        folder = tmp_path_factory.mktemp("repository") / "models"
        chosen = {"num_threads": "1", "cancellation_check_period_ms": "20", **parameters}
        overrides = Overrides(
            dict(variables or {}), {("tensorrt_llm", key): text for key, text in chosen.items()}
        )
        write_repository(make_plan(engine_dir, folder, overrides), folder)
        return folder

    return make


@pytest.fixture(scope="module")
def server(triton_server: TritonServers, make_repository: Callable[..., Path]) -> RunningTriton:
    return triton_server(make_repository(max_beam_width="2"), ["tensorrt_llm"])


@pytest.fixture(scope="module")
def expected(engine_dir: Path) -> Iterator[Callable[..., list[list[int]]]]:
    with Engine.open(engine_dir, num_threads=1) as engine:

        def tokens(prompt: Sequence[int], max_tokens: int, **params: Any) -> list[list[int]]:
            chosen = {"temperature": 0.0, "detokenize": False, "ignore_eos": True, **params}
            (one,) = engine.generate([list(prompt)], SamplingParams(max_tokens=max_tokens, **chosen))
            return [list(output.token_ids) for output in one.outputs]

        yield tokens


def tensors(prompts: Sequence[Sequence[int]], max_tokens: int, **others: Any) -> dict[str, NDArray[Any]]:
    """Return a request's inputs as the older clients shape them: one column a value, prompts padded on the right."""
    length = max(map(len, prompts))
    ids = [[*prompt, *[0] * (length - len(prompt))] for prompt in prompts]
    column = [[1]] * len(prompts)
    made = {
        "input_ids": np.array(ids, np.int32),
        "input_lengths": np.array([[len(prompt)] for prompt in prompts], np.int32),
        "request_output_len": np.array(column, np.int32) * max_tokens,
        "end_id": np.array(column, np.int32) * -1,
    }
    for name, value in others.items():
        dtype = {bool: np.bool_, int: np.int32, float: np.float32}[type(value)]
        made[name] = np.array([[value]] * len(prompts), np.uint64 if name == "seed" else dtype)
    return made


class Answer:
    """What came of one request."""

    def __init__(self) -> None:
        self.outputs: list[dict[str, NDArray[Any]]] = []
        self.error = ""
        self.ended = threading.Event()

    def wait(self, timeout: float = 30.0) -> list[dict[str, NDArray[Any]]]:
        assert self.ended.wait(timeout), f"no end came; {len(self.outputs)} answers"
        assert not self.error, self.error
        return self.outputs

    def tokens(self, row: int = 0, index: int = 0) -> list[int]:
        ids: list[int] = []
        for one in self.wait():
            place = tuple(one.get(name, np.zeros(1)).item() for name in ("batch_index", "sequence_index"))
            if place == (row, index):
                ids += one["output_ids"][0, 0].tolist()
        return ids


class Stream:
    """One gRPC stream with many requests on it."""

    def __init__(self, server: RunningTriton, model: str = "tensorrt_llm") -> None:
        self._client = grpcclient.InferenceServerClient(server.grpc)
        self._model = model
        self._answers: dict[str, collections.deque[Answer]] = collections.defaultdict(collections.deque)
        self._lock = threading.Lock()
        self._client.start_stream(callback=self._take)

    def send(
        self, inputs: Mapping[str, NDArray[Any]], request_id: str = "1", outputs: Sequence[str] = ()
    ) -> Answer:
        made = []
        for name, array in inputs.items():
            one = grpcclient.InferInput(name, array.shape, _TYPES[array.dtype])
            one.set_data_from_numpy(array)
            made.append(one)
        answer = Answer()
        with self._lock:
            self._answers[request_id].append(answer)
        wanted = [grpcclient.InferRequestedOutput(name) for name in outputs] or None
        self._client.async_stream_infer(
            self._model, made, request_id=request_id, outputs=wanted, enable_empty_final_response=True
        )
        return answer

    def close(self, *, cancel: bool = False) -> None:
        self._client.stop_stream(cancel_requests=cancel)
        self._client.close()

    def _take(self, result: Any, error: Any) -> None:
        if error is not None:
            with self._lock:
                waiting = [one for queue in self._answers.values() for one in queue]
            for one in waiting:
                one.error = str(error)
                one.ended.set()
            return
        response = result.get_response()
        with self._lock:
            # Of two requests with one id the later is a stop, whose answer has no outputs and may come first.
            queue = self._answers[response.id]
            is_final = response.parameters["triton_final_response"].bool_param
            answer = queue[-1] if is_final and not response.outputs else queue[0]
        if response.outputs:
            answer.outputs.append({one.name: result.as_numpy(one.name) for one in response.outputs})
        if is_final:
            with self._lock:
                queue.remove(answer)
            answer.ended.set()


@pytest.fixture
def stream(server: RunningTriton) -> Iterator[Stream]:
    made = Stream(server)
    yield made
    made.close()


def post(server: RunningTriton, path: str, body: Mapping[str, Any]) -> tuple[int, Any]:
    connection = http.client.HTTPConnection(server.http, timeout=30)
    try:
        connection.request("POST", f"/v2/models/{path}", json.dumps(body))
        response = connection.getresponse()
        return response.status, json.loads(response.read())
    finally:
        connection.close()


def metric(server: RunningTriton, start: str) -> float:
    """Return the sum of the series whose line begins with `start`."""
    lines = [line for line in server.api.metrics(5).splitlines() if line.startswith(start)]
    assert lines, start
    return sum(float(line.split()[-1]) for line in lines)


def test_a_hundred_streams_have_the_engines_tokens(
    stream: Stream, expected: Callable[..., list[list[int]]]
) -> None:
    prompts = [[5 + i % 90, 9, i % 11 + 3] + [i + 4] * (i % 7) for i in range(100)]
    answers = [stream.send(tensors([p], 24, streaming=True), f"s{i}") for i, p in enumerate(prompts)]
    for prompt, answer in zip(prompts, answers, strict=True):
        assert [answer.tokens()] == expected(prompt, 24)
        assert set(answer.outputs[0]) == BASIC
        ids: list[int] = []
        for one in answer.outputs:
            prefix = one["prefix_ids"][0, 0]
            assert prefix[prefix >= 0].tolist() == ids[-16:]
            ids += one["output_ids"][0, 0].tolist()
        assert [bool(one["is_final"].all()) for one in answer.outputs].count(True) == 1


def test_one_answer_has_the_prompt_and_what_was_asked(
    stream: Stream, expected: Callable[..., list[list[int]]]
) -> None:
    prompt = [5, 9, 23, 41]
    (plain,) = stream.send(tensors([prompt], 9)).wait()
    assert plain["output_ids"].tolist() == [[prompt + expected(prompt, 9)[0]]]
    assert plain["sequence_length"].tolist() == [[13]]
    wanted = ["log_probs", "context_logits", "generation_logits", "perf_metrics"]
    wanted += ["num_input_tokens", "num_output_tokens"]
    flags = {f"return_{name}": True for name in wanted}
    asked = tensors([prompt], 9, exclude_input_in_output=True, **flags)
    (full,) = stream.send(asked).wait()
    assert full["output_ids"].shape == (1, 1, 9) and full["output_log_probs"].shape == (1, 1, 9)
    assert full["context_logits"].shape == (1, 4, 320) and full["context_logits"].dtype == np.float32
    assert full["generation_logits"].shape == (1, 1, 9, 320)
    rows = full["generation_logits"][0, 0].astype(np.float64)
    rows -= rows.max(1, keepdims=True)
    logprobs = rows - np.log(np.exp(rows).sum(1, keepdims=True))
    chosen = logprobs[np.arange(9), full["output_ids"][0, 0]]
    assert full["output_log_probs"][0, 0] == pytest.approx(chosen, abs=1e-4)
    assert full["cum_log_probs"][0, 0] == pytest.approx(chosen.sum(), abs=1e-3)
    assert set(full) >= PERF_METRICS
    assert full["num_input_tokens"].tolist() == [[4]] and full["num_output_tokens"].tolist() == [[9]]
    (some,) = stream.send(asked, outputs=["output_ids", "sequence_length", "cum_log_probs"]).wait()
    assert set(some) == {"output_ids", "sequence_length", "cum_log_probs"}


def test_batches_sequences_and_beams(stream: Stream, expected: Callable[..., list[list[int]]]) -> None:
    prompts = [[3], [4, 5, 6], [7, 8]]
    batch = stream.send(tensors(prompts, 8, streaming=True), "batch")
    whole = stream.send(tensors(prompts, 8, exclude_input_in_output=True), "whole")
    for i, prompt in enumerate(prompts):
        assert [batch.tokens(i)] == [whole.tokens(i)] == expected(prompt, 8)
    several = tensors(
        [[9, 9]], 8, num_return_sequences=3, temperature=0.9, runtime_top_k=40, seed=7, streaming=True
    )
    answer = stream.send(several, "several")
    wanted = expected([9, 9], 8, n=3, temperature=0.9, top_k=40, seed=7)
    assert [answer.tokens(index=i) for i in range(3)] == wanted
    (beams,) = stream.send(tensors([[9, 9]], 8, beam_width=2, exclude_input_in_output=True), "beams").wait()
    assert beams["output_ids"].shape == (1, 2, 8) and beams["sequence_length"].tolist() == [[8, 8]]


def test_errors_go_to_their_request_over_grpc_and_http(
    server: RunningTriton, expected: Callable[..., list[list[int]]]
) -> None:
    cases = [
        (tensors([[5] * 200], 4), "max_input_len"),
        (tensors([[5]], 4, temperature=-1.0), "temperature"),
        (tensors([[999]], 4), "input_ids"),
        (tensors([[5]], 4, beam_width=3), "max_beam_width"),
    ]
    for inputs, words in cases:
        stream = Stream(server)
        answer = stream.send(inputs)
        answer.ended.wait(20)
        assert words in answer.error
        stream.close()
        status, body = post(
            server,
            "tensorrt_llm/generate",
            {name: array.reshape(-1).tolist() for name, array in inputs.items()},
        )
        assert (status, words in body["error"]) == (400, True), body
    body = {"input_ids": [5, 9], "input_lengths": 2, "request_output_len": 6, "end_id": -1}
    status, answered = post(server, "tensorrt_llm/generate", body)
    assert status == 200 and answered["output_ids"] == [5, 9, *expected([5, 9], 6)[0]]


def test_bytes_that_are_no_text_are_an_error_of_their_request_alone(server: RunningTriton) -> None:
    for name in (b"id", b"note"):
        body = b'{"' + name + b'": "a\xffb", '
        body += b'"input_ids": [5], "input_lengths": 1, "request_output_len": 3}'
        connection = http.client.HTTPConnection(server.http, timeout=30)
        connection.request("POST", "/v2/models/tensorrt_llm/generate", body)
        response = connection.getresponse()
        assert response.status == 400 and "not UTF-8" in json.loads(response.read())["error"]
        connection.close()


def test_a_stop_request_ends_the_one_of_its_id(
    stream: Stream, server: RunningTriton, expected: Callable[..., list[list[int]]]
) -> None:
    stop = tensors([[0]], 0, stop=True)
    stop["input_lengths"][:] = 0
    running = stream.send(tensors([[5, 9]], LONG, streaming=True), "long")
    while not running.outputs:
        time.sleep(0.001)
    assert stream.send(stop, "long").wait() == []
    tokens = running.tokens()
    assert 0 < len(tokens) < LONG and tokens == expected([5, 9], len(tokens))[0]
    assert running.outputs[-1]["finish_reasons"].tolist() == [[5]]
    assert stream.send(stop, "nobody").wait() == []
    other = Stream(server)
    nameless = other.send(stop, "")
    nameless.ended.wait(20)
    assert "no id" in nameless.error
    other.close()


def test_an_id_that_runs_is_no_others_obstacle(stream: Stream, server: RunningTriton) -> None:
    running = stream.send(tensors([[5, 9]], LONG, streaming=True), "same")
    while not running.outputs:
        time.sleep(0.001)
    status, body = post(
        server,
        "tensorrt_llm/generate",
        {"id": "same", "input_ids": [5], "input_lengths": 1, "request_output_len": 3},
    )
    assert status == 200 and body["sequence_length"] == 4
    assert len(running.tokens()) == LONG


def test_clients_that_go_away_free_the_engine(server: RunningTriton) -> None:
    cancelled = 'plansmith_requests_finished_total{model="tensorrt_llm",reason="cancelled"'
    before = metric(server, cancelled)
    going = Stream(server)
    left = [going.send(tensors([[5 + i]], LONG, streaming=True), f"left{i}") for i in range(6)]
    while not all(one.outputs for one in left):
        time.sleep(0.001)
    going.close(cancel=True)
    connection = http.client.HTTPConnection(server.http, timeout=30)
    body = {"input_ids": [5], "input_lengths": 1, "request_output_len": LONG, "streaming": True, "end_id": -1}
    connection.request("POST", "/v2/models/tensorrt_llm/generate_stream", json.dumps(body))
    assert connection.getresponse().readline().startswith(b"data:")
    connection.close()
    deadline = time.monotonic() + 20
    while metric(server, cancelled) < before + 7:
        assert time.monotonic() < deadline
        time.sleep(0.02)
    active = 'nv_trt_llm_request_metrics{model="tensorrt_llm",request_type="active"'
    while metric(server, active):
        assert time.monotonic() < deadline
        time.sleep(0.02)


def test_http_streams_end_with_the_last_event(
    server: RunningTriton, expected: Callable[..., list[list[int]]]
) -> None:
    connection = http.client.HTTPConnection(server.http, timeout=30)
    body = {
        "input_ids": [5, 9],
        "input_lengths": 2,
        "request_output_len": 40,
        "streaming": True,
        "end_id": -1,
    }
    connection.request("POST", "/v2/models/tensorrt_llm/generate_stream", json.dumps(body))
    events = [
        json.loads(line[5:])
        for line in connection.getresponse().read().splitlines()
        if line.startswith(b"data:")
    ]
    connection.close()
    ids: list[int] = []
    for event in events:
        ids += event["output_ids"] if isinstance(event["output_ids"], list) else [event["output_ids"]]
    assert ids == expected([5, 9], 40)[0]
    assert [event["is_final"] for event in events] == [False] * (len(events) - 1) + [True]


def test_the_server_ends_while_streams_run(
    triton_server: TritonServers, make_repository: Callable[..., Path]
) -> None:
    server = triton_server(make_repository(), ["tensorrt_llm"], fresh=True)
    stream = Stream(server)
    running = [stream.send(tensors([[5 + i]], 1500, streaming=True), str(i)) for i in range(4)]
    while not all(one.outputs for one in running):
        time.sleep(0.001)
    statuses: list[int] = []
    stopper = threading.Thread(target=lambda: statuses.append(triton_server.stop(server)))
    stopper.start()
    assert [len(one.tokens()) for one in running] == [1500] * 4
    stream.close()
    stopper.join()
    assert statuses == [0]


def test_a_model_of_one_answer_a_request(
    triton_server: TritonServers,
    make_repository: Callable[..., Path],
    expected: Callable[..., list[list[int]]],
) -> None:
    folder = make_repository({"decoupled_mode": "false", "logits_datatype": "TYPE_FP16"})
    server = triton_server(folder, ["tensorrt_llm"], fresh=True)
    client = httpclient.InferenceServerClient(server.http)
    inputs = []
    asked = tensors(
        [[5, 9]],
        6,
        return_generation_logits=True,
        num_return_sequences=2,
        temperature=0.9,
        runtime_top_k=40,
        exclude_input_in_output=True,
        seed=3,
    )
    for name, array in asked.items():
        inputs.append(httpclient.InferInput(name, array.shape, _TYPES[array.dtype]))
        inputs[-1].set_data_from_numpy(array)
    result = client.infer("tensorrt_llm", inputs, request_id="a")
    assert result.as_numpy("output_ids")[0].tolist() == expected(
        [5, 9], 6, n=2, temperature=0.9, top_k=40, seed=3
    )
    assert result.as_numpy("generation_logits").shape == (1, 2, 6, 320)
    assert result.as_numpy("generation_logits").dtype == np.float16
    client.close()
    body = {"input_ids": [5], "input_lengths": 1, "request_output_len": 3, "streaming": True}
    status, answered = post(server, "tensorrt_llm/generate", body)
    assert status == 400 and "decoupled" in answered["error"]
    status, answered = post(
        server,
        "tensorrt_llm/generate",
        {"id": "x", "stop": True, "input_ids": [0], "input_lengths": 0, "request_output_len": 0},
    )
    assert status == 200 and "output_ids" not in answered
    assert triton_server.stop(server) == 0


def test_what_has_no_effect_in_a_request_is_logged_once(server: RunningTriton) -> None:
    body = {"input_ids": [5], "input_lengths": 1, "request_output_len": 3, "end_id": -1, "no_such_field": 1}
    for _ in range(3):
        assert post(server, "tensorrt_llm/generate", body)[0] == 200
    deadline = time.monotonic() + 10
    while "no_such_field" not in server.log(1000):
        assert time.monotonic() < deadline, server.log()
        time.sleep(0.05)
    time.sleep(0.2)
    assert server.log(1000).count("no_such_field") == 1


def test_a_model_that_cannot_be_opened_says_why(
    triton_server: TritonServers, make_repository: Callable[..., Path]
) -> None:
    folder = make_repository()
    config = folder / "tensorrt_llm" / "config.pbtxt"
    text = config.read_text()
    config.write_text(
        text.replace(
            'key: "max_beam_width" value: { string_value: "1"',
            'key: "max_beam_width" value: { string_value: "9"',
        )
    )
    assert config.read_text() != text
    with pytest.raises(Exception, match="max_beam_width is 9"):
        triton_server(folder, ["tensorrt_llm"], fresh=True)
