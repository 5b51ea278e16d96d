"""The calls of inflight_batcher_llm_client: token ids in and out over a gRPC stream, with each of its options."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import Any

import lora_requests
import numpy as np
import pytest
from legacy_clients import StreamClient, StreamError, ids_of, inflight, one, stop_tensors
from plansmith.runtime.engine import Engine
from triton_rows import PERF_METRICS
from triton_servers import RunningTriton

PROMPT = [17, 42, 99, 5, 200, 8]
VOCAB = 320
LONG = 7000  # tokens: a second of this engine, so that a stop comes in the middle
Tokens = Callable[..., list[list[int]]]


@pytest.fixture
def client(server: RunningTriton) -> Iterator[StreamClient]:
    with StreamClient(server.grpc) as made:
        yield made


def check_output(answer: dict[str, Any], wanted: list[list[int]]) -> None:
    """Compare output_ids [1, beams, n] and sequence_length [1, beams]."""
    longest = max(map(len, wanted))
    assert answer["output_ids"].shape == (1, len(wanted), longest)
    assert answer["output_ids"].dtype == answer["sequence_length"].dtype == np.int32
    assert answer["sequence_length"].tolist() == [[len(ids) for ids in wanted]]
    for beam, ids in zip(answer["output_ids"][0], wanted, strict=True):
        assert beam[: len(ids)].tolist() == ids


def test_its_defaults(client: StreamClient, expected: Tokens) -> None:
    (answer,) = client.ask(inflight(PROMPT), "1")
    check_output(answer, [PROMPT + expected(PROMPT, 16, ignore_eos=True)[0]])
    assert not {"cum_log_probs", "context_logits", "batch_index", "sequence_index"} & set(answer)


def test_streaming_brings_new_tokens_alone(client: StreamClient, expected: Tokens) -> None:
    answers = client.ask(inflight(PROMPT, 400, streaming=True), "1", ["output_ids", "sequence_length"])
    assert len(answers) > 1
    for answer in answers:
        assert set(answer) == {"output_ids", "sequence_length"}
        assert answer["output_ids"].shape == (1, 1, answer["sequence_length"][0, 0])
    assert [ids_of(answers)] == expected(PROMPT, 400, ignore_eos=True)


@pytest.mark.parametrize("streaming", [False, True])
def test_several_sequences(client: StreamClient, expected: Tokens, streaming: bool) -> None:
    asked = inflight(PROMPT, 8, num_return_sequences=3, streaming=streaming, runtime_top_k=50)
    answers = client.ask(asked | {"exclude_input_in_output": one(True)})
    wanted = expected(PROMPT, 8, n=3, temperature=1.0, top_k=50, seed=0, ignore_eos=True)
    assert [ids_of(answers, i) for i in range(3)] == wanted
    assert {answer["sequence_index"].shape for answer in answers} == {(1, 1)}


def test_beams_are_one_answer(client: StreamClient, expected: Tokens) -> None:
    asked = inflight(PROMPT, 8, beam_width=4, return_log_probs=True, len_penalty=0.0)
    (answer,) = client.ask(asked)
    wanted = expected(PROMPT, 8, beam_width=4, length_penalty=0.0, early_stopping=True, ignore_eos=True)
    check_output(answer, [PROMPT + ids for ids in wanted])
    assert answer["cum_log_probs"].shape == (1, 4) and np.all(np.diff(answer["cum_log_probs"][0]) <= 0)
    assert answer["output_log_probs"].shape == (1, 4, 8)


def test_all_that_can_be_returned(client: StreamClient) -> None:
    names = ["log_probs", "context_logits", "generation_logits", "perf_metrics"]
    flags: dict[str, Any] = {f"return_{name}": True for name in names}
    (answer,) = client.ask(inflight(PROMPT, 5, **flags))
    assert answer["cum_log_probs"].shape == (1, 1) and answer["output_log_probs"].shape == (1, 1, 5)
    assert answer["context_logits"].shape == (1, len(PROMPT), VOCAB)
    assert answer["generation_logits"].shape == (1, 1, 5, VOCAB)
    assert answer["generation_logits"].argmax(-1).tolist() == [[answer["output_ids"][0, 0, -5:].tolist()]]
    assert {answer[name].shape for name in PERF_METRICS} == {(1, 1)}
    times = [answer[f"{name}_time_ns"].item() for name in ("arrival", "first_scheduled", "first_token")]
    assert sorted(times) == times and times[-1] <= answer["last_token_time_ns"].item()
    wanted = ["output_ids", "sequence_length", "arrival_time_ns", "generation_logits"]
    answers = client.ask(inflight(PROMPT, 5, streaming=True, **flags), "", wanted)
    assert all({"output_ids", "sequence_length", "generation_logits"} <= set(each) for each in answers)
    assert sum(each["generation_logits"].shape[2] for each in answers) == 5
    assert "arrival_time_ns" in answers[-1]


def test_an_output_that_does_not_exist_is_refused(server: RunningTriton, client: StreamClient) -> None:
    with StreamClient(server.grpc) as other, pytest.raises(StreamError, match="nonsense"):
        other.ask(inflight(PROMPT), "", ["output_ids", "nonsense"])
    assert client.ask(inflight(PROMPT))


def test_a_stop_request_on_the_same_stream(client: StreamClient, expected: Tokens) -> None:
    """--stop-after-ms: fewer tokens, then the end of both requests, each once."""
    client.send(inflight(PROMPT, LONG, streaming=True), "12345")
    answers = [client.next()[0]]
    time.sleep(0.05)
    client.send(stop_tensors(), "12345", ["output_ids"])
    num_ends = 0
    while num_ends < 2:
        outputs, is_final = client.next()
        answers += [outputs] if outputs else []
        num_ends += is_final
    ids = ids_of(answers)
    assert 0 < len(ids) < LONG and [ids] == expected(PROMPT, len(ids), ignore_eos=True)
    assert client.ask(inflight(PROMPT), "12345")  # the id is free again


def test_a_stop_of_a_request_that_does_not_stream(server: RunningTriton, client: StreamClient) -> None:
    client.send(inflight(PROMPT, LONG), "whole")
    time.sleep(0.1)
    with StreamClient(server.grpc) as other:
        assert other.ask(stop_tensors(), "whole") == []
    (answer,) = client.rest()
    assert len(PROMPT) <= answer["sequence_length"].item() < LONG


def test_stops_of_nobody(server: RunningTriton, client: StreamClient) -> None:
    assert client.ask(stop_tensors(), "nobody") == []
    with StreamClient(server.grpc) as other, pytest.raises(StreamError, match="no id"):
        other.ask(stop_tensors(), "")
    assert client.ask(inflight(PROMPT))


def test_a_cancelled_stream_frees_the_engine(server: RunningTriton, client: StreamClient) -> None:
    """--stop-via-request-cancel, clearly in the middle."""
    other = StreamClient(server.grpc)
    other.send(inflight(PROMPT, LONG, streaming=True), "gone")
    assert ids_of([other.next()[0]])
    other.cancel()
    deadline = time.monotonic() + 10
    while True:  # its id is taken until the engine has let go
        try:
            with StreamClient(server.grpc) as again:
                assert again.ask(inflight(PROMPT), "gone")
            return
        except StreamError:
            assert time.monotonic() < deadline
            time.sleep(0.05)


def test_adapters_by_arrays_then_by_task_id(client: StreamClient, engine: Engine, expected: Tokens) -> None:
    config, weights = lora_requests.arrays(engine, 71)
    task = {"lora_task_id": np.array([[71]], np.uint64)}
    arrays = {"lora_weights": weights[None], "lora_config": config[None]}
    first = ids_of(client.ask(inflight(PROMPT) | task | arrays))
    assert first == ids_of(client.ask(inflight(PROMPT) | task)) != ids_of(client.ask(inflight(PROMPT)))


@pytest.mark.parametrize(
    ("more", "word"),
    [
        ({"lora_task_id": np.array([[987654]], np.uint64)}, "987654"),
        ({"prompt_embedding_table": np.ones((1, 4, 64), np.float16)}, "prompt_embedding_table"),
        ({"lookahead_window_size": 4}, "lookahead"),
        ({"beam_width": 5}, "max_beam_width"),
        ({"draft_input_ids": [VOCAB]}, "draft_input_ids"),
    ],
)
def test_what_is_refused_by_name(server: RunningTriton, more: dict[str, Any], word: str) -> None:
    with StreamClient(server.grpc) as client, pytest.raises(StreamError, match=word):
        client.ask(inflight(PROMPT, 16, **more))


def test_lookahead_and_drafts_change_no_token(client: StreamClient, expected: Tokens) -> None:
    (wanted,) = expected(PROMPT, 16, ignore_eos=True)
    lookahead = {"lookahead_window_size": 4, "lookahead_ngram_size": 3, "lookahead_verification_set_size": 4}
    assert ids_of(client.ask(inflight(PROMPT, **lookahead))) == PROMPT + wanted
    asked = inflight(PROMPT, draft_input_ids=wanted[:5], return_perf_metrics=True)
    (answer,) = client.ask(asked)
    assert ids_of([answer]) == PROMPT + wanted
    assert answer["total_draft_tokens"].item() == answer["total_accepted_draft_tokens"].item() == 5
    assert answer["acceptance_rate"].item() == 1.0
    wrong = [(token + 1) % VOCAB for token in wanted[:5]]
    (answer,) = client.ask(inflight(PROMPT, draft_input_ids=wrong, return_perf_metrics=True))
    assert ids_of([answer]) == PROMPT + wanted and answer["total_accepted_draft_tokens"].item() == 0


def test_a_word_list_as_it_flattens_them(client: StreamClient, expected: Tokens) -> None:
    (wanted,) = expected(PROMPT, 16, ignore_eos=True)
    words = np.array([[[*wanted[3:5], wanted[9]], [2, 3, -1]]], np.int32)
    ids = ids_of(client.ask(inflight(PROMPT, stop_words_list=words, exclude_input_in_output=True)))
    ends = [n for n in range(1, 17) if wanted[max(n - 2, 0) : n] == wanted[3:5] or wanted[n - 1] == wanted[9]]
    assert ids == wanted[: ends[0]]
    empty = np.zeros((1, 2, 0), np.int32)
    assert (
        ids_of(client.ask(inflight(PROMPT, stop_words_list=empty, bad_words_list=empty))) == PROMPT + wanted
    )
