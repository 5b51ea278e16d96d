"""AsyncEngine over the fake model."""

from __future__ import annotations

import asyncio
import dataclasses
import gc
import threading
import time
from collections.abc import Callable, Coroutine
from typing import Any

import pytest
from fake_executor import FakeModel, fake_executor, greedy
from plansmith.runtime import errors
from plansmith.runtime.async_engine import AsyncEngine
from plansmith.runtime.engine import SamplingParams
from plansmith.runtime.executor import PythonExecutor
from plansmith.runtime.native_engine import EngineOptions

GREEDY = SamplingParams(max_tokens=8, temperature=0.0)
LONG = dataclasses.replace(GREEDY, max_tokens=60)


def run(
    body: Callable[[AsyncEngine], Coroutine[Any, Any, Any]],
    model: FakeModel | None = None,
    options: EngineOptions | None = None,
) -> Any:
    async def main() -> Any:
        executor = PythonExecutor(model) if model is not None else fake_executor()
        async with AsyncEngine.from_executor(executor, options) as engine:
            return await asyncio.wait_for(body(engine), 30)

    return asyncio.run(main())


async def until_running(engine: AsyncEngine) -> None:
    while engine.stats().num_submitted_requests == 0:
        await asyncio.sleep(0.002)


async def until_idle(engine: AsyncEngine) -> None:
    while engine.stats().num_completed_requests < engine.stats().num_submitted_requests:
        await asyncio.sleep(0.002)


def test_a_stream_has_the_models_tokens() -> None:
    async def body(engine: AsyncEngine) -> list[int]:
        return [t async for d in engine.stream([1, 2, 3], GREEDY) for t in d.token_ids]

    assert run(body) == greedy([1, 2, 3], 8)


def test_many_at_once_keep_their_order() -> None:
    prompts = [[i, i + 1] for i in range(30)]

    async def body(engine: AsyncEngine) -> Any:
        return await engine.generate_all(prompts, GREEDY)

    assert [list(c.token_ids) for c in run(body)] == [greedy(p, 8) for p in prompts]


def test_more_than_the_queue_holds_wait_for_room() -> None:
    prompts = [[i, 5] for i in range(30)]

    async def body(engine: AsyncEngine) -> Any:
        return await engine.generate_all(prompts, GREEDY)

    completions = run(body, options=EngineOptions(max_queue_size=1))
    assert [list(c.token_ids) for c in completions] == [greedy(p, 8) for p in prompts]


def test_a_cancelled_task_cancels_its_request() -> None:
    gate = threading.Event()

    async def body(engine: AsyncEngine) -> Any:
        task = asyncio.create_task(engine.generate([1, 2], LONG))
        await asyncio.sleep(0.05)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        gate.set()
        await until_idle(engine)
        return engine.stats()

    stats = run(body, FakeModel(gate=gate))
    assert stats.num_completed_requests == 1 and stats.num_generated_tokens < 10


def test_a_cancelled_task_in_the_middle_of_a_stream_cancels_its_request() -> None:
    async def body(engine: AsyncEngine) -> Any:
        begun = asyncio.Event()

        async def read() -> None:
            async for _ in engine.stream([1, 2], LONG):
                begun.set()

        task = asyncio.create_task(read())
        await begun.wait()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        await until_idle(engine)
        return engine.stats()

    assert run(body, FakeModel(step_s=0.02)).num_generated_tokens < 60


def test_leaving_a_stream_early_cancels_its_request() -> None:
    async def body(engine: AsyncEngine) -> Any:
        stream = engine.stream([1, 2], LONG)
        async for _ in stream:
            break
        await stream.aclose()
        await until_idle(engine)
        return engine.stats()

    assert run(body, FakeModel(step_s=0.02)).num_generated_tokens < 60


def test_an_error_reaches_the_task_and_the_others_go_on() -> None:
    async def body(engine: AsyncEngine) -> Any:
        with pytest.raises(errors.ShapeError, match="48"):
            await engine.generate([1] * 49, GREEDY)
        return await engine.generate([1, 2], GREEDY)

    assert list(run(body).token_ids) == greedy([1, 2], 8)


