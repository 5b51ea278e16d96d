"""What a request can ask for beside text: several outputs, beams, log-probabilities, logits, processors, adapters."""

from __future__ import annotations

import asyncio
import dataclasses
import gc
import json
import math
import resource
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.numpy
from fake_executor import INFO, FakeModel, fake_executor, greedy, logits_of
from plansmith.runtime import errors
from plansmith.runtime._native import Native
from plansmith.runtime.async_engine import AsyncEngine
from plansmith.runtime.engine import Completion, Delta, Engine, RetentionRange, SamplingParams
from plansmith.runtime.executor import PythonExecutor
from plansmith.runtime.native_engine import EngineOptions

PROMPT = [1, 2, 3, 4, 5, 6]
GREEDY = SamplingParams(max_tokens=8, temperature=0.0)
SAMPLED = SamplingParams(max_tokens=8, temperature=1.0, seed=5)


def log_softmax(row: Any) -> Any:
    row = row.astype(np.float64)
    return row - row.max() - math.log(np.exp(row - row.max()).sum())


def model_logprobs(prompt: list[int], tokens: tuple[int, ...]) -> list[float]:
    """Return what the fake model itself thinks of each token behind the prompt."""
    history = list(prompt)
    values = []
    for token in tokens:
        values.append(float(log_softmax(logits_of(history))[token]))
        history.append(token)
    return values


@pytest.fixture
def engine() -> Iterator[Engine]:
    with Engine.from_executor(fake_executor()) as opened:
        yield opened


