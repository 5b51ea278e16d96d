"""What the clients that came with TensorRT-LLM's Triton backend put on the wire, and how they take answers."""

from __future__ import annotations

import json
import queue
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import tritonclient.grpc as grpcclient
from numpy.typing import NDArray

Tensors = dict[str, NDArray[Any]]

_TYPES = {
    "int32": "INT32",
    "int64": "INT64",
    "uint64": "UINT64",
    "bool": "BOOL",
    "float16": "FP16",
    "float32": "FP32",
    "object": "BYTES",
}
TEXT_PARAMS = {  # of the end-to-end client, when nothing is said on its command line
    "beam_width": 1,
    "temperature": 1.0,
    "stream": False,
    "exclude_input_in_output": False,
}


def triton_type(array: NDArray[Any]) -> str:
    """Return Triton's name of an array's type."""
    return _TYPES[array.dtype.name]


def one(value: Any, rows: int = 1) -> NDArray[Any]:
    """Return a value as those clients shape it: rank 2, [1, 1], the same for each row."""
    kind = {bool: np.bool_, int: np.int32, float: np.float32, str: object}[type(value)]
    return np.array([[value.encode() if isinstance(value, str) else value]] * rows, kind)


def inflight(prompt: Sequence[int], tokens: int = 16, **others: Any) -> Tensors:
    """Return the tensors of inflight_batcher_llm_client with its defaults; `others` are added or replace them."""
    made: Tensors = {
        "input_ids": np.array([prompt], np.int32),
        "input_lengths": one(len(prompt)),
        "request_output_len": one(tokens),
        "beam_width": one(1),
        "temperature": one(1.0),
        "runtime_top_k": one(1),
        "runtime_top_p": one(0.0),
        "streaming": one(False),
        "end_id": one(-1),
        "pad_id": one(50256),
    }
    return made | _arrays(others)


def stop_tensors() -> Tensors:
    """Return the second request that ends the one of its id."""
    return {
        "input_ids": np.empty([1, 1], np.int32),
        "input_lengths": np.zeros([1, 1], np.int32),
        "request_output_len": np.zeros([1, 1], np.int32),
        "stop": np.ones([1, 1], np.bool_),
    }


def end_to_end(texts: str | Sequence[str], tokens: int = 100, **others: Any) -> Tensors:
    """Return the tensors of end_to_end_grpc_client: of a list of texts a batch. Words are one row, [1, n]."""
    texts = [texts] if isinstance(texts, str) else texts
    rows = len(texts)
    made: Tensors = {
        "text_input": np.array([[text.encode()] for text in texts], object),
        "max_tokens": one(tokens, rows),
        **{name: one(value, rows) for name, value in TEXT_PARAMS.items()},
    }
    return made | _arrays(others, rows)


def _arrays(values: Mapping[str, Any], rows: int = 1) -> Tensors:
    made: Tensors = {}
    for name, value in values.items():
        if isinstance(value, list):
            is_text = bool(value) and isinstance(value[0], str)
            items = [item.encode() if is_text else item for item in value]
            kind = object if is_text else np.int32 if all(isinstance(i, int) for i in items) else np.float32
            value = np.array([items] * rows, kind)
        made[name] = value if isinstance(value, np.ndarray) else one(value, rows)
    return made


def infer_inputs(tensors: Tensors, module: Any = grpcclient) -> list[Any]:
    """Return tritonclient's inputs; module : tritonclient.grpc or .http."""
    made = []
    for name, array in tensors.items():
        made.append(module.InferInput(name, list(array.shape), triton_type(array)))
        made[-1].set_data_from_numpy(array)
    return made


class StreamError(Exception):
    """A stream's answer was an error."""


