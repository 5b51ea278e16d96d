"""Requests of the engine behind one request of HTTP, and their waiting deltas put together. One event loop."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import itertools
import time
from collections.abc import AsyncGenerator, Sequence
from types import TracebackType

from ...runtime.async_handle import AsyncRequestHandle
from ...runtime.completion import Completion, Delta
from ...runtime.engine_base import check_streaming
from ...runtime.errors import Error, InternalError
from ...runtime.sampling import SamplingParams
from .context import Context
from .errors import bad_request, of_error
from .prompts import Prompt

PING_S = 15.0  # proxies close connections that are silent for a minute


class Run:
    """The prompts of one request, submitted together: all of them or none. Leaving a block of it cancels what runs."""

    def __init__(self, ctx: Context, handles: Sequence[AsyncRequestHandle]) -> None:
        self._ctx = ctx
        self._handles = handles

    @staticmethod
    def check(ctx: Context, prompts: Sequence[Prompt], params: SamplingParams, *, streaming: bool) -> None:
        """Raise ApiError 400 for what the engine would refuse, before anything is made of it."""
        outputs = len(prompts) * max(params.num_sequences, params.beam_width)
        if outputs > ctx.settings.max_outputs:
            raise bad_request(
                f"the request has {outputs} outputs (prompts times n, best_of or beams), the most is "
                f"{ctx.settings.max_outputs}; send several requests",
                "n",
                "invalid_value",
            )
        try:
            if streaming:
                check_streaming(params)
            for prompt in prompts:
                ctx.engine.check_prompt(prompt.ids, params)
        except Error as error:
            ctx.metrics.observe_error(error)
            raise of_error(error) from error

    @classmethod
    async def start(
        cls,
        ctx: Context,
        prompts: Sequence[Prompt],
        params: SamplingParams,
        *,
        new_text: bool,
    ) -> Run:
        """Submit; raises ApiError 429 for a full queue, 400 for what the engine refuses."""
        handles: list[AsyncRequestHandle] = []
        try:
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
        handles, self._handles = self._handles, ()
        for handle in handles:
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
        except Exception as error:  # or the reader would wait for ever
            waiting.fail(InternalError(f"reading a request's tokens failed: {type(error).__name__}: {error}"))

    def _observe(self, completion: Completion) -> None:
        self._ctx.metrics.observe(
            completion.stats, completion.finish_reason, num_sequences=len(completion.outputs)
        )


class _Waiting:
    """Deltas that are not sent yet, by output. A reader that is slow gets many at a time."""

    def __init__(self, num_requests: int) -> None:
        self._num_running = num_requests
        self._deltas: dict[tuple[int, int], list[Delta]] = {}
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
        self._deltas.setdefault((i, delta.index), []).append(delta)
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
        try:
            await self._some.wait()
        finally:
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
        return [(i, _joined(deltas)) for (i, _), deltas in taken.items()]


def _joined(deltas: Sequence[Delta]) -> Delta:
    """Return one delta of an output's waiting ones; what comes at the end is the last one's."""
    if len(deltas) == 1:
        return deltas[0]
    with_logprobs = [one.logprobs for one in deltas if one.logprobs is not None]
    return dataclasses.replace(
        deltas[-1],
        text="".join(one.text for one in deltas),
        token_ids=tuple(itertools.chain.from_iterable(one.token_ids for one in deltas)),
        logprobs=tuple(itertools.chain.from_iterable(with_logprobs)) if with_logprobs else None,
        prompt_logprobs=next(
            (one.prompt_logprobs for one in deltas if one.prompt_logprobs is not None), None
        ),
    )
