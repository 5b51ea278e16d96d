"""A request's tokens depend on its prompt, parameters and seed alone, whatever runs beside it.

Arrivals, cancels, token budgets, batch limits, policies, KV sizes that force pauses, host memory, reuse and drafts are
drawn at random; steps run by hand, so a failure comes again.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
from engine_switches import OftenRight, switches, with_draft, write_fake_adapter
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
    num_right_drafts: int | None = (
        None  # it brings so many tokens of its output, and then wrong ones; None = none
    )


def min_blocks(info: ModelInfo) -> int:
    """Return the blocks of the largest request alone: with so few, others must be paused."""
    return -(-(MAX_PROMPT + MAX_OUTPUT) // info.tokens_per_block)


def sampling(vocab_size: int, adapters: Sequence[str]) -> st.SearchStrategy[SamplingParams]:
    token = st.integers(0, vocab_size - 1)
    return st.builds(
        SamplingParams,
        max_tokens=st.integers(1, MAX_OUTPUT),
        min_tokens=st.just(0),
        temperature=st.sampled_from([0.0, 0.7, 1.5]),
        top_k=st.sampled_from([0, 0, 5]),
        top_p=st.sampled_from([1.0, 0.8]),
        top_p_decay=st.sampled_from([1.0, 0.8]),
        top_p_min=st.sampled_from([0.0, 0.3]),
        top_p_reset_id=st.one_of(st.none(), token),
        no_repeat_ngram_size=st.sampled_from([0, 0, 1, 3]),
        min_p=st.sampled_from([0.0, 0.05]),
        repetition_penalty=st.sampled_from([1.0, 1.3]),
        frequency_penalty=st.sampled_from([0.0, 0.5]),
        seed=st.integers(0, 2**64 - 1),
        stop_token_ids=st.lists(token, max_size=2),
        logprobs=st.just(3),
        priority=st.sampled_from([0.0, 0.5, 1.0]),
        prompt_logprobs=st.sampled_from([None, None, None, 2]),
        return_generation_logits=st.booleans(),
        adapter=st.sampled_from([None, None, *adapters]),
        cache_salt=st.sampled_from([None, None, None, "other"]),
        max_draft_len=st.sampled_from([None, None, 0, 1]),
    )


def requests(vocab_size: int, adapters: Sequence[str] = ()) -> st.SearchStrategy[list[Request]]:
    # Few different tokens and a common beginning: prompts that share prefixes are what caches get wrong.
    prompt = st.lists(st.integers(0, min(vocab_size - 1, 3)), min_size=1, max_size=MAX_PROMPT).map(tuple)
    one = st.builds(
        Request,
        prompt=prompt,
        params=sampling(vocab_size, adapters),
        submit_before_step=st.integers(0, 12),
        cancel_before_step=st.one_of(st.none(), st.none(), st.integers(1, 25)),
        num_right_drafts=st.one_of(st.none(), st.none(), st.integers(0, MAX_OUTPUT)),
    )
    return st.lists(one, min_size=1, max_size=10)


def run(
    executor: Executor, engine_options: EngineOptions, work: list[Request], adapters: Mapping[str, Path]
) -> tuple[list[Completion], Any]:
    """Return the completions of `work`, submitted and cancelled at its steps, and the engine's last statistics."""
    handles: dict[int, RequestHandle] = {}
    with Engine.from_executor(executor, engine_options) as engine:
        # All or none, so that each has the same slot alone: the fake model's logits depend on it.
        if any(request.params.adapter is not None for request in work):
            for name, path in adapters.items():
                engine.load_adapter(name, path)
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


def output(completion: Completion) -> list[tuple[int, float, Any, bytes]]:
    """Return the tokens with their log-probabilities, and the logits where they were asked for."""
    assert completion.logprobs is not None
    rows = completion.generation_logits
    return [
        (entry.token_id, entry.logprob, entry.top, b"" if rows is None else rows[i].tobytes())
        for i, entry in enumerate(completion.logprobs)
    ]


def with_drafts(request: Request, alone: Completion) -> Request:
    """Return the request with the drafts that it is to bring."""
    if request.num_right_drafts is None:
        return request
    drafts = [*alone.token_ids[: request.num_right_drafts], 0, 1, 2]
    return dataclasses.replace(request, params=dataclasses.replace(request.params, draft_token_ids=drafts))


