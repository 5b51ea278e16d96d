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
