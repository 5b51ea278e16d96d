"""Streams of the test double: queues whose work runs only when it is waited for, ordered by vector clocks.

Work runs as late as a device may run it: a host that changes a staging buffer too early, or reads a result before it
has waited, gets wrong data here every time. `eager` runs everything at once instead, the other order a device may
choose. A clock maps a stream to the number of its last work that is known to have ended.
"""

from __future__ import annotations

import dataclasses
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

from fake_memory import Bytes, Memory, caller

Clock = dict[int, int]


class DeviceFault(Exception):
    """Work ended with an error that stays: every later call of the context returns `error`."""

    def __init__(self, error: Any) -> None:
        super().__init__(str(error))
        self.error = error


class Work:
    """One thing that a stream does. `run` is given a Reach, through which it gets to memory.

    on_enqueue : called when the work is put into a stream's queue (again for each launch of a graph that holds it)
    """

    def __init__(
        self,
        label: str,
        run: Callable[[Reach], None],
        *,
        on_enqueue: Callable[[], Callable[[], None] | None] | None = None,
    ) -> None:
        self.label = f"{label} ({caller()})"
        self.run, self.on_enqueue = run, on_enqueue
        self.reads_host, self.writes_host = False, False


@dataclasses.dataclass
class Queued:
    """Work in a queue: its number in the stream, and what was known to be over when it was put there."""

    work: Work
    seq: int
    clock: Clock
    needs: list[tuple[Stream, int]]
    check: Callable[[], None] | None = None


class Reach:
    """How work reaches memory: each range is checked for bounds, life time and races."""

    def __init__(self, memory: Memory, stream: int, queued: Queued) -> None:
        self._memory, self._by, self._clock = memory, (stream, queued.seq), queued.clock
        self.what = queued.work.label

    def read(self, address: int, size: int) -> Bytes:
        """Return the bytes of a range that is read."""
        return self._memory.access(address, size, False, self._by, self._clock, self.what)

    def write(self, address: int, size: int) -> Bytes:
        """Return the bytes of a range that is written."""
        return self._memory.access(address, size, True, self._by, self._clock, self.what)


class Graph:
    """Captured work, in order."""

    def __init__(self, works: Sequence[Work]) -> None:
        self.works = list(works)


class Stream:
    """A queue of work."""

    def __init__(self, number: int, blocking: bool) -> None:
        self.number, self.blocking = number, blocking
        self.queue: deque[Queued] = deque()
        self.last, self.done = 0, 0
        self.clock: Clock = {}
        self.needs: list[tuple[Stream, int]] = []
        self.capture: Capture | None = None
        self.destroyed = False


class Capture:
    """A capture in progress; mode : "global", "thread_local" or "relaxed"."""

    def __init__(self, mode: str, thread: int) -> None:
        self.mode, self.thread = mode, thread
        self.works: list[Work] = []
        self.invalid = ""


class Event:
    """A mark in a stream: its last record, None before the first."""

    def __init__(self, timing: bool) -> None:
        self.timing = timing
        self.record: tuple[Stream, int, Clock] | None = None


class Streams:
    """All streams of a context, the legacy default stream (0) among them."""

    def __init__(self, memory: Memory) -> None:
        self.memory = memory
        self.eager = False
        self.fault: DeviceFault | None = None
        self.before_run: Callable[[Work], None] | None = None
        self.host_clock: Clock = {}
        self.default = Stream(0, blocking=True)
        self.all = [self.default]

    def create(self, blocking: bool) -> Stream:
        """Return a new stream."""
        made = Stream(len(self.all), blocking)
        self.all.append(made)
        return made

    def enqueue(self, stream: Stream, work: Work) -> None:
        """Put work at a stream's end, or into the graph that is captured there."""
        if stream.capture is not None:
            stream.capture.works.append(work)
            return
        for other in self._implicit(stream):
            self._depend(stream, other, other.last, {**other.clock, other.number: other.last})
        _merge(stream.clock, self.host_clock)
        stream.last += 1
        check = work.on_enqueue() if work.on_enqueue else None
        stream.queue.append(Queued(work, stream.last, dict(stream.clock), stream.needs, check))
        stream.needs = []
        if self.eager:
            self.run(stream, stream.last)

    def record(self, event: Event, stream: Stream) -> None:
        """Mark the end of what is in the stream now."""
        _merge(stream.clock, self.host_clock)
        event.record = (stream, stream.last, {**stream.clock, stream.number: stream.last})

    def wait_event(self, stream: Stream, event: Event) -> None:
        """Let a stream's later work wait for the event's mark."""
        if event.record is not None:
            self._depend(stream, *event.record)

    def run(self, stream: Stream, seq: int) -> None:
        """Run a stream's work up to number `seq`, and what that waits for. Raises DeviceFault."""
        while stream.done < seq:
            queued = stream.queue[0]
            for other, number in queued.needs:
                self.run(other, number)
            stream.queue.popleft()
            stream.done = queued.seq
            self._run_one(stream, queued)

    def wait(self, stream: Stream, seq: int, clock: Clock) -> None:
        """Run up to `seq` and let the host know that it is over, with everything in `clock`."""
        self.run(stream, seq)
        _merge(self.host_clock, {**clock, stream.number: seq})
        if not any(one.queue for one in self.all):
            self.memory.forget_accesses(self.host_clock)

    def synchronize(self, stream: Stream) -> None:
        """Wait for all of a stream's work."""
        for other, number in stream.needs:
            self.run(other, number)
        self.wait(stream, stream.last, stream.clock)

    def synchronize_all(self) -> None:
        """Wait for everything."""
        for stream in self.all:
            self.synchronize(stream)

    @property
    def pending(self) -> list[Work]:
        """All queued work."""
        return [queued.work for stream in self.all for queued in stream.queue]

    def _run_one(self, stream: Stream, queued: Queued) -> None:
        if self.fault is not None:
            return  # a broken context does nothing more
        if queued.check is not None:
            queued.check()
        try:
            if self.before_run is not None:
                self.before_run(queued.work)
            queued.work.run(Reach(self.memory, stream.number, queued))
        except DeviceFault as fault:
            self.fault = fault

    def _implicit(self, stream: Stream) -> list[Stream]:
        """Return the streams that the legacy default stream's rules put before new work of this one."""
        if stream is self.default:
            return [one for one in self.all if one.blocking and one is not stream]
        return [self.default] if stream.blocking and self.default.last else []

    def _depend(self, stream: Stream, other: Stream, number: int, clock: Clock) -> None:
        if other is not stream and number > other.done:
            stream.needs.append((other, number))
        _merge(stream.clock, clock)


def _merge(clock: Clock, other: Clock) -> None:
    for stream, number in other.items():
        if clock.get(stream, 0) < number:
            clock[stream] = number