def check(
    make_executor: Callable[[], Executor],
    engine_options: EngineOptions,
    work: list[Request],
    make_draft: Callable[[], Executor] | None = None,
    adapters: Mapping[str, Path] | None = None,
) -> Any:
    """Compare each request with itself alone in an engine without reuse; return the statistics of the mixed run."""
    chosen = with_draft(engine_options, make_draft) if make_draft is not None else engine_options
    loaded = adapters or {}
    plain = EngineOptions(manual_step=True, enable_block_reuse=False)
    wanted = [
        run(make_executor(), plain, [Request(request.prompt, request.params, 0, None)], loaded)[0][0]
        for request in work
    ]
    together, stats = run(make_executor(), chosen, list(map(with_drafts, work, wanted)), loaded)
    for mixed, alone in zip(together, wanted, strict=True):
        if mixed.finish_reason == "cancelled":
            assert output(mixed) == output(alone)[: len(mixed.token_ids)]
        else:
            assert output(mixed) == output(alone)
            assert (mixed.finish_reason, mixed.stop_reason) == (alone.finish_reason, alone.stop_reason)
            assert mixed.prompt_logprobs == alone.prompt_logprobs
    assert stats.used_num_blocks == 0 and stats.num_active_requests == stats.num_queued_requests == 0
    assert stats.num_completed_requests == len(work)
    return stats


