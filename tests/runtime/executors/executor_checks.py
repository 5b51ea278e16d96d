"""What the tests of GPU executors compare tokens with."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
from plansmith.runtime.engine import Engine, SamplingParams

GREEDY = SamplingParams(max_tokens=16, temperature=0.0, ignore_eos=True)
PROMPTS = [[1, 5, 9, 33], list(range(10, 80)), [77], [8] * 9, [1, 2, 3] * 11]


def tokens(completions: Any) -> list[list[int]]:
    return [list(one.token_ids) for one in completions]


def check_greedy(path: Path, prompts: list[list[int]], got: list[list[int]], length: int = 16) -> None:
    """See that each token is the cpu target's likeliest behind what came before it, but for float16's rounding.

    Two layers of float16 activations make some 20 roundings, each 2^-11 of values up to the largest logit.
    """
    params = dataclasses.replace(GREEDY, max_tokens=1, return_context_logits=True)
    texts = [[*prompt, *out] for prompt, out in zip(prompts, got, strict=True)]
    with Engine.open(path, num_threads=1, speculation="off") as engine:
        made = engine.generate(texts, params)
    num_best = 0
    for prompt, out, one in zip(prompts, got, made, strict=True):
        assert len(out) == length
        logits = np.array(one.context_logits)[len(prompt) - 1 : -1]
        chosen = logits[np.arange(len(out)), out]
        behind = logits.max(axis=1) - chosen
        assert behind.max() <= 20 * 2.0**-11 * np.abs(logits).max(), (prompt, out, behind)
        num_best += int((behind == 0).sum())
    assert num_best >= 0.9 * sum(map(len, got))  # near ties are few


def check_engine_runs(path: Path, engine: Engine, *, draws_on_device: bool) -> None:
    """See that an open GPU engine gives the cpu target's tokens: chunks, mixed steps, buckets that come again.

    path : its directory, with a cpu target
    draws_on_device : it has to draw tokens there; logits come to the host only where somebody asks for them
    """
    assert engine.target not in (None, "cpu") and engine.device_use() is not None
    assert engine.model_info.samples_rows == draws_on_device
    for _ in range(2):  # the second time decode steps are replays of graphs, where there are any
        check_greedy(path, PROMPTS, tokens(engine.generate(PROMPTS, GREEDY)))
    # The same tokens on the way that draws: top_k 1 leaves one, whatever the temperature and the seed.
    drawn = dataclasses.replace(GREEDY, max_tokens=6, temperature=0.8, top_k=1, seed=5, logprobs=2)
    made = engine.generate(PROMPTS, drawn)
    check_greedy(path, PROMPTS, tokens(made), 6)
    for one in made:
        for entry in one.outputs[0].logprobs or ():
            (best, best_logprob), (_, second_logprob) = entry.top
            assert best == entry.token_id and 0 >= best_logprob == entry.logprob >= second_logprob
    # With logits asked for the core draws, whatever the device could.
    asked = dataclasses.replace(GREEDY, return_generation_logits=True)
    made = engine.generate(PROMPTS[:2], asked)
    for one in made:
        assert (np.array(one.generation_logits).argmax(axis=-1) == one.token_ids).all()