def eventually(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < deadline, "it did not come true within 20 s"
        time.sleep(0.005)


def one(engine: Engine, params: SamplingParams, prompt: list[int] = PROMPT) -> Completion:
    return engine.generate(prompt, params)[0]


# ---------------------------------------------------------------- several outputs


def test_output_i_of_n_is_that_of_seed_plus_i(engine: Engine) -> None:
    completion = one(engine, dataclasses.replace(SAMPLED, n=4))
    alone = [one(engine, dataclasses.replace(SAMPLED, seed=5 + i)).token_ids for i in range(4)]
    assert [output.token_ids for output in completion.outputs] == alone
    assert len(set(alone)) > 1
    assert [output.index for output in completion.outputs] == [0, 1, 2, 3]
    assert completion.token_ids == alone[0] and completion.finish_reason == "length"
    assert completion.usage == {"prompt_tokens": 6, "completion_tokens": 32, "total_tokens": 38}
    assert completion.stats.num_prompt_tokens == 6 and completion.stats.num_generated_tokens == 32


def test_the_deltas_of_n_outputs_carry_their_index_and_the_last_is_final(engine: Engine) -> None:
    deltas = list(engine.stream(PROMPT, dataclasses.replace(SAMPLED, n=3)))
    completion = one(engine, dataclasses.replace(SAMPLED, n=3))
    for output in completion.outputs:
        own = [delta for delta in deltas if delta.index == output.index]
        assert tuple(t for delta in own for t in delta.token_ids) == output.token_ids
        assert [delta.finish_reason for delta in own[:-1]] == [None] * (len(own) - 1)
        assert own[-1].finish_reason == "length" and own[-1].stats is not None
    assert [delta.is_final for delta in deltas] == [False] * (len(deltas) - 1) + [True]


def test_best_of_returns_the_likeliest(engine: Engine) -> None:
    every = one(engine, dataclasses.replace(SAMPLED, n=6, logprobs=0))
    ranked = sorted(every.outputs, key=lambda output: -(output.cumulative_logprob or 0.0))
    best = one(engine, dataclasses.replace(SAMPLED, n=2, best_of=6))
    assert [output.token_ids for output in best.outputs] == [output.token_ids for output in ranked[:2]]
    assert [output.index for output in best.outputs] == [0, 1]
    assert best.logprobs is None and best.cumulative_logprob == ranked[0].cumulative_logprob
    own = sum(model_logprobs(PROMPT, best.token_ids))
    assert best.cumulative_logprob == pytest.approx(own, abs=1e-3)


def test_best_of_gives_its_deltas_at_the_end_and_is_not_streamed(engine: Engine) -> None:
    params = dataclasses.replace(SAMPLED, n=2, best_of=5)
    seen: list[Delta | errors.Error] = []
    completion = engine.submit(PROMPT, params, on_delta=seen.append).result(timeout=20)
    assert [(d.index, d.token_ids, d.is_final) for d in seen if isinstance(d, Delta)] == [
        (0, completion.outputs[0].token_ids, False),
        (1, completion.outputs[1].token_ids, True),
    ]
    with pytest.raises(errors.InvalidArgumentError, match="best_of 5 with n 2 cannot be streamed"):
        engine.stream(PROMPT, params)

    async def stream() -> None:
        async with AsyncEngine.from_executor(fake_executor()) as own:
            async for _ in own.stream(PROMPT, params):
                pass

    with pytest.raises(errors.InvalidArgumentError, match="cannot be streamed"):
        asyncio.run(stream())


def test_a_cancelled_request_of_several_outputs_ends_all_of_them() -> None:
    with Engine.from_executor(PythonExecutor(FakeModel(step_s=0.02))) as engine:
        handle = engine.submit(PROMPT, dataclasses.replace(SAMPLED, n=3, max_tokens=50))
        next(handle)
        handle.cancel()
        completion = handle.result(timeout=20)
        assert [output.finish_reason for output in completion.outputs] == ["cancelled"] * 3
        deltas = list(handle)
        assert sum(delta.is_final for delta in deltas) == 1 and deltas[-1].is_final
        eventually(lambda: not engine._states)


def test_a_failing_step_fails_the_whole_request_once() -> None:
    with Engine.from_executor(PythonExecutor(FakeModel(fail_at_step=3))) as engine:
        seen: list[Any] = []
        handle = engine.submit(PROMPT, dataclasses.replace(SAMPLED, n=3, max_tokens=20), on_delta=seen.append)
        with pytest.raises(errors.ExecutorError, match="told to fail"):
            handle.result(timeout=20)
        assert [type(item) for item in seen].count(errors.ExecutorError) == 1
        assert isinstance(seen[-1], errors.ExecutorError)
        eventually(lambda: not engine._states)  # the ends of the others come after the error


def test_async_outputs() -> None:
    async def body() -> Completion:
        async with AsyncEngine.from_executor(fake_executor()) as engine:
            streamed = [d async for d in engine.stream(PROMPT, dataclasses.replace(SAMPLED, n=3))]
            assert streamed[-1].is_final and {d.index for d in streamed} == {0, 1, 2}
            return await engine.generate(PROMPT, dataclasses.replace(SAMPLED, n=3, best_of=4))

    assert len(asyncio.run(body()).outputs) == 3


# ---------------------------------------------------------------- beams


def naive_beams(prompt: list[int], width: int, length: int) -> list[tuple[float, tuple[int, ...]]]:
    """Return the beams of a fixed length without end ids, best first: the plain algorithm."""
    beams: list[tuple[float, tuple[int, ...]]] = [(0.0, ())]
    for _ in range(length):
        grown = [
            (score + float(value), (*tokens, token))
            for score, tokens in beams
            for token, value in enumerate(log_softmax(logits_of([*prompt, *tokens])))
        ]
        beams = sorted(grown, key=lambda beam: -beam[0])[:width]
    return [(score / length, tokens) for score, tokens in beams]


@pytest.mark.parametrize("width", [2, 3, 5])
def test_beams_are_those_of_the_plain_algorithm(engine: Engine, width: int) -> None:
    completion = one(engine, SamplingParams(max_tokens=6, beam_width=width))
    wanted = naive_beams(PROMPT, width, 6)
    assert [output.token_ids for output in completion.outputs] == [tokens for _, tokens in wanted]
    for output, (score, _) in zip(completion.outputs, wanted, strict=True):
        assert output.cumulative_logprob == pytest.approx(score * 6, abs=1e-3)


def test_beams_come_at_the_end(engine: Engine) -> None:
    deltas = list(engine.stream(PROMPT, SamplingParams(max_tokens=6, beam_width=3, logprobs=1)))
    assert [len(delta.token_ids) for delta in deltas] == [6, 6, 6]
    assert [delta.index for delta in deltas] == [0, 1, 2] and deltas[-1].is_final
    assert deltas[0].logprobs is not None and len(deltas[0].logprobs) == 6


# ---------------------------------------------------------------- log-probabilities and logits


def test_prompt_logprobs_are_the_models(engine: Engine) -> None:
    params = dataclasses.replace(GREEDY, prompt_logprobs=2)
    engine.generate(PROMPT, GREEDY)  # what is cached does not matter
    entries = one(engine, params).prompt_logprobs
    assert entries is not None and entries[0] is None and len(entries) == len(PROMPT)
    for i, entry in enumerate(entries[1:], start=1):
        assert entry is not None and entry.token_id == PROMPT[i]
        row = log_softmax(logits_of(PROMPT[:i]))
        assert entry.logprob == pytest.approx(float(row[PROMPT[i]]), abs=1e-4)
        assert [token for token, _ in entry.top] == np.argsort(-row)[:2].tolist()
    bare = one(engine, dataclasses.replace(GREEDY, prompt_logprobs=0)).prompt_logprobs
    assert bare is not None and bare[1] is not None and bare[1].top == ()
    assert one(engine, GREEDY).prompt_logprobs is None


def test_logits_of_prompt_and_output_are_the_models_bit_for_bit(engine: Engine) -> None:
    params = dataclasses.replace(GREEDY, return_context_logits=True, return_generation_logits=True)
    completion = one(engine, params)
    context, rows = completion.context_logits, completion.generation_logits
    assert context is not None and context.shape == (6, 64)
    assert rows is not None and rows.shape == (8, 64)
    for i in range(6):
        assert context[i].tobytes() == logits_of(PROMPT[: i + 1]).tobytes()
    for i in range(8):
        assert rows[i].tobytes() == logits_of([*PROMPT, *completion.token_ids[:i]]).tobytes()
    plain = one(engine, GREEDY)
    assert plain.context_logits is None and plain.generation_logits is None
    assert plain.token_ids == completion.token_ids


def test_each_output_has_its_own_logits_and_the_prompt_has_one(engine: Engine) -> None:
    completion = one(
        engine,
        dataclasses.replace(SAMPLED, n=2, prompt_logprobs=0, return_generation_logits=True),
    )
    assert completion.prompt_logprobs is not None and len(completion.prompt_logprobs) == 6
    for output in completion.outputs:
        assert output.generation_logits is not None
        last = logits_of([*PROMPT, *output.token_ids[:-1]])
        assert output.generation_logits[-1].tobytes() == last.tobytes()


@pytest.mark.parametrize(
    "sampling", [GREEDY, dataclasses.replace(SAMPLED, n=2), dataclasses.replace(SAMPLED, best_of=2)]
)
def test_deltas_bring_the_rows_of_their_tokens(engine: Engine, sampling: SamplingParams) -> None:
    deltas = list(engine.submit(PROMPT, dataclasses.replace(sampling, return_generation_logits=True)))
    completion = deltas[-1].completion
    assert completion is not None
    for output in completion.outputs:
        own = [d for d in deltas if d.index == output.index and d.token_ids]
        assert all(
            d.generation_logits is not None and len(d.generation_logits) == len(d.token_ids) for d in own
        )
        rows = np.concatenate([d.generation_logits for d in own])
        assert output.generation_logits is not None and rows.tobytes() == output.generation_logits.tobytes()
    assert all(d.generation_logits is None for d in engine.submit(PROMPT, sampling))


@pytest.mark.parametrize(
    "sampling", [GREEDY, dataclasses.replace(SAMPLED, n=2), dataclasses.replace(SAMPLED, best_of=2)]
)
def test_what_is_asked_of_the_prompt_comes_with_the_first_delta(
    engine: Engine, sampling: SamplingParams
) -> None:
    params = dataclasses.replace(sampling, prompt_logprobs=1, return_context_logits=True)
    deltas = list(engine.submit(PROMPT, params))
    completion = deltas[-1].completion
    assert completion is not None and completion.context_logits is not None
    assert completion.context_logits.shape == (6, 64) and completion.prompt_logprobs is not None
    (first,) = [d for d in deltas if d.context_logits is not None]
    assert first is next(d for d in deltas if d.index == 0)
    assert first.context_logits is completion.context_logits
    assert first.prompt_logprobs == completion.prompt_logprobs
    assert [d.prompt_logprobs for d in deltas if d is not first] == [None] * (len(deltas) - 1)


def test_top_p_decays_and_comes_back(engine: Engine) -> None:
    """With nothing left of the nucleus but its best token, only the first one and those behind a reset are drawn."""
    first = {one(engine, dataclasses.replace(SAMPLED, seed=seed)).token_ids[0] for seed in range(40)}
    assert len(first) > 10
    decaying = dataclasses.replace(SAMPLED, max_tokens=6, top_p_decay=1e-6)
    for seed in range(10):
        tokens = one(engine, dataclasses.replace(decaying, seed=seed)).token_ids
        assert list(tokens[1:]) == greedy([*PROMPT, tokens[0]], 5)
    tail = greedy([*PROMPT, 7], 5)
    forced = dataclasses.replace(decaying, logit_bias={}, top_p_reset_id=tail[2])
    (done,) = engine.generate([[*PROMPT]], dataclasses.replace(forced, n=200))
    outputs = [o.token_ids for o in done.outputs if tail[2] in o.token_ids[:-1]]
    after = {o[: o.index(tail[2]) + 1]: set[int]() for o in outputs}
    for output in outputs:
        after[output[: output.index(tail[2]) + 1]].add(output[output.index(tail[2]) + 1])
    assert max(map(len, after.values())) > 1, "behind the reset token it is drawn again"
    least = dataclasses.replace(SAMPLED, top_p=0.5, top_p_min=0.5, top_p_decay=0.1)
    assert one(engine, least).token_ids == one(engine, dataclasses.replace(SAMPLED, top_p=0.5)).token_ids


def test_logits_are_freed_with_the_arrays(engine: Engine) -> None:
    """A thousand prompts' logits of 48 x 64 floats each; what is kept is one array."""
    params = dataclasses.replace(GREEDY, max_tokens=1, return_context_logits=True)
    engine.generate([[i % 64] * 48 for i in range(20)], params)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    for _ in range(10):
        engine.generate([[i % 64] * 48 for i in range(100)], params)
    assert (
        resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 8 << 10
    )  # KiB; leaked: 12 MB and more


# ---------------------------------------------------------------- logits processors


def test_a_processor_changes_the_logits_in_place(engine: Engine) -> None:
    seen: list[list[int]] = []

    def only_even(token_ids: Any, logits: Any) -> None:
        seen.append(token_ids.tolist())
        assert not token_ids.flags.writeable
        logits[1::2] = -np.inf

    completion = one(engine, dataclasses.replace(GREEDY, logits_processor=only_even, logprobs=0))
    history = list(PROMPT)
    for token in completion.token_ids:
        row = logits_of(history)
        row[1::2] = -np.inf
        assert token == int(np.argmax(row))
        history.append(token)
    assert seen == [history[:n] for n in range(len(PROMPT), len(history))]
    assert not engine._core._processors, "let go with the last event"


def test_an_exception_in_a_processor_fails_its_request_alone_with_its_words(engine: Engine) -> None:
    def broken(_token_ids: Any, _logits: Any) -> None:
        raise KeyError("no ünit")

    others = [engine.submit([i], GREEDY) for i in range(4)]
    with pytest.raises(errors.InvalidArgumentError, match=r"the logits processor raised KeyError: .no ünit"):
        one(engine, dataclasses.replace(GREEDY, logits_processor=broken))
    assert [list(handle.result(20).token_ids) for handle in others] == [greedy([i], 8) for i in range(4)]
    with pytest.raises(errors.InvalidArgumentError, match="SystemExit"):
        one(engine, dataclasses.replace(GREEDY, n=3, logits_processor=lambda *_: exit(3)))


def test_a_processor_outlives_an_interrupt_behind_its_submission(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ctrl-C on the thread that submits, when the core has the request already and will call the processor."""
    check = Native.check
    calls: list[bool] = []
    go_on = threading.Event()

    def interrupted(core: Native, status: int) -> None:
        if threading.current_thread() is threading.main_thread():
            raise KeyboardInterrupt
        check(core, status)

    monkeypatch.setattr(Native, "check", interrupted)
    with pytest.raises(KeyboardInterrupt):
        engine.submit(
            PROMPT, dataclasses.replace(GREEDY, logits_processor=lambda *_: calls.append(go_on.wait(10)))
        )
    monkeypatch.undo()
    assert len(engine._core._processors) == 1
    go_on.set()
    deadline = time.monotonic() + 10
    while engine._core._processors and time.monotonic() < deadline:
        time.sleep(0.01)
    assert len(calls) == 8 and not engine._core._processors


def test_a_processor_may_close_its_own_engine() -> None:
    """As the garbage collector may, on the thread that the core waits for."""
    model = FakeModel()
    engine = Engine.from_executor(PythonExecutor(model))
    handle = engine.submit(
        PROMPT, dataclasses.replace(GREEDY, logits_processor=lambda *_: engine._core.close())
    )
    eventually(lambda: model.closed == 1)
    engine.close()
    with pytest.raises(errors.ShutdownError):
        handle.result(timeout=20)


# ---------------------------------------------------------------- the prefix cache


def test_an_equal_prefix_is_not_computed_again(engine: Engine) -> None:
    prompt = list(range(1, 41))
    first, second = one(engine, GREEDY, prompt), one(engine, GREEDY, prompt)
    assert second.token_ids == first.token_ids
    assert first.stats.reused_tokens == 0 and second.stats.reused_tokens >= 36
    assert first.stats.kv_cache_hit_rate == 0 and second.stats.kv_cache_hit_rate > 0.8
    assert engine.stats().reused_tokens == second.stats.reused_tokens
    assert 0 < engine.stats().kv_cache_hit_rate < 1


def test_other_salts_share_nothing(engine: Engine) -> None:
    prompt = list(range(1, 41))
    reused = [
        one(engine, dataclasses.replace(GREEDY, cache_salt=salt), prompt).stats.reused_tokens
        for salt in (None, "a", 7, "a", "b", 7)
    ]
    assert [count > 0 for count in reused] == [False, False, False, True, False, True]


def test_reuse_can_be_switched_off() -> None:
    with Engine.from_executor(fake_executor(), EngineOptions(enable_block_reuse=False)) as engine:
        prompt = list(range(1, 41))
        assert [one(engine, GREEDY, prompt).stats.reused_tokens for _ in range(2)] == [0, 0]


def test_kv_events_tell_what_is_cached() -> None:
    with Engine.from_executor(fake_executor(), EngineOptions(max_kv_events=1000)) as engine:
        created = engine.kv_events()
        assert [(e.kind, e.level) for e in created][:1] == [("created", "device")]
        prompt = list(range(1, 14))
        ranges = [RetentionRange(0, 4, 90, 10_000), RetentionRange(4, None, 10)]
        one(engine, dataclasses.replace(GREEDY, max_tokens=1, cache_salt=9, retention=ranges), prompt)
        stored = [e for e in engine.kv_events() if e.kind == "stored"]
        assert [e.token_ids for e in stored] == [tuple(prompt[i : i + 4]) for i in (0, 4, 8)]
        assert [e.parent_hash for e in stored] == [0, *(e.block_hash for e in stored[:-1])]
        assert [e.priority for e in stored] == [90, 10, 10] and {e.cache_salt for e in stored} == {9}
        assert engine.kv_events() == []


def test_blocks_come_back_from_the_host() -> None:
    # "swap": whether copies pay is not measured, which on a busy machine they may not.
    options = EngineOptions(kv_cache_bytes=16 * 1024, host_cache_bytes=64 * 1024, pause_policy="swap")
    with Engine.from_executor(fake_executor(), options) as engine:
        prompts = [[n, *range(1, 40)] for n in range(6)]
        first = [one(engine, GREEDY, prompt).token_ids for prompt in prompts]
        again = [one(engine, GREEDY, prompt) for prompt in prompts]
        assert [completion.token_ids for completion in again] == first
        stats = engine.stats()
        assert stats.offloaded_blocks > 0 and stats.onboarded_blocks > 0
        assert stats.host_max_num_blocks == 64 and stats.host_used_num_blocks > 0


# ---------------------------------------------------------------- adapters


def write_adapter(path: Path, scale: float = 1.0) -> Path:
    """A PEFT directory for the fake model: q of both layers, rank 2."""
    path.mkdir()
    config = {
        "peft_type": "LORA",
        "r": 2,
        "lora_alpha": 2 * scale,
        "target_modules": ["q_proj"],
        "bias": "none",
        "task_type": "CAUSAL_LM",
    }
    (path / "adapter_config.json").write_text(json.dumps(config))
    weights = {}
    for layer in range(INFO.num_layers):
        head = f"base_model.model.model.layers.{layer}.self_attn.q_proj"
        weights[f"{head}.lora_A.weight"] = np.ones((2, 32), np.float32)
        weights[f"{head}.lora_B.weight"] = np.ones((INFO.num_heads * INFO.head_dim, 2), np.float32)
    safetensors.numpy.save_file(weights, path / "adapter_model.safetensors")
    return path


def adapted(slot: int) -> list[int]:
    history = list(PROMPT)
    for _ in range(8):
        history.append(int(np.argmax(logits_of((-7, slot, *history)))))
    return history[len(PROMPT) :]


def test_requests_of_several_adapters_and_none_run_together(tmp_path: Path) -> None:
    model = FakeModel()
    with Engine.from_executor(PythonExecutor(model)) as engine:
        ids = [engine.load_adapter(name, write_adapter(tmp_path / name)) for name in ("a", "b")]
        assert engine.adapters == {"a": ids[0], "b": ids[1]} and model.adapters == {0: 2, 1: 2}
        params = [dataclasses.replace(GREEDY, adapter=name) for name in (None, "a", ids[1])]
        outputs = [list(c.token_ids) for c in engine.generate([PROMPT] * 3, params)]
        assert outputs == [greedy(PROMPT, 8), adapted(0), adapted(1)]
        engine.unload_adapter("a")
        assert engine.adapters == {"b": ids[1]} and model.adapters == {1: 2}
        with pytest.raises(errors.InvalidArgumentError, match=r"no adapter 'a', loaded are: 'b' \(id 2\)"):
            engine.submit(PROMPT, params[1])
        with pytest.raises(errors.NotFoundError, match="no adapter 'a'"):
            engine.unload_adapter("a")
        again = engine.load_adapter("a", tmp_path / "a")
        assert again not in ids, "blocks cached for an id that was unloaded are never found again"


def test_a_processor_that_loads_an_adapter_does_not_wait_for_one_that_waits_for_it(tmp_path: Path) -> None:
    path = write_adapter(tmp_path / "adapter")
    with Engine.from_executor(fake_executor()) as engine:
        loader = threading.Thread(target=engine.load_adapter, args=("first", path))

        def processor(_tokens: Any, _logits: Any) -> None:
            loader.start()
            while not engine._adapters._lock.locked():
                time.sleep(0.001)
            engine.load_adapter("second", path)

        with pytest.raises(errors.InvalidArgumentError, match="from inside one"):
            one(engine, dataclasses.replace(GREEDY, logits_processor=processor))
        loader.join(30)
        assert not loader.is_alive() and engine.adapters == {"first": 1}


def test_adapters_that_cannot_be_loaded(tmp_path: Path, engine: Engine) -> None:
    path = write_adapter(tmp_path / "a")
    engine.load_adapter("a", path)
    with pytest.raises(errors.InvalidArgumentError, match="'a' is loaded already"):
        engine.load_adapter("a", path)
    engine.load_adapter("b", path)
    with pytest.raises(errors.OutOfMemoryError):
        engine.load_adapter("c", path)
    with pytest.raises(errors.CheckpointError, match="does not exist"):
        engine.load_adapter("d", tmp_path / "none")
    with pytest.raises(errors.InvalidArgumentError, match="name"):
        engine.load_adapter("", path)
    with pytest.raises(errors.InvalidArgumentError, match="no adapter 99"):
        engine.submit(PROMPT, dataclasses.replace(GREEDY, adapter=99))
    with pytest.raises(errors.InvalidArgumentError, match="no adapter 'x'"):
        engine.check_prompt(PROMPT, dataclasses.replace(GREEDY, adapter="x"))
    assert engine.adapters == {"a": 1, "b": 2}
    with (
        Engine.from_executor(fake_executor(max_adapters=0)) as without,
        pytest.raises(errors.UnsupportedError),
    ):
        without.load_adapter("a", path)


# ---------------------------------------------------------------- speculation


@pytest.mark.parametrize("adaptive", [True, False])
@pytest.mark.parametrize("mode", ["ngram", "model"])
def test_drafts_change_no_token(mode: str, adaptive: bool) -> None:
    draft = fake_executor() if mode == "model" else None
    options = EngineOptions(
        draft_mode=mode, draft_executor=draft, max_draft_len=4, adaptive_draft_len=adaptive
    )
    prompts = [[3, 4] * 8, [5] * 20, PROMPT]
    many = [dataclasses.replace(SAMPLED, seed=i, max_tokens=30, n=2, top_k=20) for i in range(3)]
    with Engine.from_executor(fake_executor()) as engine:
        plain = engine.generate(prompts, GREEDY), engine.generate(prompts, many)
    with Engine.from_executor(fake_executor(), options) as engine:
        drafted = engine.generate(prompts, GREEDY), engine.generate(prompts, many)
        stats = engine.stats()
    for one_run, other in zip(plain, drafted, strict=True):
        for a, b in zip(one_run, other, strict=True):
            assert [o.token_ids for o in a.outputs] == [o.token_ids for o in b.outputs]
    if mode == "model" and not adaptive:
        assert stats.num_draft_tokens > 0 and stats.acceptance_rate > 0.5
        assert 1 < stats.acceptance_length <= 5 and 0 < stats.draft_overhead < 1


def test_what_drafting_takes_is_not_scheduling() -> None:
    draft = PythonExecutor(FakeModel(step_s=0.02))
    options = EngineOptions(draft_mode="model", draft_executor=draft, adaptive_draft_len=False)
    with Engine.from_executor(fake_executor(), options) as engine:
        one(engine, GREEDY)
        stats = engine.stats()
    assert stats.draft_time_ns >= 2 * 20_000_000  # two rounds at least, each a sleep of 20 ms
    assert stats.schedule_time_ns < stats.draft_time_ns / 2


def test_a_request_can_do_without_drafts() -> None:
    options = EngineOptions(draft_mode="model", draft_executor=fake_executor(), adaptive_draft_len=False)
    with Engine.from_executor(fake_executor(), options) as engine:
        completion = one(engine, dataclasses.replace(GREEDY, max_draft_len=0))
        assert completion.stats.num_draft_tokens == 0 and completion.stats.tokens_per_step == 1
        drafted = one(engine, dataclasses.replace(GREEDY, max_tokens=20, max_draft_len=3))
        assert drafted.stats.num_accepted_draft_tokens > 0 and drafted.stats.tokens_per_step > 1
        with pytest.raises(errors.InvalidArgumentError, match="max_draft_len is 9"):
            one(engine, dataclasses.replace(GREEDY, max_draft_len=9))


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"vocab_size": 65}, "vocab_size"),
        ({"tokens_per_block": 8}, "tokens_per_block"),
        ({"max_seq_len": 63}, "max_seq_len"),
        ({"max_batch_size": 4}, "max_batch_size"),
    ],
)
def test_a_draft_that_disagrees_is_refused_and_both_are_closed(changes: dict[str, int], text: str) -> None:
    models = [FakeModel(), FakeModel(dataclasses.replace(INFO, **changes))]
    target, draft = (PythonExecutor(model) for model in models)
    with pytest.raises(errors.InvalidArgumentError, match=text):
        Engine.from_executor(target, EngineOptions(draft_mode="model", draft_executor=draft))
    assert [model.closed for model in models] == [1, 1]


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"draft_mode": "medusa"}, "draft_mode is 'medusa', it must be one of off, model, ngram"),
        ({"draft_mode": "model"}, "no draft executor is given"),
        ({"ngram_min": 5}, "ngram_min is 5, more than ngram_max 4"),
        ({"pause_policy": "swap"}, "needs host memory"),
        ({"pause_policy": "never"}, "pause_policy is 'never'"),
        ({"chunking_policy": "x"}, "chunking_policy is 'x'"),
        ({"queue_order": "longest"}, "queue_order is 'longest', it must be one of arrival, shortest"),
        ({"max_tenant_share": 0.0}, "max_tenant_share is 0"),
        ({"host_offload_min_priority": 101}, "host_offload_min_priority is 101"),
        ({"max_kv_events": -1}, "max_kv_events is -1"),
        ({"max_draft_len": 2.0}, "max_draft_len is 2.0"),
    ],
)
def test_options_that_cannot_be(options: dict[str, Any], text: str) -> None:
    model = FakeModel()
    with pytest.raises(errors.InvalidArgumentError, match=text):
        Engine.from_executor(PythonExecutor(model), EngineOptions(**options))
    assert model.closed == 1


def test_an_executor_cannot_be_its_own_draft() -> None:
    model = FakeModel()
    executor = PythonExecutor(model)
    options = EngineOptions(draft_mode="model", draft_executor=executor)
    with pytest.raises(errors.InvalidArgumentError, match="open the plan a second time"):
        Engine.from_executor(executor, options)
    assert model.closed == 1


def test_a_draft_without_its_mode_is_refused_and_closed() -> None:
    models = [FakeModel(), FakeModel()]
    target, draft = (PythonExecutor(model) for model in models)
    with pytest.raises(errors.InvalidArgumentError, match="a draft executor is given"):
        Engine.from_executor(target, EngineOptions(draft_executor=draft))
    assert [model.closed for model in models] == [1, 1]


@pytest.mark.parametrize("policy", ["first_come_first_served", "equal_progress"])
@pytest.mark.parametrize("pause", ["auto", "recompute", "swap"])
@pytest.mark.parametrize("order", ["arrival", "shortest"])
def test_policies_change_no_token(policy: str, pause: str, order: str) -> None:
    options = EngineOptions(
        scheduler_policy="max_utilization",
        chunking_policy=policy,
        pause_policy=pause,
        queue_order=order,
        kv_cache_bytes=18 * 1024,
        host_cache_bytes=32 * 1024,
        max_tenant_share=0.5,
    )
    prompts = [[i] * (5 + 3 * i) for i in range(8)]
    params = [dataclasses.replace(GREEDY, max_tokens=30, tenant="a" if i % 3 else "b") for i in range(8)]
    with Engine.from_executor(fake_executor(), options) as engine:
        completions = engine.generate(prompts, params)
        assert [list(c.token_ids) for c in completions] == [greedy(prompt, 30) for prompt in prompts]
        assert engine.stats().num_pauses > 0


def test_an_engine_dropped_with_requests_in_flight_is_free_without_the_garbage_collector() -> None:
    gc.disable()
    try:
        engine = Engine.from_executor(PythonExecutor(FakeModel(step_s=0.01)))
        handle = engine.submit(PROMPT, dataclasses.replace(GREEDY, max_tokens=50))
        next(handle)
        seen = weakref.ref(engine)
        del engine, handle
        eventually(lambda: seen() is None)  # the event thread may hold it for a moment
    finally:
        gc.enable()
