"""n, best_of and beams through the engine: outputs that share their prompt are what they would be by themselves.

Output i of n is the request alone with seed + i, whatever is paused, cancelled or cut on the way; the prompt's blocks
are computed once.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from fake_executor import INFO, FakeModel
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from plansmith.runtime.completion import SequenceOutput
from plansmith.runtime.engine import Completion, Engine, RequestHandle, SamplingParams
from plansmith.runtime.executor import Batch, Executor, Float32Array, ModelInfo, PythonExecutor, cpu_executor
from plansmith.runtime.native_engine import EngineOptions

BLOCK = INFO.tokens_per_block
PROMPT = [(5 * i + 2) % 60 for i in range(30)]  # seven blocks and a half
MANUAL = EngineOptions(manual_step=True)


class WithoutCopies:
    """The fake model on a device that cannot copy blocks."""

    def __init__(self) -> None:
        self._inner = FakeModel()

    def describe(self) -> ModelInfo:
        return self._inner.describe()

    def open(self, num_blocks: int) -> None:
        self._inner.open(num_blocks)

    def step(self, batch: Batch) -> Float32Array:
        return self._inner.step(batch)

    def close(self) -> None:
        self._inner.close()


def fake() -> Executor:
    return PythonExecutor(FakeModel())


def contents(output: SequenceOutput) -> tuple[Any, ...]:
    assert output.logprobs is not None
    entries = tuple((entry.token_id, entry.logprob, entry.top) for entry in output.logprobs)
    return output.token_ids, entries, output.finish_reason, output.stop_reason


def singles(params: SamplingParams, count: int) -> list[SamplingParams]:
    """Return the requests that the outputs of one are like."""
    seed = params.seed or 0
    return [dataclasses.replace(params, n=1, best_of=None, seed=(seed + i) % 2**64) for i in range(count)]


def alone(make: Callable[[], Executor], prompt: Sequence[int], params: SamplingParams) -> SequenceOutput:
    """Run one request in an engine of its own and return its only output."""
    with Engine.from_executor(make(), MANUAL) as engine:
        (completion,) = engine.generate([list(prompt)], params)
    (output,) = completion.outputs
    return output


def check_n(
    make: Callable[[], Executor], prompt: Sequence[int], params: SamplingParams, got: Completion
) -> None:
    assert [output.index for output in got.outputs] == list(range(params.n))
    for output, single in zip(got.outputs, singles(params, params.n), strict=True):
        assert contents(output) == contents(alone(make, prompt, single))


SAMPLED = SamplingParams(
    max_tokens=16,
    temperature=1.2,
    top_p=0.95,
    seed=11,
    repetition_penalty=1.2,
    frequency_penalty=0.2,
    logprobs=2,
)


@pytest.mark.parametrize("n", [2, 4, 8])
@pytest.mark.parametrize("make", [fake, lambda: PythonExecutor(WithoutCopies())], ids=["copies", "no copies"])
@pytest.mark.parametrize("reuse", [True, False])
def test_outputs_are_those_of_single_requests(n: int, make: Callable[[], Executor], reuse: bool) -> None:
    params = dataclasses.replace(SAMPLED, n=n)
    with Engine.from_executor(make(), EngineOptions(manual_step=True, enable_block_reuse=reuse)) as engine:
        (completion,) = engine.generate([PROMPT], params)
        assert engine.stats().used_num_blocks == 0
    check_n(make, PROMPT, params, completion)
    assert len({output.token_ids for output in completion.outputs}) == n


def test_the_last_seeds_wrap_around() -> None:
    params = dataclasses.replace(SAMPLED, n=3, seed=2**64 - 2)
    with Engine.from_executor(fake(), MANUAL) as engine:
        (completion,) = engine.generate([PROMPT], params)
    check_n(fake, PROMPT, params, completion)


@pytest.mark.parametrize("reuse", [True, False])
def test_the_prompt_is_computed_once(reuse: bool) -> None:
    """The others compute its last token, for the logits; and without copies what the last full block does not hold."""
    options = EngineOptions(manual_step=True, enable_block_reuse=reuse)
    for make, again in ((fake(), 1), (PythonExecutor(WithoutCopies()), len(PROMPT) % BLOCK)):
        with Engine.from_executor(make, options) as engine:
            (completion,) = engine.generate([PROMPT], dataclasses.replace(SAMPLED, n=6))
            stats = engine.stats()
        assert stats.num_prompt_tokens == len(PROMPT) + 5 * again
        assert stats.reused_tokens == 5 * (len(PROMPT) - again)
        shared = len(PROMPT) // BLOCK
        assert stats.reused_blocks == 5 * shared and stats.missed_blocks == shared
        assert [output.stats.reused_tokens > 0 for output in completion.outputs] == [False] + 5 * [True]


def test_blocks_are_held_once() -> None:
    with Engine.from_executor(fake(), MANUAL) as engine:
        handle = engine.submit(PROMPT, dataclasses.replace(SAMPLED, n=6, max_tokens=30))
        most = 0
        while not handle.done:
            engine.step()
            most = max(most, engine.stats().used_num_blocks)
    shared = len(PROMPT) // BLOCK
    assert most <= shared + 6 * (-(-(len(PROMPT) + 30) // BLOCK) - shared)


def test_best_of_returns_the_likeliest() -> None:
    params = dataclasses.replace(SAMPLED, n=2, best_of=6)
    with Engine.from_executor(fake(), MANUAL) as engine:
        (completion,) = engine.generate([PROMPT], params)
    every = [alone(fake, PROMPT, single) for single in singles(params, 6)]
    best = sorted(every, key=lambda one: -(one.cumulative_logprob or 0.0))[:2]
    assert [contents(one) for one in completion.outputs] == [contents(one) for one in best]
    assert [one.cumulative_logprob for one in completion.outputs] == [one.cumulative_logprob for one in best]


def test_outputs_end_each_by_itself() -> None:
    """A stop token that some draw early; the others go on to the end."""
    free = [alone(fake, PROMPT, single) for single in singles(SAMPLED, 5)]
    params = dataclasses.replace(SAMPLED, n=5, stop_token_ids=[free[0].token_ids[3], free[3].token_ids[8]])
    with Engine.from_executor(fake(), MANUAL) as engine:
        (completion,) = engine.generate([PROMPT], params)
    check_n(fake, PROMPT, params, completion)
    assert {output.finish_reason for output in completion.outputs} == {"stop", "length"}


def test_streaming_tells_the_outputs_apart() -> None:
    params = dataclasses.replace(SAMPLED, n=3)
    tokens: dict[int, list[int]] = {0: [], 1: [], 2: []}
    with Engine.from_executor(fake()) as engine:
        deltas = list(engine.stream(PROMPT, params))
    for delta in deltas:
        tokens[delta.index] += delta.token_ids
    assert [delta.is_final for delta in deltas] == [False] * (len(deltas) - 1) + [True]
    for index, single in enumerate(singles(params, 3)):
        assert tuple(tokens[index]) == alone(fake, PROMPT, single).token_ids


def test_a_cancel_ends_all_outputs() -> None:
    params = dataclasses.replace(SAMPLED, n=4, max_tokens=30)
    with Engine.from_executor(fake(), MANUAL) as engine:
        handle = engine.submit(PROMPT, params)
        for _ in range(6):
            engine.step()
        handle.cancel()
        while engine.step():
            pass
        completion = handle.result()
        assert engine.stats().used_num_blocks == engine.stats().num_active_requests == 0
    assert {output.finish_reason for output in completion.outputs} == {"cancelled"}
    for output, single in zip(completion.outputs, singles(params, 4), strict=True):
        whole = alone(fake, PROMPT, single)
        assert output.token_ids == whole.token_ids[: len(output.token_ids)]
    assert len(completion.outputs[0].token_ids) >= 4


def test_a_step_that_fails_fails_the_whole_request() -> None:
    with Engine.from_executor(PythonExecutor(FakeModel(fail_at_step=4)), MANUAL) as engine:
        handle = engine.submit(PROMPT, dataclasses.replace(SAMPLED, n=4))
        with pytest.raises(RuntimeError, match="told to fail"):
            handle.result()
        while engine.step():
            pass
        assert engine.stats().used_num_blocks == engine.stats().num_active_requests == 0


# ---------------------------------------------------------------- everything at once


@dataclasses.dataclass(frozen=True)
class Work:
    prompt: tuple[int, ...]
    params: SamplingParams
    submit_before_step: int
    cancel_before_step: int | None


MAX_PROMPT, MAX_OUTPUT, MAX_WIDTH = 24, 14, 4


def works() -> st.SearchStrategy[list[Work]]:
    outputs = st.integers(2, MAX_WIDTH)
    common: dict[str, Any] = {
        "max_tokens": st.integers(1, MAX_OUTPUT),
        "stop_token_ids": st.lists(st.integers(0, INFO.vocab_size - 1), max_size=6),
        "repetition_penalty": st.sampled_from([1.0, 1.3]),
        "frequency_penalty": st.sampled_from([0.0, 0.5]),
        "logprobs": st.just(1),
        "priority": st.sampled_from([0.2, 0.5]),
    }
    several = st.builds(
        SamplingParams,
        n=outputs,
        temperature=st.sampled_from([0.7, 1.5]),
        top_p=st.sampled_from([1.0, 0.8]),
        seed=st.integers(0, 1000),
        **common,
    )
    beams = st.builds(
        SamplingParams,
        beam_width=outputs,
        length_penalty=st.sampled_from([-1.0, 0.0, 1.0, 2.0]),
        early_stopping=st.sampled_from([False, True, "never"]),
        beam_search_diversity_rate=st.sampled_from([0.0, 0.0, 0.5]),
        **common,
    )
    prompt = st.builds(
        lambda length, last: (*PROMPT[:length], last), st.integers(0, MAX_PROMPT - 1), st.integers(0, 3)
    )
    one = st.builds(
        Work,
        prompt=prompt,
        params=st.one_of(several, beams),
        submit_before_step=st.integers(0, 10),
        cancel_before_step=st.one_of(st.none(), st.none(), st.none(), st.integers(1, 25)),
    )
    return st.lists(one, min_size=1, max_size=6)


def options() -> st.SearchStrategy[EngineOptions]:
    shared = MAX_PROMPT // BLOCK
    most = shared + MAX_WIDTH * (-(-(MAX_PROMPT + MAX_OUTPUT) // BLOCK) - shared + 1)
    return st.builds(
        lambda batch_size, extra, policy, blocks, reuse, chunking: EngineOptions(
            max_batch_size=batch_size,
            max_num_tokens=min(INFO.max_num_tokens, batch_size + extra),
            scheduler_policy=policy,
            kv_cache_bytes=blocks * INFO.kv_bytes_per_block,
            enable_block_reuse=reuse,
            chunking_policy=chunking,
            manual_step=True,
        ),
        st.integers(MAX_WIDTH, INFO.max_batch_size),
        st.integers(0, 24),
        st.sampled_from(["guaranteed_no_evict", "max_utilization", "max_utilization"]),
        st.integers(most, 2 * most),
        st.booleans(),
        st.sampled_from(["first_come_first_served", "equal_progress"]),
    )


def run(
    make: Callable[[], Executor], engine_options: EngineOptions, work: Sequence[Work]
) -> tuple[list[Completion], Any]:
    """Return the completions of `work`, submitted and cancelled at its steps, and the engine's last statistics."""
    handles: dict[int, RequestHandle] = {}
    with Engine.from_executor(make(), engine_options) as engine:
        step = 0
        while len(handles) < len(work) or not all(handle.done for handle in handles.values()):
            assert step < 5000, "the engine does not come to an end"
            for i, one in enumerate(work):
                if one.submit_before_step == step:
                    handles[i] = engine.submit(one.prompt, one.params)
                if one.cancel_before_step == step and i in handles:
                    handles[i].cancel()
            engine.step()
            step += 1
        while engine.step():
            pass
        return [handles[i].result() for i in range(len(work))], engine.stats()


