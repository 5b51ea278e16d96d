"""A request that has ended holds nothing: completions may have logits of a whole prompt."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from plansmith.runtime.completion import Completion
from plansmith.runtime.engine import Engine
from plansmith.runtime.errors import ShapeError
from plansmith.runtime.sampling import SamplingParams
from plansmith.serving.triton.host import EngineHost
from plansmith.serving.triton.row import Row
from plansmith.serving.triton.settings import Settings
from tiny_engines import build_tiny
from triton_rows import RecordingReply


@pytest.fixture
def host(
    tiny_checkpoint: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[EngineHost]:
    folder = build_tiny(tiny_checkpoint("llama"), tmp_path_factory.mktemp("request") / "engine")
    host = EngineHost(Engine.open(folder, num_threads=1), Settings(folder))
    yield host
    host.close()


def num_completions() -> int:
    return sum(type(one) is Completion for one in gc.get_objects())


def test_an_ended_request_is_free_without_the_garbage_collector(host: EngineHost) -> None:
    gc.collect()
    before = num_completions()
    gc.disable()
    try:
        for streaming in (False, True):
            params = {"max_tokens": 4, "temperature": 0.0, "ignore_eos": True, "detokenize": False}
            reply = RecordingReply()
            host.submit([Row(np.array([5, 9, 23], np.int32), params, streaming=streaming)], reply)
            assert len(reply.wait()) > 0
        deadline = time.monotonic() + 10
        while num_completions() > before:
            assert time.monotonic() < deadline, f"{num_completions() - before} completions are left"
            time.sleep(0.05)
    finally:
        gc.enable()


def test_answers_wait_until_those_before_them_have_been_read(host: EngineHost) -> None:
    """Of a model that calls: never two that it has not read, neither tokens of several outputs nor the end."""

    class Reader(RecordingReply):
        """Reads an answer some time after it came."""

        num_read = 0

        def is_ready(self) -> bool:
            if len(self.answers) > self.num_read and time.monotonic() - self.times[-1] > 0.02:
                self.num_read = len(self.answers)
            return len(self.answers) == self.num_read

        def send(self, outputs: dict[str, NDArray[Any]], final: bool) -> None:
            assert len(self.answers) == self.num_read, "an answer came before the last was read"
            super().send(outputs, final)

    params = {"max_tokens": 6, "temperature": 1.0, "seed": 3, "n": 3, "ignore_eos": True, "detokenize": False}
    prompt = np.array([5, 9, 23], np.int32)
    (whole,) = host._engine.generate([prompt], SamplingParams(**params))
    for streaming in (False, True):
        reply = Reader("calls")
        host.submit([Row(prompt, params, streaming=streaming, exclude_input=True)], reply)
        for i, one in enumerate(whole.outputs):
            assert reply.tokens(index=i) == list(one.token_ids)
    failing = Reader("fails")
    host.submit([Row(prompt, {**params, "max_tokens": 1 << 30})], failing)
    with pytest.raises(ShapeError):
        failing.wait()
