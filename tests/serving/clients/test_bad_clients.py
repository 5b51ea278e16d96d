"""Clients that send what they should not: an error of their own, while their neighbours' tokens go on and are right."""

from __future__ import annotations

import concurrent.futures
import http.client
import json
import re
import socket
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import tritonclient.http as httpclient
from legacy_clients import (
    StreamClient,
    StreamError,
    Tensors,
    end_to_end,
    ids_of,
    infer_inputs,
    inflight,
    one,
    post,
)
from triton_servers import RunningTriton
from tritonclient.utils import InferenceServerException

LONG = 4000
TEXT = "the quick brown fox"
Tokens = Callable[..., list[list[int]]]


@pytest.fixture(autouse=True)
def neighbour(server: RunningTriton, expected: Tokens) -> Iterator[None]:
    """Run streams of good clients beside each test, one after the other; each must have the engine's own tokens."""
    (wanted,) = expected([5, 9, 23], 500, ignore_eos=True)
    done = threading.Event()

    def run() -> int:
        count = 0
        with StreamClient(server.grpc) as client:
            while not done.is_set() or not count:
                answers = client.ask(inflight([5, 9, 23], 500, streaming=True), "neighbour")
                assert ids_of(answers) == wanted
                count += 1
        return count

    with concurrent.futures.ThreadPoolExecutor(1) as threads:
        running = threads.submit(run)
        yield
        done.set()
        assert running.result(60) >= 1


def refused(server: RunningTriton, tensors: Tensors, model: str = "tensorrt_llm") -> str:
    """Return the error that a request gets."""
    with StreamClient(server.grpc, model) as client, pytest.raises(StreamError) as caught:
        client.ask(tensors, "bad")
    return str(caught.value)


WRONG: list[tuple[dict[str, Any], str]] = [
    ({"input_ids": np.array([[[1, 2]]], np.int32)}, "input_ids"),
    ({"input_ids": np.array([[1.0, 2.0]], np.float32)}, "input_ids"),
    ({"input_ids": np.zeros((0, 3), np.int32)}, ""),
    ({"input_ids": np.zeros((1, 0), np.int32)}, "input_ids"),
    ({"input_lengths": np.array([[2, 2]], np.int32)}, "input_lengths"),
    ({"input_lengths": np.array([[2], [2]], np.int32)}, ""),
    ({"input_lengths": np.array([[2]], np.int64)}, "input_lengths"),
    ({"input_lengths": one(9)}, "input_lengths"),
    ({"input_lengths": one(-1)}, "input_lengths"),
    ({"input_lengths": one(0)}, "input_lengths|prompt"),
    ({"request_output_len": one(0)}, "request_output_len"),
    ({"request_output_len": one(-5)}, "request_output_len"),
    ({"input_ids": np.array([[-1, 2]], np.int32)}, "input_ids"),
    ({"temperature": np.array([[np.nan]], np.float32)}, "temperature"),
    ({"temperature": np.array([[np.inf]], np.float32)}, "temperature"),
    ({"runtime_top_p": one(7.5)}, "runtime_top_p"),
    ({"stop_words_list": np.zeros((1, 3, 4), np.int32)}, "stop_words_list"),
    ({"stop_words_list": np.array([[[4, 5], [2, 1]]], np.int32)}, "stop_words_list"),
    ({"bad_words_list": np.array([[[4, 999999], [1, 2]]], np.int32)}, "bad_words_list"),
    ({"embedding_bias": np.ones((1, 321), np.float32)}, "embedding_bias"),
    ({"draft_logits": np.zeros((1, 2, 5), np.float32), "draft_input_ids": [3, 4]}, "draft_logits"),
    ({"lora_weights": np.ones((1, 2, 3), np.float16)}, "lora"),
    ({"lora_config": np.ones((1, 2, 4), np.int32)}, "lora_config"),
    ({"guided_decoding_guide_type": "regex", "guided_decoding_guide": "["}, "regex"),
    ({"guided_decoding_guide_type": np.array([[b"\xff\xfe"]], object)}, "guided_decoding_guide_type"),
    ({"no_such_tensor": one(1)}, "no_such_tensor"),
]


def test_wrong_tensors_are_errors_that_name_them(server: RunningTriton) -> None:
    missed = []
    for more, word in WRONG:
        error = refused(server, inflight([17, 42], 4, **more))
        if not re.search(word, error):
            missed.append((more, error))
    assert not missed
    for name in ("input_lengths", "request_output_len", "input_ids"):
        tensors = inflight([17, 42], 4)
        del tensors[name]
        assert name in refused(server, tensors)


