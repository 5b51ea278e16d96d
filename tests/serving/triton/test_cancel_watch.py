"""Rounds of the watch, and who is cancelled in them."""

from __future__ import annotations

import threading
import time
import types
from collections.abc import Callable

from plansmith.serving.triton.cancel_watch import CancelWatch


class Client:
    """A request as the watch sees it."""

    def __init__(self, is_cancelled: Callable[[], bool]) -> None:
        self.reply = types.SimpleNamespace(is_cancelled=is_cancelled)
        self.cancelled = threading.Event()

    def cancel(self, *, is_gone: bool) -> None:
        assert is_gone
        self.cancelled.set()


def fails() -> bool:
    raise RuntimeError("the server is gone")


def test_the_clients_that_went_away_are_cancelled_whatever_becomes_of_other_looks() -> None:
    watch = CancelWatch(0.001)
    broken, there, gone = Client(fails), Client(lambda: False), Client(lambda: True)
    for one in (broken, there, gone):
        watch.add(one)  # type: ignore[arg-type]
    assert gone.cancelled.wait(10)
    time.sleep(0.05)
    assert not broken.cancelled.is_set() and not there.cancelled.is_set()
    watch.stop()


def test_rounds_go_on_while_nothing_is_open_where_they_are_wanted() -> None:
    for idle_s in (None, 0.01):
        rounds = threading.Semaphore(0)
        watch = CancelWatch(0.001, on_round=rounds.release, idle_s=idle_s)
        if idle_s is None:
            time.sleep(0.2)
            assert not rounds.acquire(blocking=False)
        else:
            assert all(rounds.acquire(timeout=10) for _ in range(3))
        watch.stop()
        assert not watch._thread.is_alive()
