"""What becomes of the engine's side of a text request when the client's side breaks."""

from __future__ import annotations

import threading
import time
from collections.abc import Collection, Iterator, Mapping
from typing import Any

import numpy as np
import pytest
from plansmith.runtime.errors import InternalError
from plansmith.runtime.tokenizer import Tokenizer
from plansmith.serving.triton.bls_inputs import TEXT_INPUTS, BlsInputs
from plansmith.serving.triton.bls_request import BlsParts, BlsRequest
from plansmith.serving.triton.bls_speculation import speculate
from plansmith.serving.triton.delta_text import stream_maker
from plansmith.serving.triton.text_encoder import TextEncoder
from toy_tokenizers import MAKERS
from triton_rows import RecordingReply

TOKENIZER = Tokenizer(MAKERS["byte_level"](), config={"eos_token": "</s>"})
NAMES = frozenset({"output_ids", "sequence_length", "finish_reasons"})


class Engine:
    """Answers with one token at a time until it is stopped, as the engine's model of a server would."""

    def __init__(self, most: int = 1000, error: Exception | None = None) -> None:
        self.stopped = threading.Event()
        self.num_calls = self.num_read = 0
        self._most, self._error = most, error

    def call(
        self, _tensors: Mapping[str, Any], _names: Collection[str], _request_id: str, _parameters: Any
    ) -> Iterator[dict[str, Any]]:
        self.num_calls += 1
        if self._error is not None:
            raise self._error
        for i in range(self._most):
            is_final = self.stopped.is_set() or i == self._most - 1
            self.num_read += 1
            yield {
                "output_ids": np.array([[[40 + i % 50]]], np.int32),
                "sequence_length": np.array([[1]], np.int32),
                "is_final": np.array([[is_final]]),
                "finish_reasons": np.array([[3 if is_final else 0]], np.int32),
            }
            if is_final:
                self.is_read_to_the_end = True
                return

    def stop(self, _request_id: str) -> None:
        self.stopped.set()

    is_read_to_the_end = False


class Broken(RecordingReply):
    """The server goes while the second answer is sent."""

    def send(self, outputs: dict[str, Any], final: bool) -> None:
        if self.answers:
            raise ConnectionError("the server is gone")
        super().send(outputs, final)


def run(engine: Engine, reply: RecordingReply) -> list[BlsRequest]:
    """Run a streamed request and return what was told of its end."""
    encoder = TextEncoder(TOKENIZER, names=TEXT_INPUTS)
    parts = BlsParts(inputs=BlsInputs(encoder), make_stream=stream_maker(TOKENIZER), target=engine)
    tensors = {
        "text_input": np.array([[b"the dog"]], object),
        "max_tokens": np.array([[1000]], np.int32),
        "stream": np.array([[True]]),
    }
    ended: list[BlsRequest] = []
    BlsRequest(parts, reply, tensors, {}, on_end=ended.append).run()
    return ended


def test_a_reply_that_fails_ends_the_engines_request_and_reads_it_to_its_end() -> None:
    engine, reply = Engine(), Broken("a", ["text_output"])
    assert len(run(engine, reply)) == 1
    with pytest.raises(ConnectionError):
        reply.wait()
    assert engine.stopped.is_set() and engine.is_read_to_the_end and engine.num_read < 10


def test_an_error_of_the_engine_stops_nothing_else() -> None:
    """The id may be that of another request."""
    engine, reply = Engine(error=InternalError("no")), RecordingReply("a", ["text_output"])
    assert len(run(engine, reply)) == 1
    with pytest.raises(InternalError):
        reply.wait()
    assert not engine.stopped.is_set()


def test_rows_of_a_drafted_batch_end_when_nobody_wants_more() -> None:
    target = Engine(most=1)
    inputs = {
        "input_ids": np.ones((2, 4), np.int32),
        "input_lengths": np.full((2, 1), 4, np.int32),
        "request_output_len": np.full((2, 1), 10**6, np.int32),
        "streaming": np.ones((2, 1), np.bool_),
    }
    answers = speculate(
        target,
        Engine(most=1),
        inputs,
        NAMES,
        num_draft_tokens=1,
        use_draft_logits=False,
        request_id="a",
        parameters={},
        is_cancelled=lambda: False,
    )
    next(answers)
    answers.close()  # type: ignore[attr-defined]
    deadline = time.monotonic() + 10
    while any(thread.name.startswith("plansmith-draft") for thread in threading.enumerate()):
        assert time.monotonic() < deadline
        time.sleep(0.01)
