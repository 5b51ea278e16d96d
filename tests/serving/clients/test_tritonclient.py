"""tritonclient in all its forms: HTTP and gRPC, with and without asyncio, unary and streaming, and shared memory."""

from __future__ import annotations

import asyncio
import contextlib
import os
import queue
import time
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from typing import Any

import numpy as np
import pytest
import tritonclient.grpc as grpcclient
import tritonclient.grpc.aio as grpcaio
import tritonclient.http as httpclient
import tritonclient.http.aio as httpaio
import tritonclient.utils.shared_memory as shm
from legacy_clients import StreamClient, Tensors, end_to_end, ids_of, infer_inputs, inflight, stop_tensors
from triton_servers import RunningTriton
from tritonclient.utils import InferenceServerException

PROMPT = [17, 42, 99, 5, 200, 8]
TEXT = "the quick brown fox 🦊 今日は"
ONCE = "tensorrt_llm_once"
LONG = 7000
Tokens = Callable[..., list[list[int]]]
Text = Callable[[Sequence[int]], str]


@contextlib.contextmanager
def opened(server: RunningTriton, module: Any) -> Iterator[Any]:
    client = module.InferenceServerClient(server.http if module is httpclient else server.grpc)
    try:
        yield client
    finally:
        client.close()


@pytest.mark.parametrize("module", [httpclient, grpcclient])
def test_one_answer_a_call(server: RunningTriton, module: Any, drafted: Tokens, text_of_ids: Text) -> None:
    """A model that is not decoupled takes infer; the request's id comes back."""
    (wanted,) = drafted(PROMPT, 16, ignore_eos=True)
    with opened(server, module) as client:
        result = client.infer(ONCE, infer_inputs(inflight(PROMPT), module), request_id="7", model_version="1")
        assert result.as_numpy("output_ids").tolist() == [[PROMPT + wanted]]
        assert result.as_numpy("sequence_length").tolist() == [[len(PROMPT) + 16]]
        response = result.get_response()
        assert (response["id"] if module is httpclient else response.id) == "7"
        tensors = inflight(PROMPT, 4, beam_width=2, return_log_probs=True)
        result = client.infer(ONCE, infer_inputs(tensors, module))
        assert result.as_numpy("output_ids").shape == (1, 2, 10)
        assert result.as_numpy("output_log_probs").shape == (1, 2, 4)
        text = client.infer("ensemble_once", infer_inputs(end_to_end(TEXT, 30), module))
        assert text.as_numpy("text_output")[0].decode() == TEXT + text_of_ids(drafted(TEXT, 30)[0])


def test_many_calls_of_one_client(server: RunningTriton, drafted: Tokens) -> None:
    """async_infer: futures of HTTP, callbacks of gRPC."""
    prompts = [[3 + i, 9] for i in range(8)]
    wanted = [prompt + drafted(prompt, 6, ignore_eos=True)[0] for prompt in prompts]
    client = httpclient.InferenceServerClient(server.http, concurrency=8)
    futures = [client.async_infer(ONCE, infer_inputs(inflight(one, 6), httpclient)) for one in prompts]
    assert [one.get_result().as_numpy("output_ids")[0, 0].tolist() for one in futures] == wanted
    client.close()
    with opened(server, grpcclient) as client:
        done: queue.Queue[Any] = queue.Queue()
        for prompt in prompts:
            inputs = infer_inputs(inflight(prompt, 6))
            client.async_infer(ONCE, inputs, callback=lambda result, error: done.put((result, error)))
        results = [done.get(timeout=20) for _ in prompts]
        assert [error for _, error in results] == [None] * len(prompts)
        assert sorted(one.as_numpy("output_ids")[0, 0].tolist() for one, _ in results) == sorted(wanted)


def test_asyncio_over_http(server: RunningTriton, drafted: Tokens) -> None:
    async def ask() -> list[list[int]]:
        async with httpaio.InferenceServerClient(server.http) as client:
            assert await client.is_server_ready() and await client.is_model_ready(ONCE)
            calls = [client.infer(ONCE, infer_inputs(inflight([5 + i], 8), httpaio)) for i in range(12)]
            results = await asyncio.gather(*calls)
        return [result.as_numpy("output_ids")[0, 0].tolist() for result in results]

    assert asyncio.run(ask()) == [[5 + i, *drafted([5 + i], 8, ignore_eos=True)[0]] for i in range(12)]


def test_asyncio_over_grpc(server: RunningTriton, expected: Tokens, drafted: Tokens) -> None:
    """Unary calls, and a stream of requests whose answers tell their ids."""
    count = 12

    async def requests() -> AsyncIterator[dict[str, Any]]:
        for i in range(count):
            tensors = inflight([5 + i, 7], 30, streaming=True)
            yield {"model_name": "tensorrt_llm", "inputs": infer_inputs(tensors), "request_id": f"a{i}"}

    async def ask() -> tuple[list[Any], dict[str, list[Tensors]]]:
        async with grpcaio.InferenceServerClient(server.grpc) as client:
            calls = [client.infer(ONCE, infer_inputs(inflight([5 + i], 8))) for i in range(count)]
            unary = [one.as_numpy("output_ids")[0, 0].tolist() for one in await asyncio.gather(*calls)]
            answers: dict[str, list[Tensors]] = {f"a{i}": [] for i in range(count)}
            async for result, error in client.stream_infer(requests()):
                assert error is None, error
                response = result.get_response()
                outputs = {output.name: result.as_numpy(output.name) for output in response.outputs}
                answers[response.id].append(outputs)
            return unary, answers

    unary, answers = asyncio.run(ask())
    assert unary == [[5 + i, *drafted([5 + i], 8, ignore_eos=True)[0]] for i in range(count)]
    for i in range(count):
        assert [ids_of(answers[f"a{i}"])] == expected([5 + i, 7], 30, ignore_eos=True)


