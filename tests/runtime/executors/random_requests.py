"""Random requests of every kind with the steps at which they come and are cancelled, played on an engine step by step.

A script is a function of its generator, and nothing in it depends on time, so two engines that play it make the same
steps: what they answer can be compared bit for bit.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
from plansmith.runtime.engine import Engine, RequestHandle, SamplingParams
from plansmith.runtime.errors import Error
from plansmith.runtime.guided import GuidedParams

VOCAB_SIZE = 320
_SCHEMA = {
    "type": "object",
    "properties": {"a": {"type": "integer"}, "b": {"enum": ["x", "yz"]}},
    "required": ["a", "b"],
}
_BLOCK_BYTES = 8192  # of the tiny float16 engines: 8 positions


@dataclasses.dataclass(frozen=True)
class Job:
    """A request: submitted before step `at`, cancelled before step `cancel_at` (None = never)."""

    at: int
    prompt: list[int]
    params: SamplingParams
    cancel_at: int | None = None


@dataclasses.dataclass(frozen=True)
class Script:
    """An engine's options and what it is asked."""

    options: dict[str, Any]
    jobs: list[Job]


def random_script(rng: np.random.Generator, num_jobs: int) -> Script:
    """Return options under which steps are cut, blocks run out and prefixes are found, and requests for them."""
    options: dict[str, Any] = {
        "max_num_tokens": int(rng.integers(8, 33)),
        "max_batch_size": int(rng.integers(1, 9)),
        "enable_chunked_context": True,
        "chunking_policy": str(rng.choice(["first_come_first_served", "equal_progress"])),
        "scheduler_policy": str(rng.choice(["guaranteed_no_evict", "max_utilization"])),
        "enable_block_reuse": bool(rng.random() < 0.8),
        "enable_partial_reuse": bool(rng.random() < 0.8),
        "kv_cache_bytes": int(rng.integers(40, 120)) * _BLOCK_BYTES,
        "pause_policy": "recompute",
        "adaptive_draft_len": False,  # which goes by the clock
    }
    if rng.random() < 0.5:
        options |= {"host_cache_bytes": int(rng.integers(4, 64)) * _BLOCK_BYTES, "pause_policy": "swap"}
    if rng.random() < 0.4:
        options |= {"speculation": "ngram", "max_draft_len": int(rng.integers(1, 6))}
    options["queue_order"] = "shortest" if options["max_num_tokens"] % 2 else "arrival"
    prefixes = [rng.integers(3, VOCAB_SIZE, int(rng.integers(1, 40))).tolist() for _ in range(3)]
    jobs = [_random_job(rng, prefixes) for _ in range(num_jobs)]
    return Script(options, sorted(jobs, key=lambda job: job.at))


def _random_job(rng: np.random.Generator, prefixes: list[list[int]]) -> Job:
    prompt = list(prefixes[int(rng.integers(len(prefixes)))]) if rng.random() < 0.6 else []
    prompt = prompt[: int(rng.integers(len(prompt) + 1))]
    # Of few different tokens, so that lookups find something.
    prompt += rng.integers(3, int(rng.choice([8, VOCAB_SIZE])), int(rng.integers(1, 45))).tolist()
    cancel_at = int(rng.integers(0, 40)) if rng.random() < 0.1 else None
    return Job(int(rng.integers(0, 25)), prompt, random_params(rng), cancel_at)


