"""SamplingParams refuse what no request can have, by name."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import pytest
from plansmith.runtime.errors import InvalidArgumentError
from plansmith.runtime.sampling import SamplingParams

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
]


@pytest.mark.parametrize(("name", "value"), BAD)
def test_a_bad_value_is_refused_with_its_name(name: str, value: Any) -> None:
    with pytest.raises(InvalidArgumentError, match=name):
        SamplingParams(**{name: value})


def test_min_tokens_over_max_tokens_are_refused() -> None:
    with pytest.raises(InvalidArgumentError, match="min_tokens is 5, more than max_tokens 4"):
        SamplingParams(max_tokens=4, min_tokens=5)


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
