"""Clients of the serving benchmarks: plain gRPC and HTTP, so that the server is measured and no client library.

Each opens one stream a request, as clients do that may want to cancel it, and notes when each answer came.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from typing import Any

import aiohttp
import grpc
import numpy as np
from tritonclient.grpc import service_pb2, service_pb2_grpc

_TYPES: Mapping[str, type[np.generic]] = {
    "INT32": np.int32,
    "INT64": np.int64,
    "UINT64": np.uint64,
    "FP32": np.float32,
    "BOOL": np.bool_,
}
_NAMES = {dtype: name for name, dtype in _TYPES.items()}


@dataclasses.dataclass
class Outcome:
    """One request as its client saw it; times are seconds of time.perf_counter.

    engine_ttft_s : what the engine itself took to the first token, where the server tells
    error : the server's text, None = none
    """

    begin_s: float
    first_s: float | None = None
    end_s: float = 0.0
    num_answers: int = 0
    token_ids: list[int] = dataclasses.field(default_factory=list)
    text: str = ""
    engine_ttft_s: float | None = None
    error: str | None = None
    finished: bool = False

    @property
    def ttft_s(self) -> float:
        """From the request to its first token."""
        assert self.first_s is not None
        return self.first_s - self.begin_s

    def take_tokens(self, response: Any) -> None:
        """Take the new tokens of an answer of the engine's model, if it has any."""
        ids, lengths = output(response, "output_ids"), output(response, "sequence_length")
        if ids is not None and ids.size:  # type: ignore[union-attr]
            self.note()
            self.token_ids += ids[0, 0, : int(lengths[0, 0])].tolist()  # type: ignore[call-overload,index]

    def note(self) -> None:
        """Note an answer that brought something."""
        now = time.perf_counter()
        self.num_answers += 1
        self.first_s = self.first_s or now
        self.end_s = now


def infer_request(
    model: str,
    tensors: Mapping[str, np.ndarray[Any, Any] | Sequence[bytes]],
    request_id: str = "",
    outputs: Sequence[str] = (),
) -> Any:
    """Return a ModelInferRequest; a list of bytes becomes a BYTES tensor [1, n]."""
    request = service_pb2.ModelInferRequest(model_name=model, id=request_id)
    for name, value in tensors.items():
        if isinstance(value, np.ndarray):
            request.inputs.add(name=name, datatype=_NAMES[value.dtype.type], shape=value.shape)
            request.raw_input_contents.append(value.tobytes())
        else:
            request.inputs.add(name=name, datatype="BYTES", shape=(1, len(value)))
            parts = [len(item).to_bytes(4, "little") + item for item in value]
            request.raw_input_contents.append(b"".join(parts))
    for name in outputs:
        request.outputs.add(name=name)
    return request


def output(response: Any, name: str) -> np.ndarray[Any, Any] | list[bytes] | None:
    """Return a tensor of a ModelInferResponse, BYTES as a list; None = it is not there."""
    for tensor, raw in zip(response.outputs, response.raw_output_contents, strict=True):
        if tensor.name != name:
            continue
        if tensor.datatype != "BYTES":
            return np.frombuffer(raw, _TYPES[tensor.datatype]).reshape(tuple(tensor.shape))
        texts, at = [], 0
        while at < len(raw):
            size = int.from_bytes(raw[at : at + 4], "little")
            texts.append(raw[at + 4 : at + 4 + size])
            at += 4 + size
        return texts
    return None


def token_tensors(prompt_ids: Sequence[int], output_len: int) -> dict[str, np.ndarray[Any, Any]]:
    """Return the inputs of `tensorrt_llm` for a stream, greedy, of exactly `output_len` tokens."""
    return {
        "input_ids": np.asarray([prompt_ids], np.int32),
        "input_lengths": np.asarray([[len(prompt_ids)]], np.int32),
        "request_output_len": np.asarray([[output_len]], np.int32),
        "end_id": np.asarray([[-1]], np.int32),
        "runtime_top_k": np.asarray([[1]], np.int32),
        "streaming": np.asarray([[True]], np.bool_),
    }