def check_beams(make: Callable[[], Executor], one: Work, got: Completion) -> None:
    with Engine.from_executor(make(), MANUAL) as engine:
        (wanted,) = engine.generate([list(one.prompt)], one.params)
    assert [contents(output) for output in got.outputs] == [contents(output) for output in wanted.outputs]


def check(make: Callable[[], Executor], engine_options: EngineOptions, work: Sequence[Work]) -> Any:
    completions, stats = run(make, engine_options, work)
    for one, got in zip(work, completions, strict=True):
        if any(output.finish_reason == "cancelled" for output in got.outputs):
            continue
        if one.params.beam_width > 1:
            check_beams(make, one, got)
        else:
            check_n(make, one.prompt, one.params, got)
    assert stats.used_num_blocks == stats.num_active_requests == stats.num_queued_requests == 0
    assert stats.num_completed_requests == len(work)
    return stats


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(engine_options=options(), work=works())
def test_whatever_runs_beside_them(engine_options: EngineOptions, work: list[Work]) -> None:
    check(fake, engine_options, work)


def test_pauses_change_nothing() -> None:
    """A pool for one of the requests; outputs of n go on where they were, beams begin again."""
    work = [
        Work(tuple(PROMPT[: 20 + i]), dataclasses.replace(SAMPLED, n=4, seed=i, max_tokens=30 - i), i, None)
        for i in range(3)
    ]
    beams = SamplingParams(beam_width=3, max_tokens=28, logprobs=1)
    work += [Work((i, *PROMPT[:12]), beams, i, None) for i in range(3)]
    tight = EngineOptions(
        scheduler_policy="max_utilization", kv_cache_bytes=34 * INFO.kv_bytes_per_block, manual_step=True
    )
    assert check(fake, tight, work).num_pauses > 2


@pytest.mark.parametrize("precision", ["fp32", "int8"])
def test_on_the_cpu_bit_for_bit(precision: str, tiny_engine: Callable[[str, str], Path]) -> None:
    plan = tiny_engine("llama", precision) / "targets" / "cpu" / "model.plan"

    def make() -> Executor:
        return cpu_executor(plan, num_threads=1)

    params = dataclasses.replace(SAMPLED, n=5)
    prompt = [(11 * i + 3) % 320 for i in range(45)]
    work = [
        Work(tuple(prompt), params, 0, None),
        Work(tuple(prompt), SamplingParams(beam_width=3, max_tokens=20, logprobs=1), 2, None),
        Work(tuple(prompt[:20]), dataclasses.replace(params, n=3, seed=5), 4, None),
    ]
    with Engine.from_executor(make(), MANUAL) as probe:
        block_bytes = probe.model_info.kv_bytes_per_block
    for policy in ("guaranteed_no_evict", "max_utilization"):
        small = EngineOptions(
            max_num_tokens=24,
            scheduler_policy=policy,
            kv_cache_bytes=24 * block_bytes,
            manual_step=True,
        )
        check(make, small, work)
