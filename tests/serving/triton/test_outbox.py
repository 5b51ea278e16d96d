"""What waits is sent when it is due, by one thread a request, and one that is slow makes nobody else wait."""

from __future__ import annotations

import threading
import time

from plansmith.serving.send_budget import SendBudget
from plansmith.serving.triton.outbox import Outbox, Schedule


class Letter:
    """A request whose sends are counted."""

    def __init__(
        self, *, send_s: float = 0.0, work_s: float = 0.0, gate: threading.Event | None = None
    ) -> None:
        self.schedule = Schedule(is_streaming=True)
        self.times: list[float] = []
        self.flushed = threading.Semaphore(0)
        self.overlaps = 0
        self._send_s, self._work_s, self._gate = send_s, work_s, gate
        self._inside = threading.Lock()

    def flush(self) -> int:
        """Count a send."""
        if not self._inside.acquire(blocking=False):
            self.overlaps += 1
            return 0
        self.times.append(time.monotonic())
        if self._gate is not None:
            self._gate.wait(30)
        time.sleep(self._send_s)
        start = time.thread_time()
        while time.thread_time() - start < self._work_s:
            pass
        self._inside.release()
        self.flushed.release()
        return 1

    def wait(self, count: int = 1) -> None:
        """Wait for so many sends."""
        for _ in range(count):
            assert self.flushed.acquire(timeout=10)


def test_what_is_urgent_goes_at_once_and_the_rest_when_the_interval_is_over() -> None:
    outbox = Outbox(interval_s=0.2)
    letter = Letter()
    start = time.monotonic()
    outbox.wake(letter, True)
    letter.wait()
    for _ in range(50):
        outbox.wake(letter, False)
    letter.wait()
    outbox.wake(letter, False)
    outbox.wake(letter, True)
    letter.wait()
    first, second, third = (moment - start for moment in letter.times)
    assert first < 0.1
    assert 0.2 <= second - first < 0.35  # all that came meanwhile, together
    assert third - second < 0.1
    assert outbox.stop()
    assert len(letter.times) == 3


def test_a_request_is_sent_by_one_thread_at_a_time_and_nothing_is_forgotten() -> None:
    outbox = Outbox(interval_s=0.0, num_threads=4)
    letters = [Letter(send_s=0.001) for _ in range(8)]
    for _ in range(50):
        for letter in letters:
            outbox.wake(letter, False)
        time.sleep(0.0005)
    last = [time.monotonic()] * len(letters)
    for i, letter in enumerate(letters):
        last[i] = time.monotonic()
        outbox.wake(letter, True)
    time.sleep(0.1)
    assert outbox.stop()
    assert all(letter.overlaps == 0 for letter in letters)
    assert all(letter.times[-1] >= last[i] for i, letter in enumerate(letters))


def test_a_stuck_send_holds_up_no_other_request() -> None:
    outbox = Outbox(interval_s=0.0, num_threads=2)
    gate = threading.Event()
    stuck = [Letter(gate=gate) for _ in range(3)]
    for letter in stuck:
        outbox.wake(letter, True)
    other = Letter()
    deadline = time.monotonic() + 10
    outbox.wake(other, True)  # does not wait either: the three would have been sent meanwhile
    while not other.times and time.monotonic() < deadline:
        outbox.relieve()
        time.sleep(0.05)
    assert other.times and not any(letter.flushed.acquire(blocking=False) for letter in stuck)
    gate.set()
    for letter in stuck:
        letter.wait()
    assert outbox.stop()


def test_many_streams_send_less_often_each() -> None:
    outbox = Outbox(budget=SendBudget(share=0.05, most_s=0.2))
    streams = [Letter(work_s=0.0005) for _ in range(10)]  # 10 ms a stream, 100 ms for all
    for stream in streams:
        outbox.open(stream)
    for _ in range(40):  # 0.4 s of tokens
        for stream in streams:
            outbox.wake(stream, False)
        time.sleep(0.01)
    for stream in streams:
        outbox.close(stream)
    assert outbox.stop()
    counts = [len(stream.times) for stream in streams]
    assert all(2 <= count <= 10 for count in counts), counts


def test_stop_sends_what_waits() -> None:
    outbox = Outbox(interval_s=30.0)
    letter = Letter()
    outbox.wake(letter, True)
    letter.wait()
    outbox.wake(letter, False)  # due in half a minute
    assert outbox.stop()
    assert len(letter.times) == 2
