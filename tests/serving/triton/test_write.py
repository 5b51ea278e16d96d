"""Answers have the names, shapes and types that clients of the older stack read."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest
from plansmith.runtime.completion import Completion, SequenceOutput, TokenLogprobs
from plansmith.serving.triton.row import Row
from plansmith.serving.triton.write import Piece, Writer
from triton_rows import ALL_NAMES, ALL_WANTS, BASIC, PROMPT, STATS


def make_output(
    index: int, tokens: list[int], reason: str = "length", stop: int | None = None
) -> SequenceOutput:
    return SequenceOutput(
        index=index,
        text="",
        token_ids=tuple(tokens),
        finish_reason=reason,
        stop_reason=stop,
        logprobs=tuple(TokenLogprobs(token, -token / 10) for token in tokens),
        cumulative_logprob=-sum(tokens) / 10,
        stats=STATS,
        generation_logits=np.full((len(tokens), 5), index + 0.5, np.float32),
    )


def make_completion(*outputs: SequenceOutput) -> Completion:
    context = np.arange(15, dtype=np.float32).reshape(3, 5)
    return Completion(tuple(PROMPT.tolist()), outputs, STATS, context_logits=context)


def make_row(**fields: Any) -> Row:
    return Row(prompt_ids=PROMPT, **{"params": {}, **fields})


def test_a_whole_answer_has_the_prompt_unless_it_is_left_out() -> None:
    completion = make_completion(make_output(0, [1, 2]))
    answer = Writer(make_row(), ALL_NAMES).whole(completion)
    assert set(answer) == BASIC
    assert answer["output_ids"].tolist() == [[[7, 8, 9, 1, 2]]]
    assert answer["sequence_length"].tolist() == [[5]]
    assert answer["is_final"].tolist() == [[True]] and answer["is_final"].dtype == np.bool_
    assert answer["finish_reasons"].tolist() == [[3]]
    assert answer["prefix_ids"].tolist() == [[[-1] * 16]]
    assert all(answer[name].dtype == np.int32 for name in BASIC - {"is_final"})
    without = Writer(make_row(exclude_input=True), ALL_NAMES).whole(completion)
    assert without["output_ids"].tolist() == [[[1, 2]]] and without["sequence_length"].tolist() == [[2]]


def test_everything_that_is_wanted_has_its_shape_and_type() -> None:
    row = make_row(wants=ALL_WANTS, is_batch=True, row_idx=4, exclude_input=True)
    answer = Writer(row, ALL_NAMES, "float16").whole(make_completion(make_output(0, [1, 2])))
    assert set(answer) == ALL_NAMES - {"sequence_index"}
    assert answer["cum_log_probs"].shape == (1, 1) and answer["cum_log_probs"].dtype == np.float32
    assert answer["output_log_probs"].tolist() == [[[np.float32(-0.1), np.float32(-0.2)]]]
    assert answer["context_logits"].shape == (1, 3, 5) and answer["context_logits"].dtype == np.float16
    assert (
        answer["generation_logits"].shape == (1, 1, 2, 5) and answer["generation_logits"].dtype == np.float16
    )
    assert (answer["generation_logits"] == 0.5).all()
    assert answer["batch_index"].tolist() == [[4]]
    assert answer["num_input_tokens"].tolist() == [[3]] and answer["num_output_tokens"].tolist() == [[2]]
    for name in ALL_NAMES:
        if name.endswith("_ns"):
            assert answer[name].dtype == np.int64 and answer[name].tolist() == [[getattr(STATS, name)]]
    assert answer["kv_cache_alloc_new_blocks"].tolist() == [[STATS.alloc_new_blocks]]
    assert answer["kv_cache_reused_blocks"].tolist() == [[STATS.reused_blocks]]
    assert answer["kv_cache_alloc_total_blocks"].tolist() == [[STATS.alloc_total_blocks]]
    assert answer["total_draft_tokens"].tolist() == [[STATS.num_draft_tokens]]
    assert answer["acceptance_rate"][0, 0] == np.float32(STATS.acceptance_rate)


def test_logits_are_the_models_own_in_float32() -> None:
    row = make_row(wants=ALL_WANTS)
    answer = Writer(row, ALL_NAMES).whole(make_completion(make_output(0, [1])))
    assert answer["context_logits"].tobytes() == np.arange(15, dtype=np.float32).tobytes()


def test_only_requested_outputs_are_made() -> None:
    row = make_row(wants=ALL_WANTS)
    answer = Writer(row, {"output_ids", "cum_log_probs"}).whole(make_completion(make_output(0, [1])))
    assert set(answer) == {"output_ids", "cum_log_probs"}


def test_beams_are_padded_below_each_other() -> None:
    completion = make_completion(
        make_output(0, [1, 2, 3]), make_output(1, [4], "stop", 4), make_output(2, [5, 6])
    )
    row = make_row(wants=ALL_WANTS, exclude_input=True, pad_id=99, num_beams=2)
    answer = Writer(row, ALL_NAMES).whole(completion)
    assert answer["output_ids"].tolist() == [[[1, 2, 3], [4, -1, -1]]]
    assert answer["sequence_length"].tolist() == [[3, 1]]
    assert answer["finish_reasons"].tolist() == [[3, 2]]
    assert answer["cum_log_probs"].shape == (1, 2)
    assert answer["output_log_probs"].shape == (1, 2, 3)
    assert answer["generation_logits"].shape == (1, 2, 3, 5)
    assert (answer["generation_logits"][0, 1, 1:] == 0).all()
    assert answer["prefix_ids"].shape == (1, 2, 16)
    assert answer["is_final"].shape == (1, 1)
    assert answer["num_output_tokens"].tolist() == [[4]]


def test_each_output_by_itself_has_its_index_and_the_first_the_prompts_logits() -> None:
    row = make_row(wants=ALL_WANTS, exclude_input=True)
    answers = Writer(row, ALL_NAMES).each(make_completion(make_output(0, [1, 2]), make_output(1, [3])))
    assert [one["sequence_index"].tolist() for one in answers] == [[[0]], [[1]]]
    assert [one["output_ids"].tolist() for one in answers] == [[[[1, 2]]], [[[3]]]]
    assert ["context_logits" in one for one in answers] == [True, False]
    assert all(one["is_final"].all() and "acceptance_rate" in one for one in answers)


@pytest.mark.parametrize(
    ("reason", "stop_reason", "number"),
    [
        (None, None, 0),
        ("stop", None, 1),
        ("stop", 5, 2),
        ("length", None, 3),
        ("timeout", None, 4),
        ("cancelled", None, 5),
    ],
)
def test_finish_reasons_have_the_older_stacks_numbers(
    reason: str | None, stop_reason: int | None, number: int
) -> None:
    piece = Piece([1], finish_reason=reason, stop_reason=stop_reason)
    answer = Writer(make_row(streaming=True), ALL_NAMES).partial(piece)
    assert answer["finish_reasons"].tolist() == [[number]]
    assert answer["is_final"].tolist() == [[reason is not None]]


def test_an_end_token_is_told_from_a_stop_word() -> None:
    """end_id reaches the engine as a stop token, and its own stop words have no stop_reason."""
    writer = Writer(make_row(params={"stop_words": ((7, 8), (5,))}, end_id=9), ALL_NAMES)
    for piece, number in (
        (Piece([1, 9], finish_reason="stop", stop_reason=9), 1),
        (Piece([1, 5], finish_reason="stop"), 2),
        (Piece([8], prefix_ids=[6, 7], finish_reason="stop"), 2),
        (Piece([8], prefix_ids=[7, 6], finish_reason="stop"), 1),
    ):
        assert writer.partial(piece)["finish_reasons"].tolist() == [[number]]


def test_a_stop_word_longer_than_the_prefix_is_known_by_its_end() -> None:
    word = tuple(range(10, 40))
    writer = Writer(make_row(streaming=True, params={"stop_words": (word,)}), ALL_NAMES)
    for prefix_ids, last, number in (
        (word[-17:-1], word[-1], 2),
        ((9, *word[-16:-1]), word[-1], 1),
        (word[-17:-1], 9, 1),
        (word[-3:-1], word[-1], 1),  # the whole output: shorter than the word
    ):
        piece = Piece([last], prefix_ids=prefix_ids, finish_reason="stop")
        assert writer.partial(piece)["finish_reasons"].tolist() == [[number]]


def test_a_partial_answer_has_new_tokens_alone_and_what_came_before_as_prefix() -> None:
    row = make_row(streaming=True, wants=ALL_WANTS)
    piece = Piece([4, 5], logprobs=[-1.0, -2.0], cum_logprob=-6.0, prefix_ids=[1, 2, 3])
    answer = Writer(row, ALL_NAMES).partial(piece)
    assert answer["output_ids"].tolist() == [[[4, 5]]] and answer["sequence_length"].tolist() == [[2]]
    assert answer["prefix_ids"].tolist() == [[[-1] * 13 + [1, 2, 3]]]
    assert answer["output_log_probs"].tolist() == [[[-1, -2]]] and answer["cum_log_probs"].tolist() == [[-6]]
    assert answer["acceptance_rate"].tolist() == [[0]] and "context_logits" not in answer
    last = Writer(row, ALL_NAMES).partial(dataclasses.replace(piece, finish_reason="length"), stats=STATS)
    assert last["last_token_time_ns"].tolist() == [[STATS.last_token_time_ns]]


def test_an_end_without_new_tokens_is_an_empty_answer() -> None:
    answer = Writer(make_row(streaming=True, wants=ALL_WANTS), ALL_NAMES).partial(
        Piece([], finish_reason="cancelled"), stats=STATS
    )
    assert answer["output_ids"].shape == (1, 1, 0) and answer["sequence_length"].tolist() == [[0]]
    assert answer["output_log_probs"].shape == (1, 1, 0)
    assert answer["generation_logits"].shape == (1, 1, 0, 0)
