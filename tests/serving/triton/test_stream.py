"""A row's answers put together are its tokens, however the senders' times fall between the engine's."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st
from plansmith.runtime.completion import Completion, Delta, SequenceOutput, TokenLogprobs
from plansmith.runtime.errors import InvalidArgumentError
from plansmith.serving.triton.row import Row
from plansmith.serving.triton.stream import RowStream
from plansmith.serving.triton.write import Outputs, Writer
from triton_rows import ALL_NAMES, ALL_WANTS, PROMPT, STATS


class Wakes:
    """Collects what a stream says to its sender."""

    def __init__(self) -> None:
        self.at_once: list[bool] = []

    def __call__(self, at_once: bool) -> None:
        self.at_once.append(at_once)

    def take(self) -> list[bool]:
        """Return them and forget them."""
        taken, self.at_once = self.at_once, []
        return taken


def make_stream(wakes: Wakes, *, is_stacked: bool = False, **fields: Any) -> RowStream:
    params = {"max_tokens": 100, **fields.pop("params", {})}
    row = Row(prompt_ids=PROMPT, params=params, **fields)
    return RowStream(row, Writer(row, ALL_NAMES), wakes, is_stacked=is_stacked)


def token(i: int, index: int = 0) -> Delta:
    return Delta(
        token_ids=(i,),
        logprobs=(TokenLogprobs(i, -i / 8),),
        index=index,
        generation_logits=np.full((1, 5), i, np.float32),
    )


def end(index: int = 0, *, is_final: bool = True) -> Delta:
    outputs = tuple(SequenceOutput(i, "", (1,), "length", None, None, None, STATS) for i in range(index + 1))
    completion = Completion((1,), outputs, STATS) if is_final else None
    return Delta(finish_reason="length", stats=STATS, index=index, is_final=is_final, completion=completion)


@given(st.lists(st.booleans(), min_size=1, max_size=60), st.integers(1, 3), st.randoms(use_true_random=False))
@settings(max_examples=60, deadline=None)
def test_answers_put_together_are_the_tokens(
    takes: list[bool], num_sequences: int, rng: random.Random
) -> None:
    stream = make_stream(Wakes(), streaming=True, wants=ALL_WANTS, params={"n": num_sequences})
    given_ids: list[list[int]] = [[] for _ in range(num_sequences)]
    answers: list[Outputs] = []
    for i, take in enumerate(takes):
        index = rng.randrange(num_sequences)
        stream.on_delta(token(i, index))
        given_ids[index].append(i)
        if take:
            answers += stream.take()
    for index in range(num_sequences):
        assert not stream.is_done
        stream.on_delta(end(index, is_final=index == num_sequences - 1))
    assert stream.is_done
    answers += stream.take()
    assert stream.take() == []
    for index, wanted in enumerate(given_ids):
        own = [one for one in answers if one.get("sequence_index", np.array([[0]]))[0, 0] == index]
        ids: list[int] = []
        for one in own:
            prefix = one["prefix_ids"][0, 0]
            assert prefix[prefix >= 0].tolist() == ids[-16:]
            ids += one["output_ids"][0, 0].tolist()
            assert one["cum_log_probs"][0, 0] == -sum(ids) / 8
            assert one["output_log_probs"][0, 0].tolist() == [
                -i / 8 for i in one["output_ids"][0, 0].tolist()
            ]
            assert [row[0] for row in one["generation_logits"][0, 0]] == one["output_ids"][0, 0].tolist()
        assert ids == wanted
        assert [bool(one["is_final"].all()) for one in own] == [False] * (len(own) - 1) + [True]
        assert [bool(one["arrival_time_ns"].item()) for one in own] == [False] * (len(own) - 1) + [True]
        assert all("sequence_index" in one for one in own) == (num_sequences > 1)


def test_the_first_token_and_the_end_go_at_once_and_the_last_token_waits_for_the_end() -> None:
    wakes = Wakes()
    stream = make_stream(wakes, streaming=True, params={"max_tokens": 3})
    stream.on_delta(token(1))
    assert wakes.take() == [True]
    stream.on_delta(token(2))
    assert wakes.take() == [False]
    stream.on_delta(token(3))
    assert wakes.take() == []  # the end is in the engine's next event
    stream.on_delta(end())
    assert wakes.take() == [True]
    (answer,) = stream.take()
    assert answer["output_ids"].tolist() == [[[1, 2, 3]]] and answer["is_final"].all()


def test_what_does_not_stream_comes_once_at_the_end() -> None:
    for fields in ({"streaming": False}, {"streaming": True, "params": {"beam_width": 2}}):
        wakes = Wakes()
        stream = make_stream(wakes, **fields)
        stream.on_delta(token(1))
        assert stream.take() == [] and wakes.take() == []
        stream.on_delta(end())
        assert wakes.take() == [True]
        assert len(stream.take()) == 1


def test_several_outputs_are_stacked_where_a_request_has_one_answer() -> None:
    for is_stacked in (False, True):
        stream = make_stream(Wakes(), params={"n": 3}, is_stacked=is_stacked)
        stream.on_delta(end(2))
        answers = stream.take()
        shapes = [one["sequence_length"].shape for one in answers]
        assert shapes == ([(1, 3)] if is_stacked else [(1, 1)] * 3)


def test_the_prompts_logits_come_with_the_first_answer_alone() -> None:
    stream = make_stream(Wakes(), streaming=True, wants=ALL_WANTS)
    logits = np.ones((3, 5), np.float32)
    stream.on_delta(Delta(token_ids=(1,), context_logits=logits))
    (first,) = stream.take()
    stream.on_delta(token(2))
    (second,) = stream.take()
    assert first["context_logits"].shape == (1, 3, 5) and "context_logits" not in second


def test_an_error_ends_the_row_without_an_answer() -> None:
    for streaming in (False, True):
        wakes = Wakes()
        stream = make_stream(wakes, streaming=streaming)
        error = InvalidArgumentError("no")
        stream.on_delta(error)
        assert stream.is_done and stream.error is error
        assert stream.take() == [] and wakes.take() == [True]
