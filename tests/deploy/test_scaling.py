"""docs/scaling.md: what it says of replicas behind a gRPC client, and of a new engine in place, on real servers."""

from __future__ import annotations

import os
import queue
import re
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tritonclient.grpc as triton
from plansmith.serving.supervisor.api import TritonError, counter_sum
from tiny_engines import build_tiny
from tiny_triton import make_repository
from triton_servers import RunningTriton, TritonServers, find_install, server_environ
from tritonclient.utils import np_to_triton_dtype

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "scaling.md"
NUM_TOKENS = 100


def _tensor(name: str, values: Any, dtype: Any) -> triton.InferInput:
    array = np.array(values, dtype)
    made = triton.InferInput(name, array.shape, np_to_triton_dtype(array.dtype))
    made.set_data_from_numpy(array)
    return made


class _Stream:
    """A stream of a client, and its answers."""

    def __init__(self, client: triton.InferenceServerClient) -> None:
        self._client = client
        self._answers: queue.Queue[Any] = queue.Queue()
        client.start_stream(lambda result, error: self._answers.put((result, error)))

    def send(self, model: str, inputs: list[triton.InferInput]) -> None:
        self._client.async_stream_infer(model, inputs, enable_empty_final_response=True)

    def next(self) -> tuple[Any, bool]:
        """Return an answer and whether it is a request's last."""
        result, error = self._answers.get(timeout=60)
        assert error is None, error
        return result, bool(result.get_response().parameters["triton_final_response"].bool_param)

    def end(self) -> None:
        self._client.stop_stream()


@pytest.fixture
def servers(tmp_path: Path) -> Iterator[TritonServers]:
    """Return what starts servers; they are ended with the test."""
    made = TritonServers(tmp_path / "servers")
    yield made
    made.stop_all()


def _num_requests(server: RunningTriton) -> int:
    return int(counter_sum(server.api.metrics(5.0), "nv_inference_request_success", {"model": "counter"}))


def test_streams_take_turns_and_requests_of_a_stream_stay_together(
    servers: TritonServers, tmp_path: Path
) -> None:
    arguments = re.search(r"channel_args=(\[.*?\])", PAGE.read_text())
    assert arguments is not None
    repository = make_repository(tmp_path / "models")
    replicas = [servers(repository, ["counter"], fresh=True) for _ in range(2)]
    url = "ipv4:" + ",".join(one.grpc for one in replicas)  # what a headless service resolves to
    inputs = [_tensor("COUNT", [1], np.int32)]

    def ask(client: triton.InferenceServerClient, num_requests: int) -> None:
        stream = _Stream(client)
        for _ in range(num_requests):
            stream.send("counter", inputs)
            while not stream.next()[1]:
                pass
        stream.end()

    with triton.InferenceServerClient(url, channel_args=eval(arguments[1])) as client:
        ask(client, 8)
        assert sorted(map(_num_requests, replicas)) == [0, 8]
        for _ in range(12):
            ask(client, 1)
    assert min(map(_num_requests, replicas)) >= 4, "one replica gets everything"


@pytest.fixture
def engines(tiny_checkpoint: Callable[[str], Path], tmp_path: Path) -> list[Path]:
    """Return two engines of the same model, in the order of their release."""
    releases = {"old": "fp32", "new": "int8"}
    return [build_tiny(tiny_checkpoint("llama"), tmp_path / name, kind) for name, kind in releases.items()]


def test_a_new_engine_takes_over_and_no_request_is_cut(
    servers: TritonServers, engines: list[Path], environ: dict[str, str], tmp_path: Path
) -> None:
    find_install()
    old, new = engines
    words = ["plansmith", "triton-repo", str(old), "-o", "repo", "--set", "num_threads=1"]
    subprocess.run(words, env=environ, cwd=tmp_path, check=True, capture_output=True, timeout=60)
    server = servers(tmp_path / "repo", environ=server_environ())
    (commands,) = re.findall(r"^```sh\n(.*?)^```$", PAGE.read_text(), re.M | re.S)
    write, load = commands.replace("127.0.0.1:8000", server.http).split("\n", 1)

    def start(text: str) -> subprocess.Popen[str]:
        return subprocess.Popen(
            ["bash", "-euo", "pipefail", "-c", text],
            env={**environ, "NEW_ENGINE": str(new)},
            cwd=tmp_path,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )

    written = start(write)
    assert written.wait(60) == 0, written.communicate()
    prompt = [
        _tensor("input_ids", [[5, 6, 7]], np.int32),
        _tensor("input_lengths", [[3]], np.int32),
        _tensor("request_output_len", [[NUM_TOKENS]], np.int32),
        _tensor("end_id", [[-1]], np.int32),
        _tensor("streaming", [[True]], bool),
    ]
    with triton.InferenceServerClient(server.grpc) as client:
        stream = _Stream(client)
        for _ in range(4):
            stream.send("tensorrt_llm", prompt)
        tokens, num_open, num_ended, loading = 0, 4, 0, None
        while num_open:  # the next one begins where one ends, until the new engine is there
            result, is_last = stream.next()
            loading = loading or start(load)
            ids = result.as_numpy("output_ids")
            tokens += 0 if ids is None else ids.size
            num_ended += is_last
            if is_last and loading.poll() is None:
                stream.send("tensorrt_llm", prompt)
            elif is_last:
                num_open -= 1
        stream.end()
    assert loading is not None and loading.wait(60) == 0, server.log()
    assert tokens == num_ended * NUM_TOKENS and num_ended > 4
    config = server.api.config("tensorrt_llm", 5.0)
    assert config["parameters"]["gpt_model_path"]["string_value"] == os.fspath(new)
    path = tmp_path / "repo" / "tensorrt_llm" / "config.pbtxt"
    path.write_text(path.read_text().replace(str(new), str(tmp_path / "none")))
    with pytest.raises(TritonError, match="none"):
        server.api.load("tensorrt_llm", 30.0)
    answer = server.api.generate("ensemble", {"text_input": "the quick", "max_tokens": 4}, 30.0)
    assert "text_output" in answer, "the engine before the one that does not load serves on"