@pytest.mark.parametrize("model", ["ensemble", "tensorrt_llm_bls"])
def test_wrong_texts_are_errors_that_name_them(server: RunningTriton, model: str) -> None:
    bad = np.array([[b"a\xff\xfeb"]], object)
    for name in ("text_input", "stop_words", "bad_words", "embedding_bias_words"):
        more: dict[str, Any] = {name: bad}
        if name == "embedding_bias_words":
            more["embedding_bias_weights"] = [1.0]
        error = refused(server, end_to_end(TEXT, 8, **more), model)
        assert "UTF-8" in error, error
    wrong: list[dict[str, Any]] = [
        {"text_input": np.array([[b"a", b"b"]], object)},
        {"max_tokens": np.array([[8.0]], np.float32)},
        {"max_tokens": np.array([[8], [8]], np.int32)},
        {"stream": one(1)},
        {"embedding_bias_words": ["a", "b"], "embedding_bias_weights": [1.0]},
    ]
    for more in wrong:
        assert refused(server, end_to_end(TEXT, 8, **more), model)
    for name in ("text_input", "max_tokens"):  # which the server itself does not see among many optional ones
        tensors = end_to_end(TEXT, 8, temperature=1.0, top_k=1, top_p=0.5)
        del tensors[name]
        assert re.search(rf"{name}\)? is missing", refused(server, tensors, model))
    with StreamClient(server.grpc, model) as client:
        assert client.ask(end_to_end(TEXT, 8))


def test_an_error_on_a_stream_leaves_its_other_requests_alone(
    server: RunningTriton, expected: Tokens
) -> None:
    with StreamClient(server.grpc) as client:
        client.send(inflight([7, 7], LONG, streaming=True), "good")
        answers = [client.next()[0]]
        client.send(inflight([7, 7], LONG, temperature=-1.0), "bad")
        client.send(inflight([7], 4, beam_width=7), "good")  # an id that runs
        errors: list[str] = []
        while True:
            try:
                outputs, is_final = client.next()
            except StreamError as error:
                errors.append(str(error))
                continue
            answers += [outputs] if outputs else []
            if is_final:
                break
        assert len(errors) == 2
        assert any("temperature" in error for error in errors) and any("beam" in error for error in errors)
        assert [ids_of(answers)] == expected([7, 7], LONG, ignore_eos=True)


@pytest.mark.parametrize("model", ["tensorrt_llm", "ensemble"])
def test_a_prompt_of_100_megabytes_is_refused(server: RunningTriton, model: str) -> None:
    """Over HTTP in binary, to the models that take one answer a request: the error says how long it may be. Text is
    tokenized to know its length, about a megabyte a second, so of that there is less.
    """
    once = f"{model}_once"
    size = 25_000_000 if model == "tensorrt_llm" else 400_000
    if model == "tensorrt_llm":
        tensors = inflight([5], 4, input_ids=np.full((1, size), 7, np.int32), input_lengths=one(size))
    else:
        tensors = end_to_end(TEXT, 4, text_input=np.array([[b"fox " * (size // 4)]], object))
    with httpclient.InferenceServerClient(server.http, network_timeout=120, connection_timeout=120) as client:
        with pytest.raises(InferenceServerException, match=r"max_input_len|max_seq_len"):
            client.infer(once, infer_inputs(tensors, httpclient))
        good = inflight([5], 4) if model == "tensorrt_llm" else end_to_end(TEXT, 4)
        assert client.infer(once, infer_inputs(good, httpclient))


def test_readers_that_do_not_read(server: RunningTriton) -> None:
    """Slow readers of events keep nobody waiting, and may read on or leave."""
    body = json.dumps({"text_input": TEXT, "max_tokens": LONG, "stream": True, "end_id": -1})
    head = "POST /v2/models/tensorrt_llm_bls/generate_stream HTTP/1.1\r\nHost: x\r\n"
    head += f"Content-Length: {len(body)}\r\n\r\n"
    host, port = server.http.split(":")
    slow = []
    for _ in range(4):
        connection = socket.socket()
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        connection.connect((host, int(port)))
        connection.sendall((head + body).encode())
        slow.append(connection)
    start = time.monotonic()
    with StreamClient(server.grpc) as client:
        assert len(ids_of(client.ask(inflight([9, 9], 300, streaming=True)))) == 300
    assert time.monotonic() - start < 30
    for connection in slow[:2]:
        connection.close()
    slow[2].settimeout(60)
    text = b""
    while b"\r\n0\r\n\r\n" not in text[-64:] and (data := slow[2].recv(1 << 16)):
        text += data
    assert b"200 OK" in text and text.count(b"data:") > 1
    for connection in slow[3:]:
        connection.close()


def test_half_a_request_and_rubbish(server: RunningTriton) -> None:
    """Connections that are cut while they send, and bytes that are no HTTP and no gRPC."""
    for address, data in (
        (server.http, b"POST /v2/models/ensemble/generate HTTP/1.1\r\nContent-Length: 100000\r\n\r\n{"),
        (server.http, b"\x00\xff" * 500),
        (server.grpc, b"\x00\xff" * 500),
        (server.grpc, b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + b"\x00" * 50),
    ):
        host, port = address.split(":")
        with socket.create_connection((host, int(port)), 10) as connection:
            connection.sendall(data)
            time.sleep(0.05)
    connection = http.client.HTTPConnection(server.http, timeout=30)
    for method, path in (("GET", "/v2/models/ensemble/generate"), ("POST", "/v2/models/nobody/generate")):
        connection.request(method, path, b"{}")
        response = connection.getresponse()
        assert response.status >= 400
        response.read()
    connection.close()
    status, answer = post(
        f"http://{server.http}/v2/models/ensemble/generate", {"text_input": TEXT, "max_tokens": 3}
    )
    assert status == 200, answer
