"""A request's tokens depend on its prompt, parameters and seed alone, whatever runs beside it.

Arrivals, token budgets, batch limits, policies, KV sizes that force pauses, and cancels are drawn at random; steps run
by hand, so a failure is the same each time.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from fake_executor import INFO, FakeModel, History, RecordingModel, greedy
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from plansmith.runtime.engine import Completion, Engine, RequestHandle, SamplingParams
from plansmith.runtime.executor import Executor, ModelInfo, PythonExecutor, cpu_executor
from plansmith.runtime.native_engine import EngineOptions

MAX_PROMPT, MAX_OUTPUT = 30, 16


@dataclasses.dataclass(frozen=True)
class Request:
    prompt: tuple[int, ...]
    params: SamplingParams
    submit_before_step: int
    cancel_before_step: int | None


def min_blocks(info: ModelInfo) -> int:
    """Return the blocks of the largest request alone: with so few, others must be paused."""
    return -(-(MAX_PROMPT + MAX_OUTPUT) // info.tokens_per_block)


def sampling(vocab_size: int) -> st.SearchStrategy[SamplingParams]:
    token = st.integers(0, vocab_size - 1)
    return st.builds(
        SamplingParams,
        max_tokens=st.integers(1, MAX_OUTPUT),
        min_tokens=st.just(0),
        temperature=st.sampled_from([0.0, 0.7, 1.5]),
        top_k=st.sampled_from([0, 0, 5]),
        top_p=st.sampled_from([1.0, 0.8]),
        min_p=st.sampled_from([0.0, 0.05]),
        repetition_penalty=st.sampled_from([1.0, 1.3]),
        frequency_penalty=st.sampled_from([0.0, 0.5]),
        seed=st.integers(0, 2**64 - 1),
        stop_token_ids=st.lists(token, max_size=2),
        logprobs=st.just(3),
        priority=st.sampled_from([0.0, 0.5, 1.0]),
    )


def requests(vocab_size: int) -> st.SearchStrategy[list[Request]]:
    # Few different tokens and a common beginning: prompts that share prefixes are what caches get wrong.
    prompt = st.lists(st.integers(0, min(vocab_size - 1, 3)), min_size=1, max_size=MAX_PROMPT).map(tuple)
    one = st.builds(
        Request,
        prompt=prompt,
        params=sampling(vocab_size),
        submit_before_step=st.integers(0, 12),
        cancel_before_step=st.one_of(st.none(), st.none(), st.integers(1, 25)),
    )
    return st.lists(one, min_size=1, max_size=10)


def options(info: ModelInfo) -> st.SearchStrategy[EngineOptions]:
    return st.builds(
        lambda batch_size, extra, policy, blocks: EngineOptions(
            max_batch_size=batch_size,
            max_num_tokens=min(info.max_num_tokens, batch_size + extra),
            scheduler_policy=policy,
            kv_cache_bytes=blocks * info.kv_bytes_per_block,
            manual_step=True,
        ),
        st.integers(1, info.max_batch_size),
        st.integers(0, 24),
        st.sampled_from(["guaranteed_no_evict", "max_utilization", "max_utilization"]),
        st.integers(min_blocks(info), 3 * min_blocks(info)),
    )


def run(
    executor: Executor, engine_options: EngineOptions, work: list[Request]
) -> tuple[list[Completion], Any]:
    """Return the completions of `work`, submitted and cancelled at its steps, and the engine's last statistics."""
    handles: dict[int, RequestHandle] = {}
    with Engine.from_executor(executor, engine_options) as engine:
        step = 0
        while len(handles) < len(work) or not all(h.done for h in handles.values()):
            assert step < 3000, "the engine does not come to an end"
            for i, request in enumerate(work):
                if request.submit_before_step == step:
                    handles[i] = engine.submit(request.prompt, request.params)
                if request.cancel_before_step == step and i in handles:
                    handles[i].cancel()
            engine.step()
            step += 1
        while engine.step():
            pass
        stats = engine.stats()
        return [handles[i].result() for i in range(len(work))], stats


def output(completion: Completion) -> list[tuple[int, float, Any]]:
    assert completion.logprobs is not None
    return [(entry.token_id, entry.logprob, entry.top) for entry in completion.logprobs]