class TritonClient:
    """One gRPC channel to a tritonserver."""

    def __init__(self, address: str) -> None:
        self._channel = grpc.aio.insecure_channel(
            address, options=[("grpc.max_receive_message_length", 1 << 30)]
        )
        self._stub = service_pb2_grpc.GRPCInferenceServiceStub(self._channel)

    async def close(self) -> None:
        """Close the channel."""
        await self._channel.close()

    async def answers(self, request: Any) -> AsyncIterator[Any]:
        """Yield the stream's messages up to the final one; leaving early cancels the stream."""
        call = self._stub.ModelStreamInfer()
        request.parameters["triton_enable_empty_final_response"].bool_param = True
        try:
            await call.write(request)
            await call.done_writing()
            while (message := await call.read()) is not grpc.aio.EOF:
                yield message
                final = message.infer_response.parameters.get("triton_final_response")
                if message.error_message or (final is not None and final.bool_param):
                    return
        finally:
            call.cancel()

    async def send(self, request: Any) -> list[Any]:
        """Return all messages of a request."""
        return [message async for message in self.answers(request)]

    async def tokens(
        self, prompt_ids: Sequence[int], output_len: int, request_id: str = "", **tensors: Any
    ) -> Outcome:
        """Run a request of the engine's model and return its outcome; greedy, of exactly `output_len` tokens."""
        outcome = Outcome(time.perf_counter())
        metrics = {"return_perf_metrics": np.asarray([[True]], np.bool_)}
        inputs = {**token_tensors(prompt_ids, output_len), **metrics, **tensors}
        async for message in self.answers(infer_request("tensorrt_llm", inputs, request_id)):
            if message.error_message:
                outcome.error = message.error_message
                continue
            outcome.take_tokens(message.infer_response)
            _note_engine_time(message.infer_response, outcome)
            outcome.finished = True
        return outcome

    async def text(
        self, model: str, prompt: str, output_len: int, request_id: str = "", **tensors: Any
    ) -> Outcome:
        """Run a request of `ensemble` or `tensorrt_llm_bls` and return its outcome; greedy, of `output_len` tokens."""
        outcome = Outcome(time.perf_counter())
        inputs = {
            "text_input": [prompt.encode()],
            "max_tokens": np.asarray([[output_len]], np.int32),
            "end_id": np.asarray([[-1]], np.int32),
            "top_k": np.asarray([[1]], np.int32),
            "stream": np.asarray([[True]], np.bool_),
            **tensors,
        }
        async for message in self.answers(infer_request(model, inputs, request_id)):
            if message.error_message:
                outcome.error = message.error_message
                continue
            texts = output(message.infer_response, "text_output")
            if texts is not None:
                outcome.note()
                outcome.text += texts[0].decode()
            outcome.finished = True
        return outcome


def _note_engine_time(response: Any, outcome: Outcome) -> None:
    first, arrival = output(response, "first_token_time_ns"), output(response, "arrival_time_ns")
    if first is not None and arrival is not None and first.size and int(first.flat[0]):  # type: ignore[union-attr]
        outcome.engine_ttft_s = (int(first.flat[0]) - int(arrival.flat[0])) / 1e9  # type: ignore[union-attr]


class OpenAiClient:
    """A plain HTTP client of /v1/completions, which reads server-sent events."""

    def __init__(self, url: str) -> None:
        self.url = url.rstrip("/")
        self.session = aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0))

    async def close(self) -> None:
        """Close all connections."""
        await self.session.close()

    async def completion(self, prompt: Sequence[int] | str, output_len: int, **fields: Any) -> Outcome:
        """Stream a completion, greedy, of exactly `output_len` tokens."""
        outcome = Outcome(time.perf_counter())
        body = {
            "model": "default",
            "prompt": prompt,
            "max_tokens": output_len,
            "temperature": 0,
            "ignore_eos": True,
            "stream": True,
            **fields,
        }
        async for event in self.events("/v1/completions", body, outcome):
            if event["choices"]:
                outcome.note()
                outcome.text += event["choices"][0]["text"]
        return outcome

    async def events(self, path: str, body: Mapping[str, Any], outcome: Outcome) -> AsyncIterator[Any]:
        """Yield the events of a stream; errors and the end are noted in `outcome`. Closing it early disconnects."""
        async with self.session.post(self.url + path, json=body) as response:
            if response.status != 200:
                outcome.error = f"{response.status} {await response.text()}"
                return
            async for line in response.content:
                if not line.startswith(b"data:"):
                    continue
                if line.strip() == b"data: [DONE]":
                    outcome.finished = True
                    return
                event = json.loads(line[5:])
                if "error" in event:
                    outcome.error = str(event["error"])
                    return
                yield event


@contextlib.asynccontextmanager
async def closing(client: Any) -> AsyncIterator[Any]:
    """Close a client at the end of the block."""
    try:
        yield client
    finally:
        await client.close()
