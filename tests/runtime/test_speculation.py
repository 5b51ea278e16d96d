"""Speculation on real plans: with its quantized builds or n-grams for drafts, a target gives its own tokens."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from plansmith.runtime.engine import Engine, SamplingParams
from plansmith.runtime.request import Completion

GetPath = Callable[..., Path]
# A beginning that is shared, repetition for the n-gram lookup, and prompts longer than a step takes.
PROMPTS = [
    [1, 5, 9, 33],
    [*range(10, 74), 7],
    [*range(10, 74), 8, 8],
    [1, 2, 3] * 14,
    [77],
    [4, 9, 4, 9, 4, 9, 4],
]
PARAMS = {
    "greedy": SamplingParams(max_tokens=40, temperature=0.0, ignore_eos=True, logprobs=2),
    "sampled": SamplingParams(max_tokens=40, temperature=0.8, seed=5, ignore_eos=True),
    "filtered": SamplingParams(max_tokens=40, temperature=1.2, top_p=0.9, top_k=30, min_p=0.02, seed=6),
    "penalties": SamplingParams(
        max_tokens=40, temperature=0.7, top_p=0.95, seed=7, repetition_penalty=1.3, frequency_penalty=0.3
    ),
    "several": SamplingParams(max_tokens=30, temperature=0.9, seed=8, n=3, min_tokens=8),
    "stops": SamplingParams(
        max_tokens=40, temperature=0.9, seed=9, stop_token_ids=[3, 17], bad_words=[[5, 6]]
    ),
}
SPECULATING: dict[str, dict[str, Any]] = {
    "int8": {"speculation": "model"},
    "int4": {"speculation": "model"},
    "ngram": {"speculation": "ngram", "ngram_min": 1},
}


def key(completion: Completion) -> list[tuple[Any, ...]]:
    return [(o.token_ids, o.text, o.finish_reason, o.logprobs) for o in completion.outputs]


def speculate(tiny_engine: GetPath, how: str, **options: Any) -> Engine:
    draft = {} if how == "ngram" else {"draft": tiny_engine("llama", how)}
    options = {"num_threads": 1, "max_num_tokens": 24, "adaptive_draft_len": False, **options}
    return Engine.open(tiny_engine("llama"), **draft, **SPECULATING[how], **options)


@pytest.fixture(scope="module")
def alone(tiny_engine: GetPath) -> dict[str, list[list[tuple[Any, ...]]]]:
    with Engine.open(tiny_engine("llama"), speculation="off", num_threads=1) as engine:
        return {name: [key(c) for c in engine.generate(PROMPTS, p)] for name, p in PARAMS.items()}


@pytest.mark.parametrize("adaptive", [False, True])
@pytest.mark.parametrize("how", list(SPECULATING))
def test_every_kind_of_request_has_the_targets_own_tokens(
    tiny_engine: GetPath, alone: dict[str, list[list[tuple[Any, ...]]]], how: str, adaptive: bool
) -> None:
    with speculate(tiny_engine, how, adaptive_draft_len=adaptive, max_draft_len=5) as engine:
        for name, params in PARAMS.items():
            assert [key(c) for c in engine.generate(PROMPTS, params)] == alone[name], name
        stats = engine.stats()
    assert stats.num_failed_drafts == 0
    if not adaptive:
        assert stats.num_accepted_draft_tokens > 0


@pytest.mark.parametrize("how", list(SPECULATING))
def test_pauses_in_a_small_pool_change_nothing(
    tiny_engine: GetPath, alone: dict[str, list[list[tuple[Any, ...]]]], how: str
) -> None:
    with speculate(tiny_engine, how) as engine:
        info = engine.model_info
    blocks = 2 * -(-info.max_seq_len // info.tokens_per_block)
    # Target and draft have equal pools of the same float32 K and V.
    bytes_each = info.kv_bytes_per_block * (1 if how == "ngram" else 2)
    small = {"scheduler_policy": "max_utilization", "kv_cache_bytes": blocks * bytes_each}
    with speculate(tiny_engine, how, **small) as engine:
        for name in ("greedy", "penalties"):
            assert [key(c) for c in engine.generate(PROMPTS, PARAMS[name])] == alone[name]


def test_a_draft_of_the_same_weights_is_accepted(tiny_engine: GetPath) -> None:
    draft = tiny_engine("llama", "fp32")
    options = {"num_threads": 1, "adaptive_draft_len": False, "max_draft_len": 4}
    with Engine.open(tiny_engine("llama"), draft=draft, **options) as engine:
        for params in (PARAMS["greedy"], PARAMS["sampled"], PARAMS["penalties"]):
            engine.generate(PROMPTS, dataclasses.replace(params, ignore_eos=True))
        stats = engine.stats()
    assert stats.num_draft_tokens > 300
    assert stats.num_accepted_draft_tokens == stats.num_draft_tokens
    assert stats.acceptance_length > 4


def test_a_stream_has_the_same_text_and_can_be_cancelled(tiny_engine: GetPath) -> None:
    params = dataclasses.replace(PARAMS["sampled"], max_tokens=60)
    with Engine.open(tiny_engine("llama"), speculation="off", num_threads=1) as engine:
        want = engine.generate([PROMPTS[3]], params)[0]
    with speculate(tiny_engine, "int8", max_draft_len=3) as engine:
        assert "".join(delta.text for delta in engine.stream(PROMPTS[3], params)) == want.text
        stream = engine.stream(PROMPTS[3], params)
        first = next(stream)
        stream.close()
        assert want.text.startswith(first.text)
        assert engine.generate([PROMPTS[3]], params)[0].token_ids == want.token_ids
        assert engine.stats().used_num_blocks == 0


def test_drafts_find_a_shared_prompt_computed(tiny_engine: GetPath) -> None:
    prompt, params = PROMPTS[1], PARAMS["greedy"]
    with speculate(tiny_engine, "int8") as engine:
        first = engine.generate([prompt], params)[0]
        second = engine.generate([prompt], params)[0]
    assert second.token_ids == first.token_ids
    assert second.stats.reused_tokens > 0
    # The first one's drafts had to wait until the draft had computed the prompt, some chunks long.
    assert second.stats.num_decode_iters < first.stats.num_decode_iters


BROUGHT: dict[str, dict[str, Any]] = {
    "off": {"speculation": "off"},
    "ngram": {"speculation": "ngram", "ngram_min": 1, "max_draft_len": 3},
    "model": {"max_draft_len": 3, "draft": "int4"},
}


@pytest.mark.parametrize("precision", ["fp32", "int8"])
@pytest.mark.parametrize("how", list(BROUGHT))
def test_drafts_that_a_request_brings(tiny_engine: GetPath, how: str, precision: str) -> None:
    """Right ones save steps from the end of the prompt on, wrong ones nothing; no token moves."""
    options = dict(BROUGHT[how])
    if "draft" in options:
        options["draft"] = tiny_engine("llama", options["draft"])
    plain = {"speculation": "off", "num_threads": 1}
    with (
        Engine.open(tiny_engine("llama", precision), **plain) as calm,
        Engine.open(tiny_engine("llama", precision), num_threads=2, **options) as engine,
    ):
        for name, params in PARAMS.items():
            alone = calm.generate(PROMPTS, params)
            right = [dataclasses.replace(params, draft_token_ids=c.token_ids) for c in alone]
            wrong = [
                dataclasses.replace(params, draft_token_ids=[*c.token_ids[:5], 319, *c.token_ids[6:]])
                for c in alone
            ]
            for own in (right, wrong):
                assert [key(c) for c in engine.generate(PROMPTS, own)] == [key(c) for c in alone], name
        (want,) = calm.generate([PROMPTS[0]], PARAMS["greedy"])
        before = engine.stats()
        params = dataclasses.replace(PARAMS["greedy"], draft_token_ids=want.token_ids, max_draft_len=0)
        (done,) = engine.generate([PROMPTS[0]], params)
        # The prompt and 28 of them fill a step, the other 10 that are of use go into the next.
        assert engine.stats().iter - before.iter == 2 and done.stats.num_decode_iters == 2
        assert done.stats.num_draft_tokens == done.stats.num_accepted_draft_tokens == 38