def check(make_executor: Callable[[], Executor], engine_options: EngineOptions, work: list[Request]) -> Any:
    """Compare each request with itself alone in an engine; return the statistics of the mixed run."""
    together, stats = run(make_executor(), engine_options, work)
    for request, mixed in zip(work, together, strict=True):
        by_itself = dataclasses.replace(request, submit_before_step=0, cancel_before_step=None)
        (alone,), _ = run(make_executor(), EngineOptions(manual_step=True), [by_itself])
        if mixed.finish_reason == "cancelled":
            assert output(mixed) == output(alone)[: len(mixed.token_ids)]
        else:
            assert output(mixed) == output(alone)
            assert (mixed.finish_reason, mixed.stop_reason) == (alone.finish_reason, alone.stop_reason)
    assert stats.used_num_blocks == 0 and stats.num_active_requests == stats.num_queued_requests == 0
    assert stats.num_completed_requests == len(work)
    return stats


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(engine_options=options(INFO), work=requests(INFO.vocab_size))
def test_with_the_fake_model(engine_options: EngineOptions, work: list[Request]) -> None:
    check(lambda: PythonExecutor(FakeModel()), engine_options, work)


def test_the_kv_sizes_drawn_do_force_pauses() -> None:
    params = SamplingParams(max_tokens=MAX_OUTPUT, temperature=0.0, logprobs=3)
    work = [Request((i,) * 20, params, 0, None) for i in range(6)]
    tiny = EngineOptions(
        scheduler_policy="max_utilization",
        kv_cache_bytes=min_blocks(INFO) * INFO.kv_bytes_per_block,
        manual_step=True,
    )
    stats = check(lambda: PythonExecutor(FakeModel()), tiny, work)
    assert stats.num_pauses > 0
    assert stats.num_prompt_tokens > 6 * 20, "what a pause threw away is computed again"


@pytest.mark.parametrize("policy", ["guaranteed_no_evict", "max_utilization"])
@pytest.mark.parametrize("budget", [8, 9, 13, 32])
def test_every_chunk_budget_gives_the_models_own_tokens(policy: str, budget: int) -> None:
    model = FakeModel()
    chosen = EngineOptions(max_num_tokens=budget, max_batch_size=8, scheduler_policy=policy, manual_step=True)
    prompts = [[i] * (5 * i + 1) for i in range(9)]
    with Engine.from_executor(PythonExecutor(model), chosen) as engine:
        completions = engine.generate(prompts, SamplingParams(max_tokens=10, temperature=0.0))
    assert [list(c.token_ids) for c in completions] == [greedy(p, 10) for p in prompts]
    assert model.max_num_tokens_seen <= budget


def test_the_recorder_finds_logits_that_depend_on_the_batch() -> None:
    """The test of the test below: a model whose logits move with the batch size must not pass."""

    class Leaky(FakeModel):
        def step(self, batch: Any) -> Any:
            return super().step(batch) + len(batch.query_lens) * 1e-6

    recorded: dict[History, bytes] = {}
    params = SamplingParams(max_tokens=4, temperature=0.0)
    for prompts in ([[1, 2]], [[1, 2], [3]]):
        executor = PythonExecutor(RecordingModel(PythonExecutor(Leaky()), recorded))
        with Engine.from_executor(executor, EngineOptions(manual_step=True)) as engine:
            if len(prompts) == 1:
                engine.generate(prompts, params)
            else:
                with pytest.raises(RuntimeError, match="other logits"):
                    engine.generate(prompts, params)


@pytest.mark.parametrize(
    ("family", "precision"),
    [
        ("llama", "fp32"),
        ("llama", "bf16"),
        ("llama", "int8"),
        ("llama", "int4"),
        ("gemma2", "fp32"),
        ("phi3", "int8"),
    ],
)
@settings(
    max_examples=12,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture],
)
@given(data=st.data())
def test_with_the_cpu_executor_bit_for_bit(
    family: str, precision: str, data: st.DataObject, tiny_engine: Callable[[str, str], Path]
) -> None:
    """Every logits row, of any schedule and any number of threads, has the bits of the same history before."""
    plan = tiny_engine(family, precision) / "targets" / "cpu" / "model.plan"
    probe = cpu_executor(plan, num_threads=1)
    info = probe.describe()
    probe.close()
    recorded: dict[History, bytes] = {}
    models: list[RecordingModel] = []

    def make() -> Executor:
        threads = 1 + len(models) % 3
        models.append(RecordingModel(cpu_executor(plan, num_threads=threads), recorded))
        return PythonExecutor(models[-1])

    work = data.draw(requests(info.vocab_size))
    check(make, data.draw(options(info)), work)
    num_rows = sum(model.num_compared for model in models)
    # A request that is not cancelled at once has each of its histories in both runs.
    if any(request.cancel_before_step is None for request in work):
        assert num_rows > len(recorded)
