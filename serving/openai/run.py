"""Requests of the engine behind one request of HTTP, and their waiting deltas put together. One event loop."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import time
from collections.abc import AsyncGenerator, Sequence
from types import TracebackType

from ...runtime.async_handle import AsyncRequestHandle
from ...runtime.completion import Completion, Delta
from ...runtime.engine_base import check_streaming
from ...runtime.errors import Error
from ...runtime.sampling import SamplingParams
from .context import Context
from .errors import of_error
from .prompts import Prompt

PING_S = 15.0  # proxies close connections that are silent for a minute


class Run:
    """The prompts of one request, submitted together: all of them or none. Leaving the block cancels what runs."""

    def __init__(self, ctx: Context, handles: Sequence[AsyncRequestHandle]) -> None:
        self._ctx = ctx
        self._handles = handles

    @classmethod
    async def start(
        cls,
        ctx: Context,
        prompts: Sequence[Prompt],
        params: SamplingParams,
        *,
        new_text: bool,
        streaming: bool,
    ) -> Run:
        """Submit; raises ApiError 429 for a full queue, 400 for what the engine refuses."""
        handles: list[AsyncRequestHandle] = []
        try:
            if streaming:
                check_streaming(params)
            for prompt in prompts:  # all are looked at before the first one runs
                ctx.engine.check_prompt(prompt.ids, params)
            for prompt in prompts:
                handles.append(await ctx.engine.submit(prompt.ids, params, new_text=new_text, wait=False))
        except BaseException as error:
            for handle in handles:
                handle.cancel()
            if isinstance(error, Error):
                ctx.metrics.observe_error(error)
                raise of_error(error, retry_after_s=ctx.lifecycle.retry_after_s()) from error
            raise
        return cls(ctx, handles)

    def __enter__(self) -> Run:
        """Cancel at the end of the block what has not ended."""
        return self

    def __exit__(
        self, _type: type[BaseException] | None, _error: BaseException | None, _trace: TracebackType | None
    ) -> None:
        """Cancel what has not ended."""
        for handle in self._handles:
            if not handle.done:
                self._ctx.metrics.observe_cancelled()
                handle.cancel()

    async def results(self) -> list[Completion]:
        """Wait for all and return their completions; raises ApiError for the first error."""
        try:
            completions = [await handle.result() for handle in self._handles]
        except Error as error:
            self._ctx.metrics.observe_error(error)
            raise of_error(error, submitted=True) from error
        for completion in completions:
            self._observe(completion)
        return completions

    async def batches(self) -> AsyncGenerator[list[tuple[int, Delta]], None]:
        """Yield (prompt's index, delta) lists: the first at once, later ones as sending is affordable.

        A list has one delta for each output that has something new: those that waited are one. It is empty when there
        was nothing for PING_S.
        raises ApiError when one of the requests fails
        """
        waiting = _Waiting(len(self._handles))
        pumps = [
            asyncio.ensure_future(self._pump(i, handle, waiting)) for i, handle in enumerate(self._handles)
        ]
        self._ctx.num_streams += 1
        next_s = 0.0
        try:
            while not waiting.is_over or waiting.has_some:
                await waiting.until_some(PING_S)
                await waiting.until_over(next_s - time.monotonic())
                batch = waiting.take()
                next_s = time.monotonic() + self._ctx.interval_s()
                yield batch
                if waiting.error is not None:
                    self._ctx.metrics.observe_error(waiting.error)
                    raise of_error(waiting.error, submitted=True) from waiting.error
        finally:
            self._ctx.num_streams -= 1
            for pump in pumps:
                pump.cancel()

    async def _pump(self, i: int, handle: AsyncRequestHandle, waiting: _Waiting) -> None:
        try:
            async for delta in handle:
                waiting.put(i, delta)
                if delta.is_final and delta.completion is not None:
                    self._observe(delta.completion)
        except Error as error:
            waiting.fail(error)

    def _observe(self, completion: Completion) -> None:
        self._ctx.metrics.observe(
            completion.stats, completion.finish_reason, num_sequences=len(completion.outputs)
        )


class _Waiting:
    """Deltas that are not sent yet, one an output."""

    def __init__(self, num_requests: int) -> None:
        self._num_running = num_requests
        self._deltas: dict[tuple[int, int], Delta] = {}
        self._some = asyncio.Event()
        self._over = asyncio.Event()
        self.error: Error | None = None

    @property
    def has_some(self) -> bool:
        return bool(self._deltas)

    @property
    def is_over(self) -> bool:
        return self._over.is_set()

    def put(self, i: int, delta: Delta) -> None:
        key = (i, delta.index)
        before = self._deltas.get(key)
        self._deltas[key] = delta if before is None else _joined(before, delta)
        self._some.set()
        if delta.is_final:
            self._num_running -= 1
            if not self._num_running:
                self._over.set()

    def fail(self, error: Error) -> None:
        self.error = error
        self._some.set()
        self._over.set()

    async def until_some(self, most_s: float) -> None:
        timer = asyncio.get_running_loop().call_later(most_s, self._some.set)
        await self._some.wait()
        timer.cancel()

    async def until_over(self, seconds: float) -> None:
        """Wait for more, but not for what will not come."""
        if seconds > 0 and not self._over.is_set():
            with contextlib.suppress(TimeoutError, asyncio.TimeoutError):
                await asyncio.wait_for(self._over.wait(), seconds)

    def take(self) -> list[tuple[int, Delta]]:
        taken, self._deltas = self._deltas, {}
        if not self._over.is_set():
            self._some.clear()
        return [(i, delta) for (i, _), delta in taken.items()]


def _joined(first: Delta, second: Delta) -> Delta:
    logprobs = (
        None
        if first.logprobs is None and second.logprobs is None
        else (
            *(first.logprobs or ()),
            *(second.logprobs or ()),
        )
    )
    return dataclasses.replace(
        second,
        text=first.text + second.text,
        token_ids=first.token_ids + second.token_ids,
        logprobs=logprobs,
        prompt_logprobs=first.prompt_logprobs or second.prompt_logprobs,
    )
