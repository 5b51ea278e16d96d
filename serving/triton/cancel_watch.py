"""Looks for clients that went away. A look asks the server and takes 40-130 us, so their rate is bounded."""

from __future__ import annotations

import collections
import threading
import time
from collections.abc import Callable

from .request import Request

__all__ = ["CancelWatch"]

_SMOOTHING = 0.1  # weight of the newest cost in the running mean
# A look costs 7-34 us of this process's time, and the server about twice that. What it takes by the clock says less:
# on a busy machine it is mostly waiting.
_COST_PER_CPU_S = 3.0


class CancelWatch:
    """Asks each open request in turn whether its client is still there, and cancels those whose is not.

    period_s : least time between two looks at one request
    share : of a core's time that looks may take; with many requests each is looked at less often
    on_round : called every now and then while requests are open, at least every period_s
    idle_s : between two calls of on_round while none is; None = it is not called then
    """

    def __init__(
        self,
        period_s: float,
        *,
        share: float = 0.02,
        on_round: Callable[[], None] = lambda: None,
        idle_s: float | None = None,
    ) -> None:
        self._period_s = max(period_s, 0.001)
        self._share = share
        self._on_round = on_round
        self._idle_s = idle_s
        self._cost_s = 0.0
        self._changed = threading.Condition()
        self._open: collections.OrderedDict[Request, float] = collections.OrderedDict()  # when to look next
        self._is_closing = False
        self._thread = threading.Thread(target=self._run, name="plansmith-cancel", daemon=True)
        self._thread.start()

    def add(self, request: Request) -> None:
        """Watch a request from here on."""
        with self._changed:
            if not self._open:
                self._changed.notify()
            self._open[request] = time.monotonic() + self._period_s

    def remove(self, request: Request) -> None:
        """Stop watching a request; nothing if it is not watched."""
        with self._changed:
            self._open.pop(request, None)

    def stop(self, timeout_s: float = 1.0) -> None:
        """End the thread."""
        with self._changed:
            self._is_closing = True
            self._changed.notify()
        self._thread.join(timeout_s)

    def _run(self) -> None:
        pause_s: float = 0.0
        while True:
            with self._changed:
                if not self._is_closing:
                    self._changed.wait(pause_s if self._open else self._idle_s)
                if self._is_closing:
                    return
                request = self._next()
            self._on_round()
            if request is None:
                pause_s = self._period_s / 4
            else:
                self._look(request)
                pause_s = max(0.001, self._cost_s / self._share)

    def _next(self) -> Request | None:
        """Return the request that waits longest for a look, if it is due. Under the lock."""
        now = time.monotonic()
        request, due_s = next(iter(self._open.items()), (None, 0.0))
        if request is None or due_s > now:
            return None
        self._open[request] = now + self._period_s
        self._open.move_to_end(request)
        return request

    def _look(self, request: Request) -> None:
        start = time.thread_time()
        try:
            is_cancelled = request.reply.is_cancelled()
        except Exception:  # it has ended, or the server has
            is_cancelled = False
        cost_s = _COST_PER_CPU_S * (time.thread_time() - start)
        self._cost_s += (cost_s - self._cost_s) * (_SMOOTHING if self._cost_s else 1.0)
        if is_cancelled:
            self.remove(request)
            request.cancel(is_gone=True)
