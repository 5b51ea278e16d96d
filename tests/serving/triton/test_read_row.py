"""Requests of older clients as rows: defaults, words, extras, and one error a broken rule, with the tensor's name."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from plansmith.runtime.errors import Error, InvalidArgumentError, ShapeError, UnsupportedError
from plansmith.runtime.guided import GuidedParams
from plansmith.runtime.sampling import RetentionRange, SamplingParams
from plansmith.serving.triton.read_row import is_stop, read_rows
from plansmith.serving.triton.row import Row, RowDefaults
from plansmith.serving.triton.word_lists import make_word_list, pad_word_lists

VOCAB = 100
DEFAULTS = RowDefaults(VOCAB, max_beam_width=4)


def ints(*values: int) -> Any:
    return np.array([values], np.int32)


def floats(*values: float) -> Any:
    return np.array([values], np.float32)


def flag(value: bool) -> Any:
    return np.array([[value]])


def texts(*values: str) -> Any:
    return np.array([[value.encode() for value in values]], object)


def seeds(value: int) -> Any:
    return np.array([[value]], np.uint64)


def words(*lists: list[int]) -> Any:
    return make_word_list(lists)[None]


BASE = {"input_ids": ints(1, 2, 3), "input_lengths": ints(3), "request_output_len": ints(16)}


def one(defaults: RowDefaults = DEFAULTS, **tensors: Any) -> Row:
    (row,) = read_rows(BASE | tensors, {}, defaults)
    return row


def params_of(**tensors: Any) -> dict[str, Any]:
    """Return the fields that these tensors add to, or change in, those of the base request."""
    plain = one().params
    return {name: value for name, value in one(**tensors).params.items() if plain.get(name) != value}


# ---------------------------------------------------------------- the prompt


def test_a_request_of_nothing_else_is_greedy_and_repeats_itself() -> None:
    row = one()
    assert row.prompt_ids.tolist() == [1, 2, 3] and row.prompt_ids.dtype == np.int32
    params = SamplingParams(**row.params)
    assert (params.greedy, params.max_tokens, params.min_tokens, params.seed) == (True, 16, 1, 0)
    assert not params.ignore_eos and params.stop_token_ids == ()
    assert row == dataclasses.replace(
        Row(row.prompt_ids, row.params), streaming=False, exclude_input=False, end_id=None, pad_id=-1
    )


def test_a_prompt_that_no_engine_takes_is_refused_before_it_is_copied() -> None:
    defaults = dataclasses.replace(DEFAULTS, max_seq_len=2)
    with pytest.raises(InvalidArgumentError, match="input_lengths is 3, the engine's max_seq_len is 2"):
        one(defaults)


def test_rows_of_a_batch_are_cut_at_their_own_lengths() -> None:
    tensors = {
        "input_ids": np.array([[5, 6, 7, 0], [8, 0, 0, 0]], np.int32),
        "input_lengths": np.array([3, 1], np.int32),
        "request_output_len": np.array([[4], [9]], np.int32),
        "temperature": np.array([0.5, 2.0], np.float32),
        "streaming": np.array([[True], [False]]),
        "stop_words_list": pad_word_lists([make_word_list([[1, 2]]), make_word_list([[3], [4, 5]])]),
    }
    rows = read_rows(tensors, {}, DEFAULTS)
    assert [row.prompt_ids.tolist() for row in rows] == [[5, 6, 7], [8]]
    assert [row.params["max_tokens"] for row in rows] == [4, 9]
    assert [row.params["temperature"] for row in rows] == [0.5, 2.0]
    assert [row.params["stop_words"] for row in rows] == [((1, 2),), ((3,), (4, 5))]
    assert [(row.row_idx, row.is_batch, row.streaming) for row in rows] == [(0, True, True), (1, True, False)]


def test_a_model_without_a_batch_dimension() -> None:
    tensors = {
        "input_ids": np.array([1, 2, 3], np.int32),
        "input_lengths": np.array([2], np.int32),
        "request_output_len": np.array(4, np.int32),
        "bad_words_list": make_word_list([[7, 8]]),
        "guided_decoding_guide_type": np.array([b"json"], object),
    }
    (row,) = read_rows(tensors, {}, DEFAULTS)
    assert row.prompt_ids.tolist() == [1, 2] and row.params["max_tokens"] == 4 and not row.is_batch
    assert row.params["bad_words"] == ((7, 8),) and row.params["guided"] == GuidedParams(json=True)


def test_a_row_keeps_nothing_of_the_requests_buffers() -> None:
    tensors = BASE | {
        "lora_task_id": seeds(3),
        "lora_weights": np.ones((1, 2, 8), np.float16),
        "lora_config": np.ones((1, 2, 3), np.int32),
    }
    (row,) = read_rows(tensors, {}, DEFAULTS)
    assert row.lora is not None and row.lora.weights is not None and row.lora.config is not None
    for array in (row.prompt_ids, row.lora.weights, row.lora.config):
        assert not any(np.shares_memory(array, tensor) for tensor in tensors.values())


@pytest.mark.parametrize(
    ("tensors", "error", "text"),
    [
        ({"input_ids": None}, InvalidArgumentError, "input_ids is missing"),
        ({"input_lengths": None}, InvalidArgumentError, "input_lengths is missing"),
        ({"request_output_len": None}, InvalidArgumentError, "request_output_len is missing"),
        ({"input_lengths": ints(0)}, InvalidArgumentError, "input_lengths is 0, wanted at least 1"),
        ({"input_lengths": ints(4)}, ShapeError, "input_lengths is 4, input_ids has 3"),
        ({"request_output_len": ints(0)}, InvalidArgumentError, "request_output_len is 0"),
        ({"input_ids": ints(1, -1, 3)}, InvalidArgumentError, "input_ids has -1 at 1, .* 0 to 99"),
        ({"input_ids": ints(1, 2, 100)}, InvalidArgumentError, "input_ids has 100 at 2"),
        ({"end_id": ints(-2)}, InvalidArgumentError, "end_id is -2, wanted at least -1"),
        ({"end_id": ints(100)}, InvalidArgumentError, "end_id has the token 100, .* 0 to 99"),
        ({"min_tokens": ints(-1)}, InvalidArgumentError, "min_tokens is -1"),
        ({"temperature": floats(-1)}, InvalidArgumentError, "temperature is -1.0"),
        ({"temperature": floats(np.nan)}, InvalidArgumentError, "temperature is nan"),
        ({"runtime_top_k": ints(-1)}, InvalidArgumentError, "runtime_top_k is -1"),
        ({"runtime_top_p": floats(1.5)}, InvalidArgumentError, "runtime_top_p is 1.5, wanted at most 1"),
        ({"repetition_penalty": floats(0)}, InvalidArgumentError, "repetition_penalty is 0.0"),
        ({"beam_width": ints(5)}, InvalidArgumentError, "beam_width is 5, .*max_beam_width is 4"),
        ({"beam_width": ints(0)}, InvalidArgumentError, "beam_width is 0, wanted at least 1"),
        (
            {"beam_width": ints(2), "num_return_sequences": ints(3)},
            InvalidArgumentError,
            "num_return_seq.* 3, .* 2",
        ),
        ({"num_return_sequences": ints(0)}, InvalidArgumentError, "num_return_sequences is 0"),
        (
            {"num_return_sequences": ints(2**31 - 1)},
            InvalidArgumentError,
            "num_return_sequences is 2147483647",
        ),
        (
            {"runtime_top_k": ints(9), "runtime_top_p_decay": floats(0)},
            InvalidArgumentError,
            "runtime_top_p_decay is 0.0",
        ),
        ({"stop_words_list": words([1, 100])}, InvalidArgumentError, "stop_words_list has the token 100"),
        ({"bad_words_list": words([100])}, InvalidArgumentError, "bad_words_list has the token 100"),
        (
            {"bad_words_list": np.full((1, 2, 2), 1, np.int32)},
            InvalidArgumentError,
            "bad_words_list has the end",
        ),
        ({"embedding_bias": floats(*[0] * 100, 1)}, ShapeError, "embedding_bias has 101 values.*token 100"),
        ({"embedding_bias": floats(0, np.nan)}, InvalidArgumentError, "embedding_bias has a NaN"),
        (
            {"embedding_bias": floats(0, np.inf)},
            InvalidArgumentError,
            "embedding_bias has a NaN or an infinity",
        ),
    ],
)
def test_a_broken_rule_is_an_error_that_names_the_tensor(
    tensors: dict[str, Any], error: type[Error], text: str
) -> None:
    given_tensors = {name: array for name, array in (BASE | tensors).items() if array is not None}
    with pytest.raises(error, match=text):
        read_rows(given_tensors, {}, DEFAULTS)


def test_an_error_in_one_row_of_a_batch_names_the_row() -> None:
    tensors = {
        "input_ids": np.array([[1, 2], [3, 200]], np.int32),
        "input_lengths": np.array([1, 2], np.int32),
        "request_output_len": np.array([4, 4], np.int32),
    }
    with pytest.raises(InvalidArgumentError, match="input_ids of row 1 has 200 at 1"):
        read_rows(tensors, {}, DEFAULTS)
    tensors["input_lengths"] = np.array([3, 1], np.int32)
    with pytest.raises(ShapeError, match="input_lengths of row 0 is 3"):
        read_rows(tensors, {}, DEFAULTS)
    tensors["input_lengths"] = np.array([1, 1], np.int32)  # what is cut off is not read
    assert read_rows(tensors, {}, DEFAULTS)[1].prompt_ids.tolist() == [3]


# ---------------------------------------------------------------- sampling


@pytest.mark.parametrize(
    ("tensors", "want"),
    [
        ({}, (1, 1.0)),
        ({"runtime_top_k": ints(0)}, (1, 1.0)),
        ({"runtime_top_p": floats(0)}, (1, 1.0)),
        ({"runtime_top_p": floats(-1)}, (1, 1.0)),
        ({"runtime_top_k": ints(1), "runtime_top_p": floats(0)}, (1, 1.0)),
        ({"runtime_top_k": ints(1), "runtime_top_p": floats(0.5)}, (1, 0.5)),
        ({"runtime_top_k": ints(40)}, (40, 1.0)),
        ({"runtime_top_k": ints(40), "runtime_top_p": floats(0)}, (40, 1.0)),
        ({"runtime_top_k": ints(40), "runtime_top_p": floats(0.5)}, (40, 0.5)),
        ({"runtime_top_p": floats(0.5)}, (0, 0.5)),
        ({"runtime_top_k": ints(0), "runtime_top_p": floats(1)}, (0, 1.0)),
        ({"min_p": floats(0.25)}, (0, 1.0)),
    ],
)
def test_top_k_and_top_p_mean_what_they_meant(tensors: dict[str, Any], want: tuple[int, float]) -> None:
    params = one(**tensors).params
    assert (params["top_k"], params["top_p"]) == want
    assert SamplingParams(**params).greedy == (want[0] == 1)


@pytest.mark.parametrize(
    ("tensors", "want"),
    [
        ({"temperature": floats(0.5)}, {"temperature": 0.5}),
        ({"temperature": floats(0)}, {"temperature": 0.0}),
        ({"repetition_penalty": floats(1.5)}, {"repetition_penalty": 1.5}),
        ({"presence_penalty": floats(-0.5)}, {"presence_penalty": -0.5}),
        ({"frequency_penalty": floats(0.25)}, {"frequency_penalty": 0.25}),
        ({"min_tokens": ints(0)}, {"min_tokens": 0}),
        ({"min_tokens": ints(7)}, {"min_tokens": 7}),
        ({"min_tokens": ints(700)}, {"min_tokens": 16}),
        ({"seed": seeds(2**64 - 1)}, {"seed": 2**64 - 1}),
        ({"num_return_sequences": ints(3)}, {"n": 3}),
        ({"end_id": ints(9)}, {"ignore_eos": True, "stop_token_ids": (9,)}),
        ({"end_id": ints(-1)}, {"ignore_eos": True}),
        ({"stop_words_list": words([4, 5], [6])}, {"stop_words": ((4, 5), (6,))}),
        ({"stop_words_list": np.empty((1, 2, 0), np.int32)}, {}),
        ({"bad_words_list": words([4, 5])}, {"bad_words": ((4, 5),)}),
        ({"embedding_bias": floats(0, 0.5, 0, -np.inf)}, {"logit_bias": {1: 0.5, 3: -np.inf}}),
        ({"embedding_bias": np.array([[0, 0.5]], np.float16)}, {"logit_bias": {1: 0.5}}),
        ({"embedding_bias": floats(*[0] * 120)}, {}),
        ({"embedding_bias": np.empty((1, 0), np.float32)}, {}),
        ({"no_repeat_ngram_size": ints(0)}, {}),
        ({"no_repeat_ngram_size": ints(1 << 30)}, {}),
        ({"priority": floats(1)}, {"priority": 1.0}),
        ({"timeout_ms": ints(250)}, {"timeout_ms": 250}),
        ({"timeout_ms": ints(0)}, {}),
        ({"cache_salt": texts("tenant")}, {"cache_salt": "tenant"}),
        ({"cache_salt": texts("")}, {}),
        ({"early_stopping": flag(True), "len_penalty": floats(2)}, {}),  # of beams alone
    ],
)
def test_each_input_is_a_field(tensors: dict[str, Any], want: dict[str, Any]) -> None:
    got = params_of(**tensors)
    assert got == want
    SamplingParams(**one(**tensors).params)


@pytest.mark.parametrize(
    ("tensors", "want"),
    [
        ({"runtime_top_p_min": floats(0.25)}, {"top_p_min": 0.25}),
        ({"runtime_top_k_min": floats(0.25)}, {"top_p_min": 0.25}),
        ({"runtime_top_p_min": floats(0.5), "runtime_top_k_min": floats(0.25)}, {"top_p_min": 0.5}),
        ({"runtime_top_p_decay": floats(0.5)}, {"top_p_decay": 0.5}),
        ({"runtime_top_p_reset_ids": ints(7)}, {"top_p_reset_id": 7}),
        ({"runtime_top_p_reset_ids": ints(0)}, {"top_p_reset_id": 0}),
        ({"runtime_top_p_reset_ids": ints(-1)}, {}),
    ],
)
def test_top_p_moves_where_there_is_drawing(tensors: dict[str, Any], want: dict[str, Any]) -> None:
    drawing = {"runtime_top_k": ints(0), "runtime_top_p": floats(0.75)}
    params = one(**drawing, **tensors).params
    assert {name: params[name] for name in params if name.startswith("top_p_")} == want
    assert not any(name.startswith("top_p_") for name in params_of(**tensors))


@pytest.mark.parametrize(
    ("tensors", "want"),
    [
        ({}, True),
        ({"early_stopping": flag(True)}, True),
        ({"early_stopping": flag(False)}, False),
        ({"early_stopping": ints(1)}, True),
        ({"early_stopping": ints(0)}, False),
        ({"early_stopping": ints(2)}, "never"),
    ],
)
def test_beams_have_the_older_defaults(tensors: dict[str, Any], want: bool | str) -> None:
    row = one(
        beam_width=ints(3), runtime_top_k=ints(40), runtime_top_p=floats(0.5), min_p=floats(0.5), **tensors
    )
    params = SamplingParams(**row.params)
    assert (params.beam_width, params.length_penalty, params.early_stopping) == (3, 0.0, want)
    assert row.num_beams is None


def test_fewer_beams_can_be_answered_than_are_searched() -> None:
    tensors = {"len_penalty": floats(0.5), "beam_search_diversity_rate": floats(0.25)}
    row = one(beam_width=ints(4), num_return_sequences=ints(2), **tensors)
    params = SamplingParams(**row.params)
    assert (row.num_beams, params.n, params.beam_width) == (2, 1, 4)
    assert (params.length_penalty, params.beam_search_diversity_rate) == (0.5, 0.25)
    assert one(num_return_sequences=ints(2)).num_beams is None


def test_a_length_beyond_the_engines_is_lowered_to_it() -> None:
    defaults = dataclasses.replace(DEFAULTS, max_seq_len=10)
    row = one(defaults, min_tokens=ints(12))
    assert (row.params["max_tokens"], row.params["min_tokens"]) == (7, 7)
    assert row.notes == ("request_output_len is 16, of which max_seq_len leaves 7",)
    assert one(dataclasses.replace(DEFAULTS, max_seq_len=19)).params["max_tokens"] == 16
    assert one(dataclasses.replace(DEFAULTS, max_seq_len=4)).params["max_tokens"] == 1
    # A prompt that leaves no room is the engine's error, which knows its limits' names.
    assert one(dataclasses.replace(DEFAULTS, max_seq_len=3)).params["max_tokens"] == 16


# ---------------------------------------------------------------- the answer


def test_what_the_answers_have() -> None:
    row = one(
        streaming=flag(True),
        exclude_input_in_output=flag(True),
        pad_id=ints(50256),
        return_log_probs=flag(True),
        return_context_logits=flag(True),
        return_generation_logits=flag(True),
        return_perf_metrics=flag(True),
        return_num_input_tokens=flag(True),
        return_num_output_tokens=flag(True),
    )
    assert (row.streaming, row.exclude_input, row.pad_id) == (True, True, 50256)
    assert row.wants == {
        "log_probs",
        "context_logits",
        "generation_logits",
        "perf_metrics",
        "num_input_tokens",
        "num_output_tokens",
    }
    params = SamplingParams(**row.params)
    assert (params.logprobs, params.return_context_logits, params.return_generation_logits) == (0, True, True)
    assert one(return_log_probs=flag(False)).wants == frozenset()
    assert one(return_kv_cache_reuse_stats=flag(True)).wants == {"perf_metrics"}


def test_the_models_parameter_counts_where_the_request_is_silent() -> None:
    defaults = dataclasses.replace(DEFAULTS, exclude_input=True)
    assert one(defaults).exclude_input
    assert not one(defaults, exclude_input_in_output=flag(False)).exclude_input


def test_a_stop_request_is_known_whatever_else_it_has() -> None:
    empty = {"input_ids": ints(0), "input_lengths": ints(0), "request_output_len": ints(0)}
    assert is_stop(empty | {"stop": flag(True)}) and is_stop({"stop": np.array([True])})
    assert not is_stop(empty | {"stop": flag(False)}) and not is_stop(empty)
    assert not is_stop({"stop": np.empty((1, 0), np.bool_)})
    assert one(stop=flag(False)).params == one().params


# ---------------------------------------------------------------- extras


@pytest.mark.parametrize(
    ("kind", "guide", "want"),
    [
        ("json", None, GuidedParams(json=True)),
        ("json", "ignored", GuidedParams(json=True)),
        ("json_schema", '{"type": "object"}', GuidedParams(json_schema='{"type": "object"}')),
        ("regex", "a+", GuidedParams(regex="a+")),
        ("ebnf_grammar", 'root ::= "a"', GuidedParams(ebnf='root ::= "a"')),
        ("", None, None),
    ],
)
def test_a_guide(kind: str, guide: str | None, want: GuidedParams | None) -> None:
    tensors = {"guided_decoding_guide_type": texts(kind)}
    if guide is not None:
        tensors["guided_decoding_guide"] = texts(guide)
    params = one(**tensors).params
    assert params.get("guided") == want
    # A grammar's end must be sayable, whatever end_id says.
    for end_id in (-1, 5):
        ends = SamplingParams(**one(end_id=ints(end_id), **tensors).params)
        assert ends.ignore_eos == (want is None) and ends.stop_token_ids == ((5,) if end_id == 5 else ())


@pytest.mark.parametrize(
    ("tensors", "error", "text"),
    [
        ({"guided_decoding_guide": texts("a")}, InvalidArgumentError, "without guided_decoding_guide_type"),
        (
            {"guided_decoding_guide_type": texts("regex")},
            InvalidArgumentError,
            "guided_decoding_guide is missing",
        ),
        (
            {"guided_decoding_guide_type": texts("xml")},
            InvalidArgumentError,
            "guide_type is 'xml', wanted json",
        ),
        ({"guided_decoding_guide_type": texts("structural_tag")}, UnsupportedError, "ebnf_grammar"),
        ({"draft_input_ids": ints(1, 100)}, InvalidArgumentError, "draft_input_ids has the token 100"),
        ({"draft_input_ids": ints(1, -1)}, InvalidArgumentError, "draft_input_ids has the token -1"),
        (
            {"draft_acceptance_threshold": floats(0)},
            InvalidArgumentError,
            "draft_acceptance_threshold is 0.0",
        ),
        (
            {"draft_acceptance_threshold": floats(1.5)},
            InvalidArgumentError,
            "draft_acceptance_threshold is 1.5",
        ),
        ({"draft_logits": np.ones((1, 1, VOCAB), np.float32)}, ShapeError, r"\[1, 100\], wanted \[0, 100\]"),
        (
            {"draft_input_ids": ints(1), "draft_logits": np.ones((1, 1, VOCAB - 1), np.float32)},
            ShapeError,
            r"draft_logits has shape \[1, 99\], wanted \[1, 100\]",
        ),
        (
            {"draft_input_ids": ints(1), "draft_logits": np.ones((1, 1, VOCAB), np.float16)},
            InvalidArgumentError,
            "draft_logits is FP16, the model's logits_datatype is FP32",
        ),
        ({"lookahead_ngram_size": ints(3)}, InvalidArgumentError, "lookahead_window_size is missing"),
        (
            {"lookahead_window_size": ints(3), "lookahead_ngram_size": ints(3)},
            InvalidArgumentError,
            "lookahead_verification_set_size is missing",
        ),
        ({"lora_weights": np.ones((1, 2, 8), np.float16)}, InvalidArgumentError, "without lora_config"),
        ({"lora_config": np.ones((1, 2, 3), np.int32)}, InvalidArgumentError, "without lora_weights"),
        (
            {"lora_weights": np.ones((1, 2, 8), np.float16), "lora_config": np.ones((1, 2, 3), np.int32)},
            InvalidArgumentError,
            "without lora_task_id",
        ),
        (
            {
                "lora_task_id": seeds(1),
                "lora_weights": np.ones((1, 2, 8), np.float16),
                "lora_config": np.ones((1, 3, 3), np.int32),
            },
            ShapeError,
            "lora_weights has 2 rows and lora_config 3",
        ),
        ({"retention_token_range_ends": ints(4)}, InvalidArgumentError, "_ends came without .*_starts"),
        ({"retention_token_range_durations_ms": ints(4)}, InvalidArgumentError, "_durations_ms came without"),
        ({"retention_token_range_starts": ints(0)}, ShapeError, "_ends has 0 values, wanted 1"),
        ({"retention_decode_priority": ints(101)}, InvalidArgumentError, "retention_decode_priority is 101"),
        (
            {"retention_decode_duration_ms": ints(-2)},
            InvalidArgumentError,
            "retention_decode_duration_ms is -2",
        ),
        ({"priority": floats(1.5)}, InvalidArgumentError, "priority is 1.5, wanted 0 to 1"),
        ({"context_phase_params": np.ones((1, 4), np.uint8)}, UnsupportedError, "context_phase_params"),
    ],
)
def test_an_extra_that_is_wrong_is_an_error_that_names_the_tensor(
    tensors: dict[str, Any], error: type[Error], text: str
) -> None:
    with pytest.raises(error, match=text):
        one(**tensors)


def test_words_that_do_not_come_again() -> None:
    assert params_of(no_repeat_ngram_size=ints(3)) == {"no_repeat_ngram_size": 3}
    assert params_of(no_repeat_ngram_size=ints(3), beam_width=ints(2))["no_repeat_ngram_size"] == 3


def test_drafts() -> None:
    draft = {"draft_input_ids": ints(7, 8), "draft_acceptance_threshold": floats(0.5)}
    assert params_of(**draft) == {"draft_token_ids": (7, 8)}
    assert params_of(**draft, draft_logits=np.ones((1, 2, VOCAB + 28), np.float32)) == {
        "draft_token_ids": (7, 8)
    }
    half = dataclasses.replace(DEFAULTS, logits_dtype=np.float16)
    one(half, **draft, draft_logits=np.ones((1, 2, VOCAB), np.float16))
    assert params_of(draft_input_ids=np.empty((1, 0), np.int32)) == {}
    lookahead = {
        "lookahead_window_size": ints(4),
        "lookahead_ngram_size": ints(3),
        "lookahead_verification_set_size": ints(4),
    }
    assert params_of(**lookahead) == {"max_draft_len": 2}
    assert params_of(max_draft_len=ints(0)) == {"max_draft_len": 0}


def test_an_adapter() -> None:
    row = one(lora_task_id=seeds(2**64 - 1))
    assert row.lora is not None and (row.lora.task_id, row.lora.weights) == (2**64 - 1, None)
    for dtype in (np.float16, np.float32):
        weights, config = (
            np.arange(16).reshape(1, 2, 8).astype(dtype),
            np.array([[[1, 0, 8], [2, 0, 8]]], np.int32),
        )
        lora = one(lora_task_id=seeds(0), lora_weights=weights, lora_config=config).lora
        assert lora is not None and lora.weights is not None and lora.config is not None
        assert (lora.weights == weights[0]).all() and (lora.config == config[0]).all()
    assert one().lora is None


def retention(*rows: tuple[int, int, int, int]) -> dict[str, Any]:
    names = ("starts", "ends", "priorities", "durations_ms")
    return {
        f"retention_token_range_{name}": ints(*column)
        for name, column in zip(names, zip(*rows, strict=True), strict=True)
    }


def test_what_the_cache_keeps() -> None:
    assert one(**retention((8, -1, 90, -1), (0, 8, 10, 500))).params["retention"] == (
        RetentionRange(0, 8, 10, 500),
        RetentionRange(8, None, 90, None),
    )
    ends = one(**retention((0, 4, 0, -1), (4, 8, 100, -1))).params["retention"]
    assert [part.priority for part in ends] == [0, 100]
    tensors = retention((0, 4, 90, 0))
    assert one(**tensors).params["retention"] == (RetentionRange(0, 4, 90, 0),)
    del tensors["retention_token_range_durations_ms"]
    assert one(**tensors).params["retention"] == (RetentionRange(0, 4, 90, None),)
    decode = {"retention_decode_priority": ints(80), "retention_decode_duration_ms": ints(900)}
    assert params_of(**decode) == {"decode_retention_priority": 80, "decode_retention_duration_ms": 900}
    assert params_of(retention_decode_duration_ms=ints(-1)) == {}
    assert params_of(retention_decode_duration_ms=ints(0)) == {"decode_retention_duration_ms": 0}


@pytest.mark.parametrize(
    ("rows", "text"),
    [
        ([(-1, 4, 90, -1)], "_starts has -1"),
        ([(0, 4, 90, -1), (3, 8, 90, -1)], "_starts has 3"),
        ([(0, -1, 90, -1), (3, 8, 90, -1)], "_starts has 3"),
        ([(4, 4, 90, -1)], "_ends has 4"),
        ([(4, -2, 90, -1)], "_ends has -2"),
        ([(0, 4, 101, -1)], "_priorities has 101"),
        ([(0, 4, -1, -1)], "_priorities has -1"),
        ([(0, 4, 90, -2)], "_durations_ms has -2"),
    ],
)
def test_a_range_that_cannot_be_is_an_error(rows: list[tuple[int, int, int, int]], text: str) -> None:
    with pytest.raises(InvalidArgumentError, match=f"^retention_token_range{text}"):
        one(**retention(*rows))


def test_request_parameters() -> None:
    (row,) = read_rows(BASE, {"temperature": 0.5, "runtime_top_k": 4, "traceparent": "00-1"}, DEFAULTS)
    assert (row.params["temperature"], row.params["top_k"]) == (0.5, 4)
    assert row.notes == ("request parameter 'traceparent' is not known and has no effect",)
    with pytest.raises(UnsupportedError, match="request_type"):
        read_rows(BASE, {"request_type": "context_only"}, DEFAULTS)


def test_what_has_no_effect_is_noted_once() -> None:
    """The rows are logged one by one: what is of the whole request is told with the first."""
    tensors = {
        "input_ids": np.array([[1, 2, 3], [4, 5, 6]], np.int32),
        "input_lengths": np.array([[3], [1]], np.int32),
        "request_output_len": np.array([[16], [20]], np.int32),
    }
    first, second = read_rows(tensors, {"x": 1}, dataclasses.replace(DEFAULTS, max_seq_len=10))
    assert [note.split(" is ")[0] for note in first.notes] == ["request parameter 'x'", "request_output_len"]
    assert second.notes == ("request_output_len is 20, of which max_seq_len leaves 9",)


# ---------------------------------------------------------------- any request

SCALARS = st.fixed_dictionaries(
    {},
    optional={
        "temperature": st.floats(0, 4, width=32).map(floats),
        "runtime_top_k": st.integers(0, 200).map(ints),
        "runtime_top_p": st.floats(-1, 1, width=32).map(floats),
        "runtime_top_p_min": st.floats(0, 1, width=32).map(floats),
        "runtime_top_p_decay": st.floats(2**-10, 1, width=32).map(floats),
        "runtime_top_p_reset_ids": st.integers(-1, VOCAB - 1).map(ints),
        "min_p": st.floats(0, 1, width=32).map(floats),
        "repetition_penalty": st.floats(2**-10, 4, width=32).map(floats),
        "presence_penalty": st.floats(-2, 2, width=32).map(floats),
        "frequency_penalty": st.floats(-2, 2, width=32).map(floats),
        "min_tokens": st.integers(0, 40).map(ints),
        "seed": st.integers(0, 2**64 - 1).map(seeds),
        "num_return_sequences": st.integers(1, 3).map(ints),
        "end_id": st.integers(-1, VOCAB - 1).map(ints),
        "pad_id": st.integers(-1, 2**31 - 1).map(ints),
        "return_log_probs": st.booleans().map(flag),
        "return_generation_logits": st.booleans().map(flag),
        "priority": st.floats(0, 1, width=32).map(floats),
        "timeout_ms": st.integers(0, 1000).map(ints),
        "max_draft_len": st.integers(0, 8).map(ints),
        "draft_input_ids": st.lists(st.integers(0, VOCAB - 1), max_size=4).map(lambda x: ints(*x)),
        "stop_words_list": st.lists(
            st.lists(st.integers(0, VOCAB - 1), min_size=1, max_size=3), max_size=3
        ).map(lambda x: words(*x)),
        "guided_decoding_guide_type": st.sampled_from(["json", ""]).map(texts),
    },
)


@settings(max_examples=200, deadline=None)
@given(tensors=SCALARS)
def test_whatever_is_in_bounds_is_taken_by_the_engines_own_checks(tensors: dict[str, Any]) -> None:
    row = one(**tensors)
    SamplingParams(**row.params)
    for value in row.params.values():
        assert not isinstance(value, (np.generic, np.ndarray))


def test_one_of_the_models_end_tokens_stands_for_all_of_them() -> None:
    """The older preprocessing sends the tokenizer's one, where chat models have several."""
    defaults = dataclasses.replace(DEFAULTS, own_end_ids=frozenset([9, 11]))
    for end_id, stop_token_ids in ((9, None), (11, None), (5, (5,)), (-1, None)):
        row = one(defaults, end_id=ints(end_id))
        assert row.params.get("stop_token_ids") == stop_token_ids
        assert row.params.get("ignore_eos", False) == (end_id in (5, -1))