def test_the_first_error_of_many_cancels_the_rest() -> None:
    async def body(engine: AsyncEngine) -> Any:
        with pytest.raises(errors.InvalidArgumentError):
            await engine.generate_all([[1, 2], [99]], LONG)
        await until_idle(engine)
        return engine.stats()

    assert run(body, FakeModel(step_s=0.02)).num_generated_tokens < 60


def test_a_failing_step_is_raised() -> None:
    async def body(engine: AsyncEngine) -> None:
        with pytest.raises(errors.ExecutorError, match="told to fail"):
            await engine.generate([1, 2], GREEDY)

    run(body, FakeModel(fail_at_step=1))


def test_closing_fails_what_is_running() -> None:
    async def body(engine: AsyncEngine) -> None:
        task = asyncio.create_task(engine.generate([1, 2], LONG))
        await asyncio.sleep(0)
        await engine.aclose()
        with pytest.raises(errors.ShutdownError):
            await task
        with pytest.raises(errors.ShutdownError):
            await engine.generate([1, 2], GREEDY)

    run(body)


def test_a_cancelled_close_leaves_nobody_waiting() -> None:
    gate = threading.Event()

    async def body(engine: AsyncEngine) -> None:
        task = asyncio.create_task(engine.generate([1, 2], LONG))
        await until_running(engine)
        closing = asyncio.create_task(engine.aclose())
        await asyncio.sleep(0.01)
        closing.cancel()
        with pytest.raises(errors.ShutdownError):
            await task
        gate.set()

    run(body, FakeModel(gate=gate))


def test_closing_after_the_loop_is_gone() -> None:
    model = FakeModel()
    engine = AsyncEngine.from_executor(PythonExecutor(model))
    tasks: list[asyncio.Task[Any]] = []

    async def begin() -> None:
        tasks.extend(asyncio.ensure_future(engine.generate([1, n], LONG)) for n in range(3))
        await asyncio.sleep(0.01)

    loop = asyncio.new_event_loop()
    loop.run_until_complete(begin())
    loop.close()
    asyncio.run(engine.aclose())
    assert model.closed == 1
    for task in tasks:  # or asyncio complains that they were never run to their end
        task._log_destroy_pending = False  # type: ignore[attr-defined]


def test_an_engine_that_nobody_closes_goes_with_its_loop() -> None:
    model = FakeModel()

    async def body() -> None:
        engine = AsyncEngine.from_executor(PythonExecutor(model))
        await engine.stream([1, 2], LONG).__anext__()

    asyncio.run(body())
    deadline = time.monotonic() + 20
    while model.closed == 0 and time.monotonic() < deadline:
        gc.collect()
        time.sleep(0.002)
    assert model.closed == 1


def test_the_loop_is_free_while_a_step_runs() -> None:
    gate = threading.Event()

    async def body(engine: AsyncEngine) -> Any:
        task = asyncio.create_task(engine.generate([1, 2], GREEDY))
        ticks = 0
        for _ in range(20):
            await asyncio.sleep(0.001)
            ticks += 1
        assert not task.done()
        gate.set()
        return ticks, await task

    ticks, completion = run(body, FakeModel(gate=gate))
    assert ticks == 20 and list(completion.token_ids) == greedy([1, 2], 8)


def test_waiting_does_not_poll() -> None:
    gate = threading.Event()
    polls = 0

    async def body(engine: AsyncEngine) -> None:
        nonlocal polls
        pump = engine._pump

        def counted(timeout_ms: int) -> int:
            nonlocal polls
            polls += 1
            return pump(timeout_ms)

        engine._pump = counted  # type: ignore[method-assign]
        task = asyncio.create_task(engine.generate([1, 2], GREEDY))
        await asyncio.sleep(0.1)
        assert polls == 0, "nothing has happened yet"
        gate.set()
        await task

    run(body, FakeModel(gate=gate))
    assert 1 <= polls <= 18  # at most one for each of 9 events, and one to find the queue empty