@pytest.fixture(scope="module")
def fake_adapters(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("adapters")
    return {name: write_fake_adapter(folder / name, INFO) for name in "ab"}


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(engine_options=switches(INFO, min_blocks(INFO)), work=requests(INFO.vocab_size, "ab"))
def test_with_the_fake_model(
    fake_adapters: dict[str, Path], engine_options: EngineOptions, work: list[Request]
) -> None:
    check(
        lambda: PythonExecutor(FakeModel()),
        engine_options,
        work,
        lambda: PythonExecutor(OftenRight()),
        fake_adapters,
    )


TIGHT: dict[str, Any] = {
    "scheduler_policy": "max_utilization",
    "kv_cache_bytes": min_blocks(INFO) * INFO.kv_bytes_per_block,
}
ALWAYS: dict[str, Any] = {"max_draft_len": 3, "adaptive_draft_len": False}


@pytest.mark.parametrize("switched", [{}, {"max_num_tokens": 9}, TIGHT, {**ALWAYS, "draft_mode": "model"}])
def test_drafts_that_requests_bring_are_taken(switched: dict[str, Any]) -> None:
    for temperature in (0.0, 1.0):
        params = SamplingParams(max_tokens=MAX_OUTPUT, temperature=temperature, seed=4, logprobs=3)
        work = [Request((i,) * 12, params, i // 3, None, 2 + i) for i in range(12)]
        chosen = EngineOptions(manual_step=True, **switched)
        stats = check(lambda: PythonExecutor(FakeModel()), chosen, work, lambda: PythonExecutor(OftenRight()))
        assert stats.num_accepted_draft_tokens > 30


@pytest.mark.parametrize(
    ("switched", "counted"),
    [
        ({**TIGHT, "pause_policy": "recompute"}, ["num_pauses"]),
        ({**TIGHT, "enable_block_reuse": False}, ["num_pauses"]),
        (
            {**TIGHT, "pause_policy": "swap", "host_cache_bytes": 64 * INFO.kv_bytes_per_block},
            ["num_pauses", "offloaded_blocks", "onboarded_blocks"],
        ),
        ({**ALWAYS, "draft_mode": "ngram", "ngram_min": 1}, ["num_draft_tokens"]),
        ({**ALWAYS, "draft_mode": "model"}, ["num_accepted_draft_tokens"]),
        ({**TIGHT, **ALWAYS, "draft_mode": "model"}, ["num_pauses", "num_accepted_draft_tokens"]),
        ({"max_num_tokens": 8, "chunking_policy": "equal_progress"}, ["reused_tokens"]),
    ],
)
def test_what_is_drawn_does_happen(switched: dict[str, Any], counted: list[str]) -> None:
    """Else the test above would find nothing."""
    params = SamplingParams(max_tokens=MAX_OUTPUT, temperature=0.0, logprobs=3)
    work = [Request((i // 2,) * 20, params, 0, None) for i in range(12)]
    chosen = EngineOptions(manual_step=True, **switched)
    stats = check(lambda: PythonExecutor(FakeModel()), chosen, work, lambda: PythonExecutor(OftenRight()))
    assert all(getattr(stats, name) > 0 for name in counted)


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
        ("llama", "fp8_kv"),
        ("gemma2", "int8_kv"),
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
    # A draft whose blocks have the target's size: the pools hold as many as were drawn.
    small = "int8_kv" if precision.endswith("_kv") else "int4"
    draft = tiny_engine(family, small) / "targets" / "cpu" / "model.plan"
    chosen = data.draw(switches(info, min_blocks(info)))
    check(make, chosen, work, lambda: cpu_executor(draft, num_threads=1))
    num_rows = sum(model.num_compared for model in models)
    # A request that is not cancelled at once has each of its histories in both runs.
    if any(request.cancel_before_step is None for request in work):
        assert num_rows > len(recorded)


@pytest.mark.parametrize("kv", ["fp8_kv", "int8_kv"])
@pytest.mark.parametrize(
    ("switched", "counted"),
    [
        ({}, ["reused_tokens"]),
        ({"blocks": 6, "pause_policy": "recompute"}, ["num_pauses", "reused_tokens"]),
        (
            {"blocks": 6, "pause_policy": "swap", "host_blocks": 64},
            ["num_pauses", "offloaded_blocks", "onboarded_blocks"],
        ),
        ({"max_num_tokens": 8, "chunking_policy": "equal_progress"}, ["reused_tokens"]),
        ({**ALWAYS, "draft_mode": "ngram", "ngram_min": 1}, ["num_draft_tokens"]),
        ({**ALWAYS, "draft_mode": "model"}, ["num_accepted_draft_tokens"]),
    ],
)
def test_switches_with_quantized_pools_bit_for_bit(
    kv: str, switched: dict[str, Any], counted: list[str], tiny_engine: Callable[[str, str], Path]
) -> None:
    """Codes that are copied, swapped, shared between prompts or written in other chunks are the same codes."""
    plans = {name: tiny_engine("llama", name) / "targets" / "cpu" / "model.plan" for name in (kv, "int8_kv")}

    def make(name: str) -> Executor:
        return cpu_executor(plans[name], num_threads=2)

    probe = make(kv)
    info = probe.describe()
    probe.close()
    options = dict(switched)
    sizes: dict[str, Any] = {
        name: options.pop(key) * info.kv_bytes_per_block
        for name, key in (("kv_cache_bytes", "blocks"), ("host_cache_bytes", "host_blocks"))
        if key in options
    }
    if "blocks" in switched:
        sizes["scheduler_policy"] = "max_utilization"
    # Prompts that part in the middle of a block, so that reuse copies parts of blocks.
    params = SamplingParams(max_tokens=MAX_OUTPUT, temperature=0.0, logprobs=3, return_generation_logits=True)
    prompts = [(*range(3, 21 + i), i % 3) for i in range(4)] * 2
    work = [Request(prompt, params, i // 2, None) for i, prompt in enumerate(prompts)]
    chosen = EngineOptions(manual_step=True, **sizes, **options)
    stats = check(lambda: make(kv), chosen, work, lambda: make("int8_kv"))
    assert all(getattr(stats, name) > 0 for name in counted)


def test_the_same_memory_holds_four_times_the_blocks_of_bytes(
    tiny_engine: Callable[[str, str], Path],
) -> None:
    wanted = 1 << 20
    blocks = {}
    for name in ("fp32", "fp8_kv", "int8_kv"):
        executor = cpu_executor(tiny_engine("llama", name) / "targets" / "cpu" / "model.plan", num_threads=1)
        info = executor.describe()
        values = 2 * info.num_layers * info.num_kv_heads * info.head_dim * info.tokens_per_block
        assert info.kv_bytes_per_block == values * (4 if name == "fp32" else 1)
        options = EngineOptions(manual_step=True, kv_cache_bytes=wanted, host_cache_bytes=wanted)
        with Engine.from_executor(executor, options) as engine:
            stats = engine.stats()
        blocks[name] = stats.max_num_blocks
        assert stats.max_num_blocks == stats.host_max_num_blocks == wanted // info.kv_bytes_per_block
        assert stats.kv_cache_bytes == stats.max_num_blocks * info.kv_bytes_per_block
    assert blocks["fp8_kv"] == blocks["int8_kv"] == 4 * blocks["fp32"]
