"""SamplingParams refuse what no request can have, by name."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import numpy as np
import pytest
from plansmith.runtime.checks import key64
from plansmith.runtime.errors import InvalidArgumentError
from plansmith.runtime.guided import GuidedParams
from plansmith.runtime.sampling import RetentionRange, SamplingParams

BAD: list[tuple[str, Any]] = [
    ("max_tokens", 0),
    ("max_tokens", -1),
    ("max_tokens", 1.5),
    ("max_tokens", True),
    ("max_tokens", "5"),
    ("max_tokens", 2**31),
    ("min_tokens", -1),
    ("temperature", -0.1),
    ("temperature", math.nan),
    ("temperature", math.inf),
    ("temperature", "hot"),
    ("temperature", 1e39),
    ("temperature", 10**400),
    ("logit_bias", {1: 10**400}),
    ("logit_bias", {1: 1e39}),
    ("temperature", None),
    ("top_k", -1),
    ("top_k", 2.0),
    ("top_p", 0.0),
    ("top_p", 1.01),
    ("min_p", -0.01),
    ("min_p", 1.01),
    ("repetition_penalty", 0.0),
    ("presence_penalty", math.nan),
    ("frequency_penalty", math.inf),
    ("seed", -1),
    ("seed", 2**64),
    ("seed", 1.0),
    ("stop", [""]),
    ("stop", [3]),
    ("stop", ""),
    ("stop_token_ids", [-1]),
    ("stop_token_ids", ["a"]),
    ("stop_words", [[]]),
    ("stop_words", ["word"]),
    ("stop_words", [3]),
    ("stop_words", [[1, -1]]),
    ("bad_words", [[]]),
    ("bad_words", [""]),
    ("bad_words", [3]),
    ("logit_bias", {-1: 1.0}),
    ("logit_bias", {1: math.nan}),
    ("logit_bias", {1: math.inf}),
    ("logit_bias", {1: "much"}),
    ("logit_bias", [1, 2]),
    ("bad_words", "word"),
    ("bad_words", [[1, -1]]),
    ("stop", None),
    ("stop_token_ids", 5),
    ("stop_token_ids", "5"),
    ("ignore_eos", "yes"),
    ("detokenize", 1),
    ("logprobs", -1),
    ("logprobs", 21),
    ("priority", 1.1),
    ("timeout_ms", 0),
    ("n", 0),
    ("n", 1025),
    ("n", True),
    ("best_of", 0),
    ("beam_width", 0),
    ("beam_width", 1025),
    ("beam_width", 2.0),
    ("length_penalty", math.nan),
    ("early_stopping", "always"),
    ("early_stopping", 1),
    ("beam_search_diversity_rate", -1.0),
    ("prompt_logprobs", -1),
    ("prompt_logprobs", 21),
    ("return_context_logits", 1),
    ("return_generation_logits", None),
    ("logits_processor", "double"),
    ("guided", {"regex": "a"}),
    ("adapter", ""),
    ("adapter", -1),
    ("adapter", True),
    ("cache_salt", 2**64),
    ("cache_salt", ""),
    ("tenant", 1.5),
    ("retention", [(0, 4, 35)]),
    ("retention", [RetentionRange(-1, 4, 35)]),
    ("retention", [RetentionRange(4, 4, 35)]),
    ("retention", [RetentionRange(0, 4, 101)]),
    ("retention", [RetentionRange(0, 4, 35, -1)]),
    ("retention", [RetentionRange(0, 4, 35), RetentionRange(3, None, 35)]),
    ("retention", [RetentionRange(0, None, 35), RetentionRange(9, None, 35)]),
    ("decode_retention_priority", -1),
    ("decode_retention_duration_ms", -1),
    ("max_draft_len", -1),
    ("draft_token_ids", [-1]),
    ("draft_token_ids", "12"),
    ("no_repeat_ngram_size", -1),
    ("no_repeat_ngram_size", 2.0),
    ("top_p_decay", 0.0),
    ("top_p_decay", 1.1),
    ("top_p_min", -0.1),
    ("top_p_min", 1.1),
    ("top_p_reset_id", -1),
    ("top_p_reset_id", "a"),
]


@pytest.mark.parametrize(("name", "value"), BAD)
def test_a_bad_value_is_refused_with_its_name(name: str, value: Any) -> None:
    with pytest.raises(InvalidArgumentError, match=name):
        SamplingParams(**{name: value})


@pytest.mark.parametrize(
    ("name", "value", "want"),
    [
        ("max_tokens", np.int32(5), 5),
        ("seed", np.uint64(2**64 - 1), 2**64 - 1),
        ("temperature", np.float32(0.1), float(np.float32(0.1))),
        ("ignore_eos", np.bool_(True), True),
        ("stop", np.str_("x"), "x"),
        ("stop", np.array(["x", "y"], object), ("x", "y")),
        ("stop_token_ids", np.array([1, 2], np.int64), (1, 2)),
        ("stop_words", [np.array([3, 4], np.int32)], ((3, 4),)),
        ("bad_words", ["a", np.array([3, 4], np.uint16)], ("a", (3, 4))),
        ("logit_bias", {np.int64(1): np.float16(0.5)}, {1: 0.5}),
        ("adapter", np.uint64(7), 7),
        ("retention", [RetentionRange(np.int32(0), np.int32(4), np.int32(90))], (RetentionRange(0, 4, 90),)),  # type: ignore[arg-type]
    ],
)
def test_what_is_numpys_becomes_pythons(name: str, value: Any, want: Any) -> None:
    got = getattr(SamplingParams(**{name: value}), name)
    assert got == want and type(got) is type(want)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("max_tokens", np.int32(0)),
        ("max_tokens", np.float32(1)),
        ("max_tokens", np.bool_(True)),
        ("max_tokens", np.array([5])),
        ("temperature", np.float32("nan")),
        ("stop_token_ids", np.array([1.5])),
        ("stop_token_ids", np.array(5)),
    ],
)
def test_what_is_numpys_is_checked_like_pythons(name: str, value: Any) -> None:
    with pytest.raises(InvalidArgumentError, match=name):
        SamplingParams(**{name: value})


def test_min_tokens_over_max_tokens_are_refused() -> None:
    with pytest.raises(InvalidArgumentError, match="min_tokens is 5, more than max_tokens 4"):
        SamplingParams(max_tokens=4, min_tokens=5)


@pytest.mark.parametrize(
    ("values", "text"),
    [
        ({"n": 3, "best_of": 2}, "best_of is 2, fewer than n 3"),
        ({"best_of": 2, "temperature": 0}, "all outputs are the same"),
        ({"best_of": 2, "top_k": 1}, "all outputs are the same"),
        ({"beam_width": 2, "n": 2}, "beam_width 2 does not go with n"),
        ({"beam_width": 2, "best_of": 2}, "beam_width 2 does not go with n"),
        ({"beam_width": 2, "temperature": 0.7}, "temperature"),
        ({"beam_width": 2, "top_k": 5}, "top_k"),
        ({"beam_width": 2, "top_p": 0.9}, "top_p"),
        ({"beam_width": 2, "min_p": 0.1}, "min_p"),
        ({"beam_width": 2, "guided": GuidedParams(regex="a+")}, "guided"),
        ({"beam_width": 2, "max_draft_len": 4}, "not drafted for"),
        ({"beam_width": 2, "draft_token_ids": [1]}, "not drafted for"),
        ({"beam_width": 2, "top_p_decay": 0.5}, "top_p_decay"),
        ({"beam_width": 2, "prompt_logprobs": 1}, "prompt_logprobs"),
        ({"beam_width": 2, "return_generation_logits": True}, "return_generation_logits"),
        ({"ignore_eos": True, "guided": GuidedParams(regex="a+")}, "ignore_eos"),
    ],
)
def test_contradictions_are_refused(values: dict[str, Any], text: str) -> None:
    with pytest.raises(InvalidArgumentError, match=text):
        SamplingParams(**values)


def test_names_of_salts_and_tenants_are_64_bits_and_never_none() -> None:
    assert key64(7) == 7 and key64("a") == key64("a")
    values = {key64(name) for name in ("a", "b", "A", "ä", "a ")}
    assert len(values) == 5 and all(0 < value < 2**64 for value in values)


def test_the_ends_of_the_ranges_are_taken() -> None:
    params = SamplingParams(
        max_tokens=None,
        temperature=0,
        top_p=1,
        min_p=1,
        seed=2**64 - 1,
        logit_bias={0: -math.inf},
        logprobs=20,
        priority=0,
    )
    assert params.seed_or_random() == 2**64 - 1


def test_one_stop_string_is_a_list_of_one() -> None:
    assert SamplingParams(stop="\n").stop_strings == ("\n",)
    assert dataclasses.replace(SamplingParams(stop=["a", "b"]), top_k=1).stop_strings == ("a", "b")


def test_seeds_are_random_only_when_sampling_without_one() -> None:
    assert len({SamplingParams().seed_or_random() for _ in range(4)}) == 4
    assert {SamplingParams(temperature=0).seed_or_random() for _ in range(4)} == {0}
    assert {SamplingParams(top_k=1).seed_or_random() for _ in range(4)} == {0}
