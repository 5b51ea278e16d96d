"""The engine for asyncio programs: events wake the loop through a file descriptor, no thread and no polling."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Sequence
from typing import Any

from .async_handle import AsyncRequestHandle
from .engine_base import EngineBase, check_streaming, per_prompt
from .errors import Error, InvalidArgumentError, QueueFullError, ShutdownError, UnsupportedError
from .guided import GuideHandle
from .prompts import Prompt
from .request import Completion, Delta, RequestState
from .sampling import SamplingParams


class AsyncEngine(EngineBase):
    """An engine that belongs to one event loop, the one that first uses it. Its methods are for that loop's tasks."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        """See EngineBase; use AsyncEngine.open or AsyncEngine.from_executor."""
        super().__init__(*args, **kwargs)
        self._loop: asyncio.AbstractEventLoop | None = None
        self._event_fd = self._core.event_fd()
        self._room: asyncio.Event | None = None
        if self._event_fd < 0:
            self._core.close()
            raise UnsupportedError(
                "this platform has no event descriptor for asyncio; use Engine with threads"
            )
        if self._options.manual_step:
            self._core.close()
            raise InvalidArgumentError("AsyncEngine has no manual_step; use Engine")

    async def submit(
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        *,
        new_text: bool = False,
        wait: bool = True,
    ) -> AsyncRequestHandle:
        """Queue a request and return its handle; errors are those of Engine.submit.

        wait : while the request queue is full; False = QueueFullError at once, for servers that refuse before they
            answer. Either way a grammar is waited for
        """
        deltas: asyncio.Queue[Delta | Error] = asyncio.Queue()
        state = await self._start_when_room(prompt, params, deltas, new_text, wait)
        return AsyncRequestHandle(self, deltas, state)

    async def stream(
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        *,
        new_text: bool = False,
        wait: bool = True,
    ) -> AsyncIterator[Delta]:
        """Yield the request's deltas; the last is final. Leaving early or a cancelled task cancels it.

        The request is submitted with the first `anext`; errors are those of Engine.submit and Engine.stream.
        wait : see submit
        """
        check_streaming(params)
        async with await self.submit(prompt, params, new_text=new_text, wait=wait) as handle:
            async for delta in handle:
                yield delta

    async def generate(
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        *,
        new_text: bool = False,
        wait: bool = True,
    ) -> Completion:
        """Return the whole output of one request. A cancelled task cancels the request.

        wait : see submit
        """
        async with await self.submit(prompt, params, new_text=new_text, wait=wait) as handle:
            return await handle.result()

    async def generate_all(
        self,
        prompts: Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        new_text: bool = False,
    ) -> list[Completion]:
        """Run all prompts together and return their completions in order; the first error cancels the others."""
        tasks = [
            asyncio.ensure_future(self.generate(prompt, own, new_text=new_text))
            for prompt, own in zip(prompts, per_prompt(prompts, params), strict=True)
        ]
        try:
            return list(await asyncio.gather(*tasks))
        finally:
            for task in tasks:
                task.cancel()

    async def drain(self, timeout: float | None = None) -> bool:
        """Wait until no request is open and return True; False when the time, in seconds, runs out.

        New requests are still taken: a server that drains refuses them itself, and then may `cancel_all` what is left.
        """
        try:
            await asyncio.wait_for(self._until_idle(), timeout)
        except (TimeoutError, asyncio.TimeoutError):  # two classes before Python 3.11
            return False
        return True

    async def _until_idle(self) -> None:
        room = self._attach()
        while self.num_open_requests:
            room.clear()
            await room.wait()

    async def aclose(self) -> None:
        """Stop; requests still running fail with ShutdownError. Twice is fine."""
        if self._loop is not None and not self._loop.is_closed():
            self._loop.remove_reader(self._event_fd)
        loop = asyncio.get_running_loop()
        try:
            with contextlib.suppress(ShutdownError):
                await loop.run_in_executor(None, self._core.shutdown)
                while True:
                    self._pump(0)  # what the last step gave, until there is no more
            await loop.run_in_executor(None, self._core.close)
        finally:  # also when this task is cancelled: the others must not wait for ever
            self._fail_all(ShutdownError("the engine was closed while the request was running"))
            if self._room is not None:
                with contextlib.suppress(RuntimeError):  # its loop is closed and nobody waits
                    self._room.set()

    async def __aenter__(self) -> AsyncEngine:
        """Close the engine at the end of the block."""
        return self

    async def __aexit__(self, *_: object) -> None:
        """Close the engine."""
        await self.aclose()

    async def _start_when_room(
        self,
        prompt: Prompt,
        params: SamplingParams | None,
        deltas: asyncio.Queue[Delta | Error],
        new_text: bool,
        wait: bool,
    ) -> RequestState:
        room = self._attach()
        guide = await self._guide_beside(params)
        try:
            while True:
                try:
                    return self._start(prompt, params, deltas.put_nowait, new_text=new_text, guide=guide)
                except QueueFullError:
                    if not wait:
                        raise
                    room.clear()
                    await room.wait()
        except BaseException:
            if guide is not None:
                guide.close()
            raise

    async def _guide_beside(self, params: SamplingParams | None) -> GuideHandle | None:
        """Return the guide of a request. A grammar may take seconds to compile, in which the loop goes on."""
        if params is None or params.guided is None:
            return None
        made = asyncio.get_running_loop().run_in_executor(None, self._guide, params)
        try:
            return await asyncio.shield(made)
        except asyncio.CancelledError:
            made.add_done_callback(_close_unused)
            raise

    def _attach(self) -> asyncio.Event:
        """Watch the event descriptor from the running loop; returns the event set on progress."""
        loop = asyncio.get_running_loop()
        if self._loop is None:
            self._loop, self._room = loop, asyncio.Event()
            loop.add_reader(self._event_fd, self._on_readable)
        if self._loop is not loop or self._room is None:
            raise InvalidArgumentError(
                "the AsyncEngine belongs to another event loop; open one engine for each loop, or use Engine"
            )
        return self._room

    def _on_readable(self) -> None:
        try:
            self._pump(0)  # the descriptor stays readable while events are left
        except ShutdownError:
            return  # aclose() is under way and has removed the reader or is about to
        if self._room is not None:
            self._room.set()


def _close_unused(made: asyncio.Future[GuideHandle | None]) -> None:
    """Close the guide of a task that was cancelled while its grammar was compiled."""
    if not made.cancelled() and made.exception() is None and (guide := made.result()) is not None:
        guide.close()
