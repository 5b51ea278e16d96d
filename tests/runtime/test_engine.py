"""Engine over the fake model, whose output is known without an engine."""

from __future__ import annotations

import dataclasses
import gc
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from fake_executor import INFO, FakeModel, fake_executor, greedy, logits_of
from plansmith.runtime import errors
from plansmith.runtime._native import native
from plansmith.runtime.engine import Engine, SamplingParams
from plansmith.runtime.executor import PythonExecutor
from plansmith.runtime.native_engine import EngineOptions

GREEDY = SamplingParams(max_tokens=8, temperature=0.0)
PROMPTS = [[1, 2, 3], [4] * 20, [9, 8, 7, 6, 5], [60]]


def open_fake(eos: tuple[int, ...] = (), options: EngineOptions | None = None, **changes: int) -> Engine:
    return Engine.from_executor(fake_executor(**changes), options, eos_token_ids=eos)


def gated() -> tuple[Engine, FakeModel, threading.Event]:
    """Return an engine whose steps wait until the event is set."""
    gate = threading.Event()
    model = FakeModel(gate=gate)
    return Engine.from_executor(PythonExecutor(model)), model, gate


def eventually(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < deadline, "it did not come true within 20 s"
        time.sleep(0.002)


@pytest.fixture
def engine() -> Iterator[Engine]:
    with open_fake() as opened:
        yield opened


def test_generate_gives_the_models_own_tokens_in_order(engine: Engine) -> None:
    completions = engine.generate(PROMPTS, GREEDY)
    assert [list(c.token_ids) for c in completions] == [greedy(p, 8) for p in PROMPTS]
    assert [list(c.prompt_ids) for c in completions] == PROMPTS
    assert all(c.finish_reason == "length" and c.text == "" for c in completions)
    assert completions[1].usage == {"prompt_tokens": 20, "completion_tokens": 8, "total_tokens": 28}


def test_one_prompt_is_a_batch_of_one(engine: Engine) -> None:
    assert [list(c.token_ids) for c in engine.generate([1, 2, 3], GREEDY)] == [greedy([1, 2, 3], 8)]
    assert engine.generate([], GREEDY) == []


def test_arrays_of_ids_are_prompts_too(engine: Engine) -> None:
    (completion,) = engine.generate([np.array([1, 2, 3], np.int64)], GREEDY)
    assert list(completion.token_ids) == greedy([1, 2, 3], 8)


def test_each_prompt_can_have_its_own_params(engine: Engine) -> None:
    params = [dataclasses.replace(GREEDY, max_tokens=n) for n in (1, 2, 3, 4)]
    assert [len(c.token_ids) for c in engine.generate(PROMPTS, params)] == [1, 2, 3, 4]
    with pytest.raises(errors.InvalidArgumentError, match="4 prompts and 1 SamplingParams"):
        engine.generate(PROMPTS, [GREEDY])


def test_more_prompts_than_the_queue_holds(engine: Engine) -> None:
    with open_fake(options=EngineOptions(max_queue_size=2)) as small:
        prompts = [[i % 64, 3] for i in range(40)]
        assert [list(c.token_ids) for c in small.generate(prompts, GREEDY)] == [greedy(p, 8) for p in prompts]


def test_a_stream_has_the_same_tokens_and_ends_once(engine: Engine) -> None:
    deltas = list(engine.stream([1, 2, 3], GREEDY))
    assert [t for d in deltas for t in d.token_ids] == greedy([1, 2, 3], 8)
    assert [d.finish_reason for d in deltas] == [None] * 8 + ["length"]
    stats = deltas[-1].stats
    assert stats is not None and stats.num_prompt_tokens == 3 and stats.num_generated_tokens == 8
    assert 0 < stats.arrival_time_ns <= stats.first_scheduled_time_ns <= stats.first_token_time_ns


def test_an_end_id_ends_and_is_kept(engine: Engine) -> None:
    expected = greedy([1, 2, 3], 8)
    first = next(i for i, t in enumerate(expected) if t not in expected[:i] and i >= 2)
    with open_fake(eos=(expected[first],)) as opened:
        (completion,) = opened.generate([[1, 2, 3]], GREEDY)
        assert list(completion.token_ids) == expected[: first + 1]
        assert (completion.finish_reason, completion.stop_reason) == ("stop", None)
        (ignored,) = opened.generate([[1, 2, 3]], dataclasses.replace(GREEDY, ignore_eos=True))
        assert list(ignored.token_ids) == expected
        (later,) = opened.generate([[1, 2, 3]], dataclasses.replace(GREEDY, min_tokens=8))
        assert len(later.token_ids) == 8 and later.finish_reason in ("length", "stop")


def test_a_stop_token_id_is_the_stop_reason(engine: Engine) -> None:
    expected = greedy([1, 2, 3], 8)
    params = dataclasses.replace(GREEDY, stop_token_ids=[expected[2]])
    (completion,) = engine.generate([[1, 2, 3]], params)
    assert list(completion.token_ids) == expected[: expected.index(expected[2]) + 1]
    assert (completion.finish_reason, completion.stop_reason) == ("stop", expected[2])


def test_max_tokens_none_goes_to_the_end_of_the_sequence(engine: Engine) -> None:
    (completion,) = engine.generate([[1, 2, 3]], dataclasses.replace(GREEDY, max_tokens=None))
    assert len(completion.token_ids) == INFO.max_seq_len - 3


def test_seeds(engine: Engine) -> None:
    params = SamplingParams(max_tokens=12, temperature=1.0, seed=7)
    first, second = engine.generate([[1, 2], [1, 2]], params)
    assert first.token_ids == second.token_ids
    (other,) = engine.generate([[1, 2]], dataclasses.replace(params, seed=8))
    assert other.token_ids != first.token_ids
    unseeded = engine.generate([[1, 2]] * 4, dataclasses.replace(params, seed=None))
    assert len({c.token_ids for c in unseeded}) > 1


def test_logprobs_are_the_models_own(engine: Engine) -> None:
    params = dataclasses.replace(GREEDY, max_tokens=3, logprobs=2)
    (completion,) = engine.generate([[1, 2, 3]], params)
    history = [1, 2, 3]
    assert completion.logprobs is not None and completion.cumulative_logprob is not None
    for entry in completion.logprobs:
        logits = logits_of(history).astype(np.float64)
        expected = logits - np.log(np.exp(logits).sum())
        best = np.argsort(-expected)[:2]
        assert [token for token, _ in entry.top] == best.tolist()
        np.testing.assert_allclose([value for _, value in entry.top], expected[best], atol=1e-5)
        assert entry.logprob == entry.top[0][1]
        history.append(entry.token_id)
    total = sum(entry.logprob for entry in completion.logprobs)
    assert completion.cumulative_logprob == pytest.approx(total, abs=1e-5)


def test_logprobs_zero_is_the_chosen_token_alone(engine: Engine) -> None:
    (completion,) = engine.generate([[1, 2, 3]], dataclasses.replace(GREEDY, logprobs=0))
    assert completion.logprobs is not None and all(entry.top == () for entry in completion.logprobs)
    assert engine.generate([[1, 2, 3]], GREEDY)[0].logprobs is None


def test_bias_and_bad_words_reach_the_core(engine: Engine) -> None:
    expected = greedy([1, 2, 3], 8)
    (biased,) = engine.generate([[1, 2, 3]], dataclasses.replace(GREEDY, logit_bias={11: 1000.0}))
    assert set(biased.token_ids) == {11}
    (banned,) = engine.generate([[1, 2, 3]], dataclasses.replace(GREEDY, bad_words=[[expected[0]]]))
    assert expected[0] not in banned.token_ids
    (pair,) = engine.generate([[1, 2, 3]], dataclasses.replace(GREEDY, bad_words=[expected[:2], [63, 62]]))
    assert pair.token_ids[0] == expected[0] and pair.token_ids[1] != expected[1]


def test_stop_words_end_the_output_and_stay_in_it(engine: Engine) -> None:
    expected = greedy([1, 2, 3], 8)
    ends = next(
        i for i in range(3, 8) if expected.index(expected[i]) == i
    )  # two tokens that stand nowhere before
    word = expected[ends - 1 : ends + 1]
    params = dataclasses.replace(GREEDY, stop_words=[[63, 62, 61], word])
    (stopped,) = engine.generate([[1, 2, 3]], params)
    assert list(stopped.token_ids) == expected[: ends + 1]
    assert (stopped.finish_reason, stopped.stop_reason) == ("stop", None)
    (later,) = engine.generate([[1, 2, 3]], dataclasses.replace(params, min_tokens=ends + 2))
    assert list(later.token_ids) == expected and later.finish_reason == "length"


def test_a_penalty_reaches_the_core(engine: Engine) -> None:
    params = dataclasses.replace(GREEDY, max_tokens=20, frequency_penalty=2.0, presence_penalty=1000.0)
    (completion,) = engine.generate([[1, 2, 3]], params)
    assert len(set(completion.token_ids)) == 20


def test_cancel_from_another_thread() -> None:
    engine, model, gate = gated()
    with engine:
        handle = engine.submit([1, 2, 3], dataclasses.replace(GREEDY, max_tokens=40))
        eventually(lambda: model.num_entered == 1)
        handle.cancel()
        gate.set()
        completion = handle.result(timeout=20)
        assert completion.finish_reason == "cancelled"
        assert list(completion.token_ids) == greedy([1, 2, 3], 40)[: len(completion.token_ids)]
        handle.cancel()  # a second time is nothing
        eventually(lambda: engine.stats().used_num_blocks == 0)


def test_a_stream_that_is_closed_or_dropped_cancels() -> None:
    with Engine.from_executor(PythonExecutor(FakeModel(step_s=0.02))) as engine:
        long = dataclasses.replace(GREEDY, max_tokens=60)
        with engine.stream([1, 2], long) as stream:
            next(stream)
        dropped = engine.stream([1, 2], long)
        next(dropped)
        del dropped
        eventually(lambda: engine.stats().num_completed_requests == 2)
        assert engine.stats().num_active_requests == 0 and engine.stats().num_generated_tokens < 100


def test_result_times_out_and_the_request_goes_on() -> None:
    engine, _, gate = gated()
    with engine:
        handle = engine.submit([1, 2, 3], GREEDY)
        with pytest.raises(TimeoutError, match=r"0\.01 s"):
            handle.result(timeout=0.01)
        gate.set()
        assert list(handle.result().token_ids) == greedy([1, 2, 3], 8)


def test_a_deadline_ends_with_timeout() -> None:
    engine, _, gate = gated()
    with engine:
        handle = engine.submit([1, 2, 3], dataclasses.replace(GREEDY, timeout_ms=1))
        time.sleep(0.05)
        gate.set()
        assert handle.result().finish_reason == "timeout"


def test_many_threads_at_once(engine: Engine) -> None:
    results: dict[int, Any] = {}

    def work(i: int) -> None:
        results[i] = [t for d in engine.stream([i, i + 1], GREEDY) for t in d.token_ids]

    threads = [threading.Thread(target=work, args=(i,)) for i in range(24)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert results == {i: greedy([i, i + 1], 8) for i in range(24)}


def test_on_delta_is_called_instead_of_the_reader(engine: Engine) -> None:
    seen: list[Any] = []
    handle = engine.submit([1, 2, 3], GREEDY, on_delta=seen.append)
    tokens = list(handle.result().token_ids)
    assert [t for d in seen for t in d.token_ids] == tokens == greedy([1, 2, 3], 8)


def test_the_completion_is_there_with_the_final_delta(engine: Engine) -> None:
    """Also inside on_delta, which a program may get before the handle."""
    seen: list[Any] = []
    with_handle = threading.Event()
    handles: list[Any] = []

    def take(delta: Any) -> None:
        with_handle.wait(20)
        seen.append((delta, handles[0].completion, handles[0].request_id, engine.num_open_requests))

    handles.append(engine.submit([1, 2, 3], GREEDY, on_delta=take))
    with_handle.set()
    completion = handles[0].result()
    deltas = [delta for delta, *_ in seen]
    assert [d.completion for d in deltas] == [None] * 8 + [completion]
    assert [known for _, known, *_ in seen] == [None] * 8 + [completion]
    assert {d.request_id for d in deltas} == {number for *_, number, _ in seen} == {handles[0].request_id}
    assert deltas[-1].is_final and list(completion.token_ids) == greedy([1, 2, 3], 8)
    assert [count for *_, count in seen] == [1] * 8 + [0]


def test_open_requests_are_counted_and_cancelled_by_their_ids() -> None:
    engine, model, gate = gated()
    with engine:
        long = dataclasses.replace(GREEDY, max_tokens=60)
        ended: list[Any] = []

        def stop(delta: Any) -> None:
            ended.append(delta)
            engine.cancel(delta.request_id)  # with the first token; the handle may not be there yet

        handles = [engine.submit([i], long) for i in range(3)]
        handles.append(engine.submit([9], long, on_delta=stop))
        assert engine.num_open_requests == 4
        eventually(lambda: model.num_entered > 0)
        engine.cancel(handles[0].request_id)
        gate.set()
        assert handles[0].result(20).finish_reason == "cancelled"
        assert handles[3].result(20).finish_reason == "cancelled" and len(ended[-1].completion.token_ids) < 60
        assert [h.result(20).finish_reason for h in handles[1:3]] == ["length"] * 2
        assert engine.num_open_requests == 0
        engine.cancel(handles[0].request_id)  # has ended: nothing
        engine.cancel(12345)
    engine.cancel(1)  # closed: nothing


def test_all_can_be_cancelled_at_once() -> None:
    engine, model, gate = gated()
    with engine:
        handles = [engine.submit([i], dataclasses.replace(GREEDY, max_tokens=60)) for i in range(20)]
        eventually(lambda: model.num_entered > 0)
        engine.cancel_all()
        gate.set()
        assert {h.result(20).finish_reason for h in handles} == {"cancelled"}
        assert engine.num_open_requests == 0
        assert list(engine.generate([[1, 2]], GREEDY)[0].token_ids) == greedy([1, 2], 8)


def test_numbers_of_numpy_are_parameters_too(engine: Engine) -> None:
    values: dict[str, Any] = {
        "max_tokens": np.int32(8),
        "temperature": np.float32(0.7),
        "top_k": np.int64(20),
        "top_p": np.float16(0.9),
        "seed": np.uint64(2**64 - 1),
        "bad_words": [np.array([5, 6], np.int32)],
        "stop_token_ids": np.array([63, 62]),
        "logit_bias": {np.int32(3): np.float32(0.5)},
    }
    params = SamplingParams(**values)
    same = SamplingParams(
        max_tokens=8,
        temperature=float(np.float32(0.7)),
        top_k=20,
        top_p=float(np.float16(0.9)),
        seed=2**64 - 1,
        bad_words=[[5, 6]],
        stop_token_ids=[63, 62],
        logit_bias={3: 0.5},
    )
    assert params == same
    done = engine.generate([[1, 2, 3]] * 2, [params, same])
    assert done[0].token_ids == done[1].token_ids


def test_stats_add_up(engine: Engine) -> None:
    engine.generate(PROMPTS, GREEDY)
    stats = engine.stats()
    assert stats.num_submitted_requests == stats.num_completed_requests == 4
    assert stats.num_prompt_tokens == sum(map(len, PROMPTS)) and stats.num_generated_tokens == 32
    assert stats.used_num_blocks == 0 and stats.free_num_blocks == stats.max_num_blocks
    assert 0 < stats.kv_waste < 1
    steps = engine.iteration_stats()
    assert len(steps) == stats.iter
    assert sum(s.num_ctx_tokens for s in steps) == stats.num_prompt_tokens
    assert engine.iteration_stats() == []


def test_model_info_is_narrowed_by_the_options() -> None:
    with open_fake(options=EngineOptions(max_batch_size=2, max_num_tokens=5)) as engine:
        assert (engine.model_info.max_batch_size, engine.model_info.max_num_tokens) == (2, 5)
        assert [list(c.token_ids) for c in engine.generate(PROMPTS, GREEDY)] == [
            greedy(p, 8) for p in PROMPTS
        ]


@pytest.mark.parametrize(
    ("prompt", "params", "error", "text"),
    [
        ([], GREEDY, errors.InvalidArgumentError, "prompt"),
        ([1, 64], GREEDY, errors.InvalidArgumentError, "token 1 is 64.*0 to 63"),
        ([-1], GREEDY, errors.InvalidArgumentError, "token 0 is -1"),
        ([2**40], GREEDY, errors.InvalidArgumentError, "token 0 is 1099511627776"),
        ([[1, 2]], GREEDY, errors.InvalidArgumentError, "2 dimensions"),
        ([1.5], GREEDY, errors.InvalidArgumentError, "not a list of token ids"),
        ([True], GREEDY, errors.InvalidArgumentError, "not a list of token ids"),
        ([2**70], GREEDY, errors.InvalidArgumentError, "not a list of token ids"),
        ([[1], [2, 3]], GREEDY, errors.InvalidArgumentError, "not a list of token ids"),
        (5, GREEDY, errors.InvalidArgumentError, "not a list of token ids"),
        ([1, "a"], GREEDY, errors.InvalidArgumentError, "not a list of token ids"),
        ("text", GREEDY, errors.InvalidArgumentError, "no tokenizer"),
        ([1] * 49, GREEDY, errors.ShapeError, "49.*48"),
        ([1] * 40, SamplingParams(max_tokens=25), errors.ShapeError, "64"),
        ([1], SamplingParams(stop_token_ids=[64]), errors.InvalidArgumentError, "64"),
        ([1], SamplingParams(logit_bias={64: 1.0}), errors.InvalidArgumentError, "64"),
        ([1], SamplingParams(stop_words=[[1, 64]]), errors.InvalidArgumentError, "64"),
        ([1], SamplingParams(bad_words=[[1, 64]]), errors.InvalidArgumentError, "64"),
        ([1], SamplingParams(bad_words=["a"]), errors.InvalidArgumentError, "no tokenizer"),
        ([1], SamplingParams(stop="a"), errors.InvalidArgumentError, "without a tokenizer"),
    ],
)
def test_what_cannot_be_is_refused_and_harms_nobody(
    engine: Engine, prompt: Any, params: SamplingParams, error: type[errors.Error], text: str
) -> None:
    with pytest.raises(error, match=text):
        engine.submit(prompt, params)
    assert not engine._states
    assert list(engine.generate([[1, 2, 3]], GREEDY)[0].token_ids) == greedy([1, 2, 3], 8)


@pytest.mark.parametrize("length", [1, 48, 49, 63, 64, 65])
@pytest.mark.parametrize("max_tokens", [1, 15, 16, 17, 63])
def test_check_prompt_refuses_what_a_submission_refuses(engine: Engine, length: int, max_tokens: int) -> None:
    params = SamplingParams(max_tokens=max_tokens, temperature=0.0)
    outcomes = []
    for attempt in (engine.check_prompt, engine.submit):
        try:
            attempt([1] * length, params)
            outcomes.append(None)
        except errors.Error as error:
            outcomes.append(type(error))
    assert outcomes[0] == outcomes[1]


def test_chat_without_a_template_says_what_to_do(engine: Engine) -> None:
    with pytest.raises(errors.UnsupportedError, match="no chat template"):
        engine.chat_ids([{"role": "user", "content": "hi"}])


@pytest.mark.parametrize(
    "options",
    [
        EngineOptions(scheduler_policy="fair"),
        EngineOptions(max_batch_size=-1),
        EngineOptions(kv_cache_bytes=2**63),
    ],
)
def test_bad_options_are_refused_and_the_executor_closed(options: EngineOptions) -> None:
    model = FakeModel()
    with pytest.raises(errors.InvalidArgumentError):
        Engine.from_executor(PythonExecutor(model), options)
    assert model.closed == 1


def test_a_request_larger_than_the_kv_cache_is_refused() -> None:
    with open_fake(options=EngineOptions(kv_cache_bytes=4 * 1024)) as engine:
        assert engine.stats().max_num_blocks == 4
        with pytest.raises(errors.OutOfMemoryError):
            engine.submit([1] * 10, dataclasses.replace(GREEDY, max_tokens=20))


def test_a_failing_step_fails_its_requests_with_the_models_words() -> None:
    with Engine.from_executor(PythonExecutor(FakeModel(fail_at_step=2))) as engine:
        with pytest.raises(errors.ExecutorError, match="RuntimeError: the fake model was told to fail"):
            engine.generate(PROMPTS, GREEDY)
        eventually(lambda: engine.stats().used_num_blocks == 0)


def test_a_sink_that_raises_fails_its_own_request_only(engine: Engine) -> None:
    def broken(delta: Any) -> None:
        raise ValueError("broken sink")

    handle = engine.submit([1, 2, 3], GREEDY, on_delta=broken)
    (other,) = engine.generate([[1, 2, 3]], GREEDY)
    assert list(other.token_ids) == greedy([1, 2, 3], 8)
    with pytest.raises(errors.InternalError, match="broken sink"):
        handle.result(timeout=20)


def test_a_closed_engine_refuses_everything_and_closes_its_executor_once() -> None:
    model = FakeModel()
    engine = Engine.from_executor(PythonExecutor(model))
    engine.close()
    engine.close()
    assert model.closed == 1
    for call in (engine.stats, engine.iteration_stats, lambda: engine.submit([1], GREEDY)):
        with pytest.raises(errors.ShutdownError, match="closed"):
            call()


def test_closing_fails_what_is_running() -> None:
    engine, model, gate = gated()
    handles = [engine.submit([i], dataclasses.replace(GREEDY, max_tokens=60)) for i in range(20)]
    eventually(lambda: model.num_entered > 0)
    threading.Timer(0.05, gate.set).start()
    engine.close()
    for handle in handles:
        with pytest.raises(errors.ShutdownError):
            handle.result(timeout=20)
        with pytest.raises((errors.ShutdownError, StopIteration)):
            while True:
                next(handle)


@pytest.mark.parametrize("manual_step", [True, False])
def test_an_engine_that_nobody_closes_is_released_with_its_last_reference(manual_step: bool) -> None:
    model = FakeModel()
    engine = Engine.from_executor(PythonExecutor(model), EngineOptions(manual_step=manual_step))
    engine.generate(PROMPTS, GREEDY)
    del engine
    gc.collect()
    eventually(lambda: model.closed == 1)


def test_closing_delivers_what_the_last_step_gave() -> None:
    engine, model, gate = gated()
    handle = engine.submit([1, 2], dataclasses.replace(GREEDY, max_tokens=1))
    eventually(lambda: model.num_entered > 0)
    threading.Timer(0.05, gate.set).start()
    engine.close()
    assert list(handle.result(timeout=20).token_ids) == greedy([1, 2], 1)


def test_a_close_in_the_middle_of_a_submission_is_a_shutdown_error(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    submit = engine._core.submit

    def close_first(*args: Any, **kwargs: Any) -> int:
        engine.close()
        return submit(*args, **kwargs)

    monkeypatch.setattr(engine._core, "submit", close_first)
    with pytest.raises(errors.ShutdownError):
        engine.submit([1, 2], GREEDY)


def test_a_close_on_a_thread_that_is_in_a_call_waits_for_the_call() -> None:
    # As the garbage collector does it, which runs anywhere.
    model = FakeModel()
    engine = Engine.from_executor(PythonExecutor(model))
    with engine._core._call():
        engine._core.close()
        assert model.closed == 0
    eventually(lambda: model.closed == 1)


def test_an_on_delta_that_exits_fails_its_own_request_only(engine: Engine) -> None:
    def leave(_delta: Any) -> None:
        sys.exit(3)

    other = engine.submit([1, 2], GREEDY)
    with pytest.raises(errors.InternalError, match="SystemExit"):
        engine.submit([1, 2], GREEDY, on_delta=leave).result(timeout=20)
    assert list(other.result(timeout=20).token_ids) == greedy([1, 2], 8)
    assert list(engine.submit([1, 2], GREEDY).result(timeout=20).token_ids) == greedy([1, 2], 8)


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_an_event_thread_that_dies_closes_the_engine(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    def die(_events: Any) -> None:
        raise SystemExit(3)

    monkeypatch.setattr(engine, "_route", die)
    with pytest.raises(errors.InternalError, match="the event thread failed: SystemExit"):
        engine.submit([1, 2], GREEDY).result(timeout=20)
    with pytest.raises(errors.ShutdownError):
        engine.submit([1, 2], GREEDY)


def test_opening_and_closing_leaks_no_descriptor_and_no_thread() -> None:
    def in_use() -> tuple[int, int]:
        descriptors, threads = (list(Path("/proc/self", kind).iterdir()) for kind in ("fd", "task"))
        return len(descriptors), len(threads)

    def cycle(i: int) -> None:
        opened = open_fake()
        handles = [opened.submit([i % 64, n], dataclasses.replace(GREEDY, max_tokens=60)) for n in range(3)]
        if i % 2:
            next(handles[0])
            opened.close()

    cycle(0)
    cycle(1)
    gc.collect()
    before = in_use()
    for i in range(200):
        cycle(i)
    gc.collect()
    eventually(lambda: in_use() <= before)


def run_program(*lines: str) -> str:
    """Return what a Python program over the fake executor prints; it must end well and without a word on stderr."""
    imports = (
        "import os, sys, warnings",
        "from fake_executor import fake_executor",
        "from plansmith.runtime import errors",
        "from plansmith.runtime.engine import Engine, SamplingParams",
    )
    path = os.pathsep.join([str(Path(__file__).parent), *sys.path])
    done = subprocess.run(
        [sys.executable, "-c", "\n".join([*imports, *lines])],
        env=os.environ | {"PYTHONPATH": path},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 0 and done.stderr == ""
    return done.stdout


def test_a_program_may_end_in_the_middle_of_a_request() -> None:
    said = run_program(
        "engine = Engine.from_executor(fake_executor())",
        "stream = engine.stream([1, 2], SamplingParams(max_tokens=60))",
        "print(next(stream).token_ids)",
    )
    assert said.startswith("(")


def test_after_a_fork_the_engine_is_the_parents() -> None:
    said = run_program(
        "warnings.filterwarnings('ignore', '.*fork', DeprecationWarning)",  # Python 3.12 and later: it has threads
        "engine = Engine.from_executor(fake_executor())",
        "handle = engine.submit([1, 2], SamplingParams(max_tokens=60))",
        "child = os.fork()",
        "if child == 0:",
        "    try:",
        "        engine.submit([1, 2])",
        "    except errors.UnsupportedError as error:",
        "        print(error, flush=True)",
        "    engine.close()",
        "    with Engine.from_executor(fake_executor()) as own:",
        "        print(len(own.generate([3], SamplingParams(max_tokens=5))[0].token_ids))",
        "    sys.exit(0)",
        "assert os.waitpid(child, 0)[1] == 0",
        "print(len(handle.result(20).token_ids))",
    )
    assert said.splitlines() == [
        "the engine was opened by another process and does not live on after a fork; open one here",
        "5",
        "60",
    ]


def test_a_fork_beside_a_first_call_into_the_core_leaves_the_child_no_locked_lock(tmp_path: Path) -> None:
    # Declarations that are parsed now: those parsed when the library was built have no lock.
    for file in native().directory.glob("libplansmith.*"):
        (tmp_path / file.name).symlink_to(file)
    (tmp_path / "plansmith.cdef").symlink_to(native().directory / "plansmith.cdef")
    said = run_program(
        f"os.environ['PLANSMITH_LIBRARY'] = {str(tmp_path)!r}",
        "import threading",
        "from plansmith.runtime._native import native",
        "warnings.filterwarnings('ignore', '.*fork', DeprecationWarning)",
        "ffi = native().ffi",
        "held = threading.Event()",
        "def hold():",  # as cffi does while it parses a type or looks a function up
        "    with ffi._lock:",
        "        held.set()",
        "        threading.Event().wait()",
        "threading.Thread(target=hold, daemon=True).start()",
        "held.wait()",
        "child = os.fork()",
        "if child == 0:",
        "    with Engine.from_executor(fake_executor()) as own:",
        "        params = SamplingParams(max_tokens=5, logprobs=2, logit_bias={1: 1.0}, bad_words=[[2, 3]])",
        "        print(len(own.generate([3], params)[0].token_ids))",
        "        own.submit([1, 2], SamplingParams(max_tokens=60)).cancel()",
        "        own.stats()",
        "        own.iteration_stats()",
        "    sys.exit(0)",
        "assert os.waitpid(child, 0)[1] == 0",
    )
    assert said == "5\n"


def test_several_threads_may_wait_on_an_engine_of_manual_steps() -> None:
    wrong: list[object] = []

    def work(engine: Engine, i: int) -> None:
        try:
            for _ in range(10):
                got = list(engine.generate([1, i], GREEDY)[0].token_ids)
                if got != greedy([1, i], 8):
                    wrong.append(got)
        except BaseException as error:
            wrong.append(error)

    with open_fake(options=EngineOptions(manual_step=True)) as manual:
        threads = [threading.Thread(target=work, args=(manual, i)) for i in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
    assert wrong == []


def test_manual_steps() -> None:
    with open_fake(options=EngineOptions(manual_step=True)) as engine:
        assert engine.step() is False
        handle = engine.submit([1, 2, 3], GREEDY)
        steps = 0
        while engine.step():
            steps += 1
        assert steps == 8 and handle.done
        assert [list(c.token_ids) for c in engine.generate(PROMPTS, GREEDY)] == [
            greedy(p, 8) for p in PROMPTS
        ]


def test_step_is_for_manual_engines(engine: Engine) -> None:
    with pytest.raises(errors.InvalidArgumentError, match="manual_step"):
        engine.step()