def random_params(rng: np.random.Generator) -> SamplingParams:
    """Return parameters of which each has a chance, as far as they go together."""

    def maybe(share: float) -> bool:
        return bool(rng.random() < share)

    def ids(most: int) -> list[int]:
        return [int(one) for one in rng.integers(0, VOCAB_SIZE, int(rng.integers(1, most + 1)))]

    most = int(rng.integers(1, 14))
    fields: dict[str, Any] = {
        "max_tokens": most,
        "seed": int(rng.integers(0, 2**63)),
        "ignore_eos": maybe(0.6),
    }
    if maybe(0.3):
        fields |= {"min_tokens": int(rng.integers(0, most + 1))}
    if maybe(0.3):
        fields |= {"repetition_penalty": float(rng.uniform(0.5, 2))}
    if maybe(0.2):
        fields |= {
            "presence_penalty": float(rng.uniform(-2, 2)),
            "frequency_penalty": float(rng.uniform(-1, 1)),
        }
    if maybe(0.3):
        biases = [float(rng.uniform(-20, 20)), float("-inf"), 0.0]
        fields |= {"logit_bias": {one: biases[int(rng.integers(3))] for one in ids(12)}}
    if maybe(0.2):
        fields |= {"bad_words": [ids(1), ids(3)]}
    if maybe(0.2):
        fields |= {"no_repeat_ngram_size": int(rng.integers(1, 4))}
    if maybe(0.2):
        fields |= {"stop_token_ids": ids(40)}
    if maybe(0.1):
        fields |= {"stop_words": [ids(1), ids(2)]}
    if maybe(0.3):
        fields |= {"logprobs": int(rng.integers(0, 21))}
    fields |= {"priority": float(rng.choice([0.1, 0.5, 0.9])), "tenant": int(rng.integers(1, 3))}
    if maybe(0.08):
        return SamplingParams(**fields, beam_width=int(rng.integers(2, 4)), temperature=0.0)
    if maybe(0.15):
        fields |= {"draft_token_ids": ids(6)}
    if maybe(0.1):
        fields |= {"prompt_logprobs": int(rng.integers(0, 5))}
    if maybe(0.05):
        fields |= {"return_generation_logits": True}
    if maybe(0.15):
        guided: list[dict[str, Any]] = [
            {"json_schema": _SCHEMA},
            {"regex": "[ab]{2,5}"},
            {"choice": ["cat", "dog"]},
        ]
        fields |= {
            "guided": GuidedParams(**guided[int(rng.integers(3))]),
            "ignore_eos": False,
            "min_tokens": 0,
        }
    if maybe(0.25):
        return SamplingParams(**fields, temperature=0.0)
    fields |= {"temperature": float(rng.choice([0.05, 0.8, 1.0, 3.0]))}
    if maybe(0.5):
        fields |= {"top_k": int(rng.choice([1, 2, 17, 319, 320, 5000]))}
    if maybe(0.5):
        fields |= {"top_p": float(rng.choice([1e-6, 0.3, 0.9, 0.999, 1.0]))}
    if maybe(0.2):
        fields |= {"top_p_decay": float(rng.uniform(0.5, 1)), "top_p_min": 0.1, "top_p_reset_id": ids(1)[0]}
    if maybe(0.3):
        fields |= {"min_p": float(rng.choice([0.0, 0.01, 0.5, 1.0]))}
    if maybe(0.2):
        fields |= {"n": int(rng.integers(2, 4))}
    return SamplingParams(**fields)


def play(engine: Engine, script: Script, most_steps: int = 3000) -> list[Any]:
    """Return each job's answer, or the words of its error; every request has ended then.

    engine : opened with manual_step and the script's options
    """
    given: list[RequestHandle | str] = []
    step, cancels = 0, {}
    while True:
        while len(given) < len(script.jobs) and script.jobs[len(given)].at <= step:
            job = script.jobs[len(given)]
            try:
                handle: RequestHandle | str = engine.submit(job.prompt, job.params)
            except Error as error:
                handle = f"{type(error).__name__}: {error}"
            if job.cancel_at is not None:
                cancels[len(given)] = job.cancel_at
            given.append(handle)
        for index in [index for index, at in cancels.items() if at <= step]:
            del cancels[index]
            if not isinstance(one := given[index], str):
                one.cancel()
        did_work = engine.step()
        step += 1
        assert step < most_steps, "the requests do not end"
        if not did_work and len(given) == len(script.jobs) and not cancels:
            break
    return [one if isinstance(one, str) else _answer(one) for one in given]


def _answer(handle: RequestHandle) -> Any:
    try:
        made = handle.result()
    except Error as error:
        return f"{type(error).__name__}: {error}"
    whole = [None if one is None else (one.logprob, one.top) for one in made.prompt_logprobs or ()]
    return [whole] + [
        (
            list(one.token_ids),
            one.finish_reason,
            [(entry.logprob, entry.top) for entry in one.logprobs or ()],
            None if one.generation_logits is None else np.array(one.generation_logits).tobytes(),
        )
        for one in made.outputs
    ]
