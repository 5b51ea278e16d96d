"""The threads that send: whatever waits in a request goes out as one piece, when its time has come."""

from __future__ import annotations

import contextlib
import heapq
import itertools
import threading
import time
import traceback
from typing import Protocol

from ..send_budget import SendBudget

__all__ = ["Outbox", "Sendable"]

_MAX_THREADS = 16
# A send that takes longer does not come back soon; another thread takes its place.
_STUCK_S = 0.5
NOT_YET = -1
"""What `flush` returns when what waits cannot be sent yet: it is called again, soon at first."""
_SOON_S, _LATER_S = 0.001, 0.03


class Sendable(Protocol):
    """Something that has answers to send; the other fields belong to the outbox."""

    schedule: Schedule

    def flush(self) -> int:
        """Send what waits and return the number of answers, or NOT_YET. One thread at a time; must not raise."""


class Schedule:
    """When a request is sent next. Fields change under the outbox's lock.

    due_s : time.monotonic() of the next send; None = none is planned
    is_streaming : its answers share the budget of streams
    """

    def __init__(self, *, is_streaming: bool) -> None:
        self.is_streaming = is_streaming
        self.due_s: float | None = None
        self.sent_s = 0.0
        self.is_sending = False
        self.wants_more = False
        self.wants_at_once = False
        self.retry_s = _SOON_S


class Outbox:
    """Sends what requests have, each by one thread at a time.

    interval_s : least time between two sends of a stream; None = by what sending costs, see SendBudget
    """

    def __init__(
        self, *, num_threads: int = 2, interval_s: float | None = None, budget: SendBudget | None = None
    ) -> None:
        self._interval_s = interval_s
        self._budget = budget or SendBudget()
        self._changed = threading.Condition()
        self._heap: list[tuple[float, int, Sendable]] = []
        self._order = itertools.count()
        self._timer_s: float | None = None  # until when one thread sleeps; the others sleep until notified
        self._num_streams = 0
        self._is_closing = False
        self._sending: dict[int, float] = {}  # thread -> since when
        self._threads: list[threading.Thread] = []
        with self._changed:
            for _ in range(num_threads):
                self._add_thread()

    def open(self, request: Sendable) -> None:
        """Count a request's stream; `close` of it takes it back."""
        with self._changed:
            self._num_streams += request.schedule.is_streaming

    def close(self, request: Sendable) -> None:
        """Say that a request has sent its last answer."""
        with self._changed:
            self._num_streams -= request.schedule.is_streaming

    def wake(self, request: Sendable, at_once: bool) -> None:
        """Say that a request has something to send. Any thread; does not wait.

        at_once : else when the interval since its last send is over
        """
        plan = request.schedule
        if not at_once and (plan.due_s is not None or plan.wants_more):
            return  # it will be taken along: what waits was put there before this was read
        with self._changed:
            if plan.is_sending:
                plan.wants_more = True
                plan.wants_at_once |= at_once
            else:
                self._plan(request, at_once)

    def stop(self, timeout_s: float = 5.0) -> bool:
        """Send what is due, then end the threads; False when one does not come back in time."""
        with self._changed:
            self._is_closing = True
            self._changed.notify_all()
        deadline = time.monotonic() + timeout_s
        for thread in list(self._threads):
            thread.join(max(0.0, deadline - time.monotonic()))
        return not any(thread.is_alive() for thread in self._threads)

    def relieve(self) -> None:
        """Add a thread where all are stuck in a send while others wait. Called from time to time."""
        now = time.monotonic()
        with self._changed:
            is_waiting = bool(self._heap) and self._heap[0][0] <= now
            if not is_waiting or self._is_closing or len(self._threads) >= _MAX_THREADS:
                return
            num_stuck = sum(now - since > _STUCK_S for since in self._sending.values())
            if num_stuck >= len(self._threads):
                with contextlib.suppress(
                    RuntimeError
                ):  # the process may have no more; one of these comes back
                    self._add_thread()

    def _add_thread(self) -> None:
        thread = threading.Thread(target=self._run, name="plansmith-send", daemon=True)
        thread.start()
        self._threads.append(thread)

    def _plan(self, request: Sendable, at_once: bool) -> None:
        """Put a request into the heap. Under the lock."""
        plan = request.schedule
        now = time.monotonic()
        due = now if at_once else max(now, plan.sent_s + self._interval())
        if plan.due_s is not None and plan.due_s <= due:
            return
        plan.due_s = due
        heapq.heappush(self._heap, (due, next(self._order), request))
        if due <= now:
            self._changed.notify()
        elif self._timer_s is None or due < self._timer_s:
            self._changed.notify_all()

    def _retry(self, request: Sendable) -> None:
        """Plan the next try of a request that could not send. Under the lock."""
        plan = request.schedule
        plan.wants_more = plan.wants_at_once = False
        if self._is_closing:
            return
        plan.due_s = time.monotonic() + plan.retry_s
        plan.retry_s = min(2 * plan.retry_s, _LATER_S)
        heapq.heappush(self._heap, (plan.due_s, next(self._order), request))
        self._changed.notify_all()

    def _interval(self) -> float:
        if self._interval_s is not None:
            return self._interval_s
        return self._budget.interval_s(self._num_streams)

    def _run(self) -> None:
        while (request := self._next()) is not None:
            start, cpu_start = time.monotonic(), time.thread_time()
            try:
                count = request.flush()
            except Exception:  # our own fault, which the log has to say; the others' answers still go
                traceback.print_exc()
                count = 0
            if count > 0:
                self._budget.sent((time.thread_time() - cpu_start) / count)
            with self._changed:
                del self._sending[threading.get_ident()]
                plan = request.schedule
                plan.is_sending = False
                if count == NOT_YET:
                    self._retry(request)
                    continue
                plan.sent_s, plan.retry_s = start, _SOON_S
                if plan.wants_more:
                    at_once, plan.wants_more, plan.wants_at_once = plan.wants_at_once, False, False
                    self._plan(request, at_once)

    def _next(self) -> Sendable | None:
        """Wait for the next request that is due; None at the end."""
        with self._changed:
            while True:
                now = time.monotonic()
                while self._heap and self._heap[0][2].schedule.due_s != self._heap[0][0]:
                    heapq.heappop(self._heap)  # sent already, or planned for earlier
                if self._heap and (self._heap[0][0] <= now or self._is_closing):
                    return self._begin(now)
                if self._is_closing:
                    return None
                self._sleep(now)

    def _begin(self, now: float) -> Sendable:
        request = heapq.heappop(self._heap)[2]
        request.schedule.due_s = None
        request.schedule.is_sending = True
        self._sending[threading.get_ident()] = now
        if self._heap:
            self._changed.notify()  # another thread watches what comes next
        return request

    def _sleep(self, now: float) -> None:
        """Wait until the next request is due where no other thread does, else until something changes."""
        if not self._heap or (self._timer_s is not None and self._timer_s <= self._heap[0][0]):
            self._changed.wait()
            return
        own = self._timer_s = self._heap[0][0]
        self._changed.wait(own - now)
        if self._timer_s == own:
            self._timer_s = None