class StreamClient:
    """A gRPC stream with a callback that fills a queue, as those clients have it. One request at a time.

    Ends with `close`, or with `cancel`, which takes the requests along.
    """

    def __init__(self, url: str, model: str = "tensorrt_llm") -> None:
        self._client = grpcclient.InferenceServerClient(url)
        self._model = model
        self._answers: queue.Queue[tuple[Any, Any]] = queue.Queue()
        self._client.start_stream(callback=lambda result, error: self._answers.put((result, error)))

    def __enter__(self) -> StreamClient:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def send(self, tensors: Tensors, request_id: str = "", outputs: Sequence[str] = (), **more: Any) -> None:
        """Start a request."""
        self.send_inputs(infer_inputs(tensors), request_id, outputs, **more)

    def send_inputs(
        self, inputs: Sequence[Any], request_id: str = "", outputs: Sequence[str] = (), **more: Any
    ) -> None:
        """Start a request of tritonclient's inputs."""
        wanted = [grpcclient.InferRequestedOutput(name) for name in outputs] or None
        self._client.async_stream_infer(
            self._model,
            list(inputs),
            request_id=request_id,
            outputs=wanted,
            enable_empty_final_response=True,
            **more,
        )

    def next(self, timeout: float = 60.0) -> tuple[Tensors, bool]:
        """Return an answer's outputs, and whether it is the last; StreamError for an error."""
        result, error = self._answers.get(timeout=timeout)
        if error is not None:
            raise StreamError(str(error))
        response = result.get_response()
        outputs = {tensor.name: result.as_numpy(tensor.name) for tensor in response.outputs}
        for tensor in response.outputs:
            assert outputs[tensor.name].shape == tuple(tensor.shape), tensor.name
        return outputs, response.parameters["triton_final_response"].bool_param

    def rest(self) -> list[Tensors]:
        """Return the answers up to the last; one without outputs, which says that alone, is left out."""
        answers = []
        while True:
            outputs, is_final = self.next()
            answers += [outputs] if outputs else []
            if is_final:
                return answers

    def ask(self, tensors: Tensors, request_id: str = "", outputs: Sequence[str] = ()) -> list[Tensors]:
        """Return all answers of a request."""
        self.send(tensors, request_id, outputs)
        return self.rest()

    def close(self) -> None:
        """Wait for what runs, then end the stream."""
        self._client.stop_stream()
        self._client.close()

    def cancel(self) -> None:
        """End the stream with what runs on it."""
        self._client.stop_stream(cancel_requests=True)
        self._client.close()


def ids_of(answers: Sequence[Tensors], sequence: int = 0, row: int = 0) -> list[int]:
    """Return the tokens of a sequence, cut at sequence_length, all answers together."""
    ids: list[int] = []
    for answer in answers:
        at = [int(answer[name].item()) if name in answer else 0 for name in ("batch_index", "sequence_index")]
        if at == [row, sequence]:
            ids += answer["output_ids"][0, 0, : answer["sequence_length"][0, 0]].tolist()
    return ids


def text_of(answers: Sequence[Tensors], row: int = 0, sequence: int = 0) -> str:
    """Return the text of a row's sequence, all answers together."""
    text = ""
    for answer in answers:
        at = [int(answer[name].item()) if name in answer else 0 for name in ("batch_index", "sequence_index")]
        if at == [row, sequence]:
            text += answer["text_output"][0].decode()
    return text


def post(url: str, body: Any, headers: Mapping[str, str] | None = None) -> tuple[int, Any]:
    """POST JSON, or bytes as they are; return the status and the JSON that came."""
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    request = urllib.request.Request(url, data, dict(headers or {}))
    try:
        with urllib.request.urlopen(request, timeout=60) as response:
            return response.status, json.loads(response.read() or b"null")
    except urllib.error.HTTPError as error:
        return error.code, json.loads(error.read().removeprefix(b"data:"))


def events(url: str, body: Any, headers: Mapping[str, str] | None = None) -> Iterator[dict[str, Any]]:
    """Yield the events of generate_stream."""
    request = urllib.request.Request(url, json.dumps(body).encode(), dict(headers or {}))
    with urllib.request.urlopen(request, timeout=60) as response:
        assert response.headers["Content-Type"].startswith("text/event-stream")
        for line in response:
            if line.strip():
                assert line.startswith(b"data:"), line
                yield json.loads(line[5:])


def wait_until(condition: Any, timeout: float = 20.0) -> None:
    """Wait for something to become true."""
    deadline = time.monotonic() + timeout
    while not condition():
        assert time.monotonic() < deadline, "it does not come"
        time.sleep(0.01)
