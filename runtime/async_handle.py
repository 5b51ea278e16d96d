"""A submitted request as a task of an event loop sees it."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from .completion import Completion, Delta
from .errors import Error
from .request import RequestState

if TYPE_CHECKING:
    from .async_engine import AsyncEngine


class AsyncRequestHandle:
    """A submitted request of an AsyncEngine. Iterate it for deltas as they come, or await the whole `result`.

    For the tasks of the engine's loop, one reader at a time; `cancel` may be called from any thread. A handle that is
    dropped lets its request run on: where that is not wanted, use it in an `async with`.
    """

    def __init__(
        self, engine: AsyncEngine, deltas: asyncio.Queue[Delta | Error], state: RequestState
    ) -> None:
        self._engine = engine
        self._deltas = deltas
        self._state = state
        self._exhausted = False

    def __aiter__(self) -> AsyncRequestHandle:
        """Return this handle: its deltas come once, up to the last, which is final."""
        return self

    async def __anext__(self) -> Delta:
        """Wait for the next delta; raises the request's Error if it failed."""
        if self._exhausted:
            raise StopAsyncIteration
        item = await self._deltas.get()
        if isinstance(item, Error):
            self._exhausted = True
            raise item
        self._exhausted = item.is_final
        return item

    async def result(self) -> Completion:
        """Wait for the end and return the whole output, whatever has been read of it; raises the request's Error."""
        async for _ in self:
            pass
        return self._state.outcome()

    @property
    def request_id(self) -> int:
        """The engine's number of the request, which its deltas also have."""
        assert self._state.request_id is not None
        return self._state.request_id

    @property
    def done(self) -> bool:
        """Whether the request has ended; its last deltas may still be unread."""
        return self._state.done

    @property
    def num_waiting(self) -> int:
        """How many deltas can be read without waiting, so that a sender may put them together."""
        return self._deltas.qsize()

    def cancel(self) -> None:
        """Ask for the end; a final delta with finish_reason "cancelled" follows. Nothing if it has already ended."""
        if not self.done:
            self._engine.cancel(self.request_id)

    async def __aenter__(self) -> AsyncRequestHandle:
        """Cancel the request when the block is left early."""
        return self

    async def __aexit__(self, *_: object) -> None:
        """Cancel the request if it has not ended."""
        self.cancel()
