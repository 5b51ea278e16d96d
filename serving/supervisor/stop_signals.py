"""SIGTERM and SIGINT as the order to stop: noted always, an exception where something long is waited for."""

from __future__ import annotations

import contextlib
import signal
from collections.abc import Iterator


class Stop(Exception):
    """The order came while something was waited for."""


class StopSignals:
    """Takes the signals while it is entered. The main thread alone.

    num_stops : orders so far
    """

    def __init__(self) -> None:
        self.num_stops = 0
        self._may_interrupt = False

    @contextlib.contextmanager
    def taken(self) -> Iterator[None]:
        """Take the signals, and ignore a terminal that is closed."""
        earlier = {one: signal.signal(one, self._on_signal) for one in (signal.SIGTERM, signal.SIGINT)}
        earlier[signal.SIGHUP] = signal.signal(signal.SIGHUP, signal.SIG_IGN)
        try:
            yield
        finally:
            for one, handler in earlier.items():
                signal.signal(one, handler)

    @contextlib.contextmanager
    def interruptible(self) -> Iterator[None]:
        """Let an order end what is waited for inside, by Stop."""
        self._may_interrupt = True
        try:
            if self.num_stops:
                raise Stop
            yield
        finally:
            self._may_interrupt = False

    @contextlib.contextmanager
    def held(self) -> Iterator[None]:
        """Keep an order until the end of the block: for what must not be left half done."""
        earlier, self._may_interrupt = self._may_interrupt, False
        try:
            yield
        finally:
            self._may_interrupt = earlier
        if earlier and self.num_stops:
            self._may_interrupt = False
            raise Stop

    def _on_signal(self, number: int, frame: object) -> None:
        self.num_stops += 1
        if self._may_interrupt:
            self._may_interrupt = False
            raise Stop
