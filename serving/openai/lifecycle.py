"""Whether the server is alive, ready, or on its way out. One event loop."""

from __future__ import annotations

import asyncio
import contextlib
import math
import time
from collections.abc import Iterator

from ...runtime.async_engine import AsyncEngine
from ...runtime.errors import Error, ShutdownError
from .errors import ApiError
from .settings import Settings

_WATCH_S = 1.0
_SMOOTHING = 0.2  # weight of the newest gap in the running mean
_MOST_RETRY_S = 30


class Lifecycle:
    """Counts open requests, watches the engine's steps, and drains.

    draining : new requests are refused, running ones go on
    num_open : requests being answered, health and metrics not counted
    """

    def __init__(self, engine: AsyncEngine, settings: Settings) -> None:
        self._engine = engine
        self._settings = settings
        self.draining = False
        self.num_open = 0
        self._idle = asyncio.Event()
        self._idle.set()
        self._last_iter = -1
        self._last_progress_s = time.monotonic()
        self._last_end_s: float | None = None
        self._gap_s = 1.0
        self._dead: str | None = None

    @contextlib.contextmanager
    def request(self) -> Iterator[None]:
        """Count a request while it is answered; raises ApiError 503 while the server drains."""
        if self.draining:
            raise ApiError(
                503,
                "the server is shutting down; send the request to another one",
                code="shutting_down",
                headers={"Retry-After": str(math.ceil(self._settings.drain_s)), "Connection": "close"},
            )
        self.num_open += 1
        self._idle.clear()
        try:
            yield
        finally:
            self.num_open -= 1
            self._note_end()
            if not self.num_open:
                self._idle.set()

    def _note_end(self) -> None:
        now = time.monotonic()
        if self._last_end_s is not None:
            self._gap_s += (now - self._last_end_s - self._gap_s) * _SMOOTHING
        self._last_end_s = now

    def retry_after_s(self) -> int:
        """Return when there may be room in the queue: the mean time between two requests' ends, 1 to 30 s."""
        return min(_MOST_RETRY_S, max(1, math.ceil(self._gap_s)))

    def trouble(self) -> str | None:
        """Return why the engine is not alive, None while it is."""
        if self._dead is None:
            self._look()
        if self._dead is not None:
            return self._dead
        still_s = time.monotonic() - self._last_progress_s
        if still_s > self._settings.stall_s:
            return f"requests wait and the engine has made no step for {still_s:.0f} s"
        return None

    def _look(self) -> None:
        """Note the engine's progress; a step that is running counts none."""
        try:
            stats = self._engine.stats()
        except ShutdownError as error:
            self._dead = f"the engine is closed: {error}"
            return
        except Error as error:
            self._dead = f"the engine does not answer: {error}"
            return
        if (failure := self._engine.device_failure()) is not None:
            self._dead = f"every request fails: {failure}"
            return
        # Its own counts of requests are those of the last step's end, so a first step that hangs would look idle.
        if stats.iter != self._last_iter or not self._engine.num_open_requests:
            self._last_iter = stats.iter
            self._last_progress_s = time.monotonic()

    async def watch(self) -> None:
        """Look at the engine every second, so that idle times are known from stalls; until cancelled."""
        while True:
            self._look()
            await asyncio.sleep(_WATCH_S)

    async def drain(self) -> bool:
        """Refuse new requests and wait for the running ones; False when drain_s is over before they are."""
        self.draining = True
        return await self.wait_idle(self._settings.drain_s)

    async def wait_idle(self, seconds: float) -> bool:
        """Wait until no request is open; False when the time is over before."""
        try:
            await asyncio.wait_for(self._idle.wait(), seconds)
        except (TimeoutError, asyncio.TimeoutError):  # two classes before Python 3.11
            return False
        return True