@contextlib.contextmanager
def region(client: Any, name: str, size: int) -> Iterator[Any]:
    """Make shared memory and tell the server of it."""
    key = f"/plansmith-test-{os.getpid()}-{name}"
    handle = shm.create_shared_memory_region(name, key, size)
    try:
        client.register_system_shared_memory(name, key, size)
        yield handle
        client.unregister_system_shared_memory(name)
    finally:
        shm.destroy_shared_memory_region(handle)


@pytest.mark.parametrize("module", [httpclient, grpcclient])
def test_shared_memory_in_and_out(server: RunningTriton, module: Any, drafted: Tokens) -> None:
    with (
        opened(server, module) as client,
        region(client, "in", 64) as source,
        region(client, "out", 256) as sink,
    ):
        ids = np.array([PROMPT], np.int32)
        shm.set_shared_memory_region(source, [ids])
        inputs = infer_inputs({k: v for k, v in inflight(PROMPT, 10).items() if k != "input_ids"}, module)
        given = module.InferInput("input_ids", [1, len(PROMPT)], "INT32")
        given.set_shared_memory("in", ids.nbytes)
        wanted = module.InferRequestedOutput("output_ids")
        wanted.set_shared_memory("out", 256)
        length = module.InferRequestedOutput("sequence_length")
        result = client.infer(ONCE, [*inputs, given], outputs=[wanted, length])
        (count,) = result.as_numpy("sequence_length")[0]
        got = shm.get_contents_as_numpy(sink, np.int32, [1, 1, int(count)])
        assert got.tolist() == [[PROMPT + drafted(PROMPT, 10, ignore_eos=True)[0]]]
        small = module.InferRequestedOutput("output_ids")
        small.set_shared_memory("out", 8)  # too small for the answer
        with pytest.raises(InferenceServerException):
            client.infer(ONCE, [*inputs, given], outputs=[small, length])
        beyond = module.InferInput("input_ids", [1, len(PROMPT)], "INT32")
        with pytest.raises(InferenceServerException):
            beyond.set_shared_memory("in", ids.nbytes, offset=60)
            client.infer(ONCE, [*inputs, beyond])
        assert client.infer(ONCE, infer_inputs(inflight(PROMPT), module)) is not None


def test_shared_memory_with_a_stream(server: RunningTriton, expected: Tokens) -> None:
    """A prompt from shared memory; the answers of a decoupled model come by the stream."""
    with opened(server, grpcclient) as client, region(client, "prompt", 64) as source:
        ids = np.array([PROMPT], np.int32)
        shm.set_shared_memory_region(source, [ids])
        with StreamClient(server.grpc) as stream:
            tensors = inflight(PROMPT, 20, streaming=True)
            given = grpcclient.InferInput("input_ids", [1, len(PROMPT)], "INT32")
            given.set_shared_memory("prompt", ids.nbytes)
            del tensors["input_ids"]
            stream.send_inputs([*infer_inputs(tensors), given], "shm")
            shm_ids = ids_of(stream.rest())
    assert [shm_ids] == expected(PROMPT, 20, ignore_eos=True)


@pytest.mark.parametrize("module", [httpclient, grpcclient])
def test_what_a_client_asks_of_the_server(server: RunningTriton, module: Any) -> None:
    with opened(server, module) as client:
        assert client.is_server_live() and client.is_server_ready()
        for model in ("tensorrt_llm", "ensemble", "tensorrt_llm_bls", ONCE):
            assert client.is_model_ready(model, "1") and not client.is_model_ready(model, "2")
        metadata = client.get_model_metadata("tensorrt_llm")
        config = client.get_model_config("tensorrt_llm")
        if module is grpcclient:
            names = {tensor.name for tensor in metadata.inputs}
            is_decoupled = config.config.model_transaction_policy.decoupled
        else:
            names = {tensor["name"] for tensor in metadata["inputs"]}
            is_decoupled = config["model_transaction_policy"]["decoupled"]
        assert is_decoupled and {"input_ids", "input_lengths", "request_output_len", "stop"} <= names
        with pytest.raises(InferenceServerException, match="decoupled"):
            client.infer("tensorrt_llm", infer_inputs(inflight(PROMPT), module))
        with pytest.raises(InferenceServerException, match="streaming"):
            client.infer(ONCE, infer_inputs(inflight(PROMPT, streaming=True), module))
        with pytest.raises(InferenceServerException, match="rows"):
            rows = {name: np.repeat(array, 2, axis=0) for name, array in inflight(PROMPT).items()}
            client.infer(ONCE, infer_inputs(rows, module))


def test_a_stop_without_streams(server: RunningTriton) -> None:
    """--stop-after-ms of a model that is not decoupled: two calls of one id, and answers of both."""
    with opened(server, grpcclient) as client:
        done: queue.Queue[Any] = queue.Queue()
        inputs = infer_inputs(inflight(PROMPT, LONG))
        client.async_infer(
            ONCE, inputs, request_id="u", callback=lambda result, error: done.put((result, error))
        )
        time.sleep(0.15)
        assert client.infer(ONCE, infer_inputs(stop_tensors()), request_id="u").as_numpy("output_ids") is None
        result, error = done.get(timeout=20)
        assert error is None and len(PROMPT) <= result.as_numpy("sequence_length").item() < LONG