def test_another_loop_is_refused() -> None:
    engine = AsyncEngine.from_executor(fake_executor())

    async def use() -> Any:
        return await engine.generate([1, 2], GREEDY)

    asyncio.run(use())
    with pytest.raises(errors.InvalidArgumentError, match="another event loop"):
        asyncio.run(use())
    asyncio.run(engine.aclose())


def test_manual_steps_are_refused() -> None:
    with pytest.raises(errors.InvalidArgumentError, match="manual_step"):
        AsyncEngine.from_executor(fake_executor(), EngineOptions(manual_step=True))


async def fill_queue(engine: AsyncEngine, model: FakeModel) -> list[asyncio.Task[Any]]:
    """Start requests until one more is refused; the first is in a step that waits at the model's gate."""
    tasks: list[asyncio.Task[Any]] = []
    for i in range(60):
        try:
            handle = await engine.submit([i, 1], GREEDY, wait=False)
        except errors.QueueFullError:
            return tasks
        tasks.append(asyncio.create_task(handle.result()))
        while model.num_entered == 0:  # else the step takes from the queue later
            await asyncio.sleep(0.002)
    raise AssertionError("the queue was never full")


def test_a_full_queue_refuses_who_does_not_wait() -> None:
    gate = threading.Event()
    model = FakeModel(gate=gate)

    async def body(engine: AsyncEngine) -> Any:
        tasks = await fill_queue(engine, model)
        assert engine.num_open_requests == len(tasks) == 3
        with pytest.raises(errors.QueueFullError):
            await engine.generate([1, 2], GREEDY, wait=False)
        with pytest.raises(errors.QueueFullError):
            await engine.stream([1, 2], GREEDY, wait=False).__anext__()
        waiting = asyncio.create_task(engine.generate([1, 2], GREEDY))
        await asyncio.sleep(0.01)
        assert not waiting.done()
        gate.set()
        assert await engine.drain(20) and engine.num_open_requests == 0
        return await asyncio.gather(*tasks), await waiting, await engine.generate([1, 2], GREEDY, wait=False)

    done, waited, last = run(body, model, EngineOptions(max_queue_size=2))
    assert [list(c.token_ids) for c in done] == [greedy([i, 1], 8) for i in range(len(done))]
    assert list(waited.token_ids) == list(last.token_ids) == greedy([1, 2], 8)


def test_a_handle_is_read_as_it_comes_or_whole() -> None:
    async def body(engine: AsyncEngine) -> Any:
        handle = await engine.submit([1, 2, 3], GREEDY)
        first = await anext(handle)
        assert not first.is_final and first.request_id == handle.request_id
        completion = await handle.result()  # what is left is read on the way
        assert handle.done and completion is await handle.result()
        assert [d async for d in handle] == []
        failing = await engine.submit([1, 2], LONG)
        failing.cancel()
        assert (await failing.result()).finish_reason in ("cancelled", "length")
        async with await engine.submit([4, 5], LONG) as left:
            await anext(left)
        deltas = [d async for d in left]
        return first, completion, deltas[-1]

    first, completion, last = run(body, FakeModel(step_s=0.005))
    assert list(first.token_ids) == greedy([1, 2, 3], 8)[:1] and list(completion.token_ids) == greedy(
        [1, 2, 3], 8
    )
    assert last.finish_reason == "cancelled" and last.completion.token_ids == tuple(
        greedy([4, 5], 60)[: len(last.completion.token_ids)]
    )


def test_a_failed_request_fails_each_reader_of_its_handle() -> None:
    async def body(engine: AsyncEngine) -> None:
        handle = await engine.submit([1, 2], GREEDY)
        for _ in range(2):
            with pytest.raises(errors.ExecutorError, match="told to fail"):
                await handle.result()

    run(body, FakeModel(fail_at_step=1))


def test_a_drain_waits_so_long_and_the_rest_is_cancelled() -> None:
    async def body(engine: AsyncEngine) -> Any:
        handles = [await engine.submit([i, 1], LONG) for i in range(3)]
        assert not await engine.drain(0.02)
        engine.cancel_all()
        assert await engine.drain()
        return [(await handle.result()).finish_reason for handle in handles]

    assert run(body, FakeModel(step_s=0.02)) == ["cancelled"] * 3
