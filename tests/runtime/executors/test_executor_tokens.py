"""Engines on the double of a GPU give the cpu target's tokens, and break none of the double's rules."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from executor_checks import GREEDY, PROMPTS, check_greedy, tokens
from fake_machine import Machine
from plansmith.runtime.engine import Engine, SamplingParams

SAMPLED = SamplingParams(max_tokens=10, temperature=0.9, seed=11, ignore_eos=True)
GetEngine = Callable[..., Any]


@pytest.fixture
def machine(rtx_engine: GetEngine) -> Iterator[Machine]:
    """Return a machine that knows the llama engine, and see in the end that nothing was wrong or left."""
    made = Machine(rtx_engine())
    yield made
    assert made.problems() == []


@pytest.mark.parametrize("eager", [False, True])
@pytest.mark.parametrize("graphs", ["auto", "own", "off"])
def test_greedy_tokens_are_the_cpu_targets(
    rtx_engine: GetEngine, machine: Machine, graphs: str, eager: bool
) -> None:
    path = rtx_engine().path
    machine.cuda.streams.eager = eager
    with machine.engine(path, cuda_graphs=graphs) as engine:
        got = tokens(engine.generate(PROMPTS, GREEDY))
    check_greedy(path, PROMPTS, got)


@pytest.mark.parametrize("family", ["qwen3", "mistral", "gemma2"])
def test_every_family_runs(rtx_engine: GetEngine, family: str) -> None:
    built = rtx_engine(family)
    machine = Machine(built)
    with machine.engine(built.path) as engine:
        got = tokens(engine.generate(PROMPTS, GREEDY))
    check_greedy(built.path, PROMPTS, got)
    assert machine.problems() == []


def test_logits_are_the_cpu_targets_within_float16(rtx_engine: GetEngine, machine: Machine) -> None:
    path = rtx_engine().path
    params = dataclasses.replace(
        GREEDY, return_generation_logits=True, return_context_logits=True, max_tokens=4
    )
    with machine.engine(path) as engine, Engine.open(path, num_threads=1) as cpu:
        (mine,), (theirs,) = (one.generate([PROMPTS[0]], params) for one in (engine, cpu))
    for name in ("generation_logits", "context_logits"):
        a, b = np.array(getattr(mine, name)), np.array(getattr(theirs, name))
        # Two layers of float16 activations: some 20 roundings of 2^-11 of values up to the largest logit.
        np.testing.assert_allclose(a, b, atol=20 * 2.0**-11 * np.abs(b).max())


def test_prompts_are_cut_into_chunks_beside_decoding(rtx_engine: GetEngine, machine: Machine) -> None:
    path = rtx_engine().path
    prompts = [list(range(5, 80)), [7], list(range(200, 160, -1)), [9, 8, 7], [4] * 40]
    with machine.engine(path, max_num_tokens=12) as engine:
        got = tokens(engine.generate(prompts, GREEDY))
        records = engine.iteration_stats()
    check_greedy(path, prompts, got)
    assert any(one.num_ctx_tokens and one.num_gen_requests for one in records)


def test_cached_prefixes_are_used_and_parts_of_blocks_copied(rtx_engine: GetEngine, machine: Machine) -> None:
    path = rtx_engine().path
    prefix = list(range(40, 77))
    prompts = [prefix, [*prefix, 9, 9, 9], [*prefix[:20], 3], prefix]
    with machine.engine(path) as engine:
        got = [tokens(engine.generate([one], GREEDY))[0] for one in prompts]
        assert engine.stats().reused_tokens > 60
    check_greedy(path, prompts, got)
    assert machine.cuda.calls.counts["cuMemcpy3DAsync"] > 0


def test_sequences_of_one_request_share_their_prompt(rtx_engine: GetEngine, machine: Machine) -> None:
    path = rtx_engine().path
    prompt = list(range(30, 71))
    with machine.engine(path, enable_block_reuse=False) as engine:
        (made,) = engine.generate([prompt], dataclasses.replace(SAMPLED, n=3))
        shared = [list(one.token_ids) for one in made.outputs]
        reused = engine.stats().reused_tokens
        alone = [
            tokens(engine.generate([prompt], dataclasses.replace(SAMPLED, seed=11 + n)))[0] for n in range(3)
        ]
        assert engine.stats().reused_tokens == reused > 0
    assert shared == alone and len({tuple(one) for one in shared}) == 3


@pytest.mark.parametrize("policy", ["swap", "recompute"])
def test_paused_requests_come_back(rtx_engine: GetEngine, machine: Machine, policy: str) -> None:
    path = rtx_engine().path
    prompts = [[n, n + 1, n + 2] * 8 for n in range(3, 11)]
    params = dataclasses.replace(GREEDY, max_tokens=24)
    # 8 requests grow to 48 positions each, 6 blocks; there are 20.
    options = {"kv_cache_bytes": 20 * 8192, "scheduler_policy": "max_utilization", "pause_policy": policy}
    with machine.engine(path, host_cache_bytes=1 << 20 if policy == "swap" else 0, **options) as engine:
        got = tokens(engine.generate(prompts, params))
        stats = engine.stats()
    check_greedy(path, prompts, got, params.max_tokens or 0)
    assert stats.num_pauses > 0
    assert (stats.offloaded_blocks > 0 and stats.onboarded_blocks > 0) == (policy == "swap")


def test_beams_are_the_cpu_targets(rtx_engine: GetEngine, machine: Machine) -> None:
    path = rtx_engine().path
    params = dataclasses.replace(GREEDY, beam_width=3, max_tokens=8)

    def beams(engine: Engine) -> list[dict[tuple[int, ...], float]]:
        made = engine.generate(PROMPTS[:2], params)
        return [{one.token_ids: one.cumulative_logprob for one in outputs.outputs} for outputs in made]

    with machine.engine(path) as engine, Engine.open(path, num_threads=1) as cpu:
        for got, wanted in zip(beams(engine), beams(cpu), strict=True):
            # Two beams may be as good as each other but for float16's rounding.
            assert got == pytest.approx(wanted, abs=0.02)


def test_drafts_by_lookup_change_no_token(rtx_engine: GetEngine, machine: Machine) -> None:
    path = rtx_engine().path
    params = dataclasses.replace(GREEDY, max_tokens=24)
    with machine.engine(path, speculation="ngram", max_draft_len=4, adaptive_draft_len=False) as engine:
        got = tokens(engine.generate(PROMPTS, params))
        assert engine.stats().num_draft_tokens > 0
    check_greedy(path, PROMPTS, got, 24)


def test_drafts_of_a_model_change_no_token(rtx_engine: GetEngine) -> None:
    built = rtx_engine(draft="int4")
    machine = Machine(built)
    with machine.engine(built.path, speculation="model", max_draft_len=4, adaptive_draft_len=False) as engine:
        got = tokens(engine.generate(PROMPTS, GREEDY))
        stats = engine.stats()
    check_greedy(built.path, PROMPTS, got)
    assert stats.num_draft_tokens > 0 and stats.num_accepted_draft_tokens > 0 and stats.num_failed_drafts == 0
    assert machine.problems() == []


def test_a_cancel_frees_its_blocks_and_disturbs_nobody(rtx_engine: GetEngine, machine: Machine) -> None:
    path = rtx_engine().path
    with machine.engine(path, manual_step=True) as engine:
        handles = [engine.submit(one, GREEDY) for one in PROMPTS]
        victims = [engine.submit([50 + n] * 20, dataclasses.replace(GREEDY, max_tokens=60)) for n in range(3)]
        for _ in range(4):
            engine.step()
        for one in victims:
            one.cancel()
        while engine.step():
            pass
        got = tokens(one.result() for one in handles)
        assert [one.result().finish_reason for one in victims] == ["cancelled"] * 3
        assert engine.stats().used_num_blocks == 0
    check_greedy(path, PROMPTS, got)


def drawn(machine: Machine, path: Path, jobs: list[tuple[list[int], SamplingParams]]) -> list[Any]:
    """Return (tokens, log-probabilities) of requests that run together, step by step."""
    with machine.engine(path, manual_step=True) as engine:
        handles = [engine.submit(prompt, params) for prompt, params in jobs]
        while engine.step():
            pass
        made = [one.result() for one in handles]
    return [
        (list(one.token_ids), one.logprobs and [(x.logprob, x.top) for x in one.logprobs]) for one in made
    ]


def test_rows_drawn_on_the_device_are_the_hosts(rtx_engine: GetEngine, machine: Machine) -> None:
    """The kernels draw what the core draws from the same logits, whatever a request wants of them."""
    built = rtx_engine()
    kinds: list[dict[str, Any]] = [
        {"temperature": 0.0},
        {"seed": 1, "top_k": 5},
        {"seed": 2, "top_p": 0.7, "min_p": 0.02},
        {"seed": 3, "repetition_penalty": 1.3, "presence_penalty": 0.5, "frequency_penalty": 0.2},
        {"seed": 4, "logit_bias": {5: 8.0, 9: float("-inf")}, "logprobs": 3},
        {"temperature": 0.0, "no_repeat_ngram_size": 2, "min_tokens": 3, "logprobs": 0},
    ]
    jobs = [
        (PROMPTS[n % len(PROMPTS)], SamplingParams(**{"max_tokens": 3, "temperature": 1.2, **kind}))
        for n, kind in enumerate(kinds)
    ]
    device = Machine(built, device_sampling=True)
    on_device, on_host = drawn(device, built.path, jobs), drawn(machine, built.path, jobs)
    assert on_device == on_host
    assert device.cuda.num_launches > 0 and machine.cuda.num_launches == 0
    assert device.problems() == []
