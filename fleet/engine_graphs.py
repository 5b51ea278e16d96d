"""The lowered graphs of engines while their units are compiled: each as large as the weights, so none stays long."""

from __future__ import annotations

import collections
import contextlib
import hashlib
import threading
from collections.abc import Iterator
from pathlib import Path

from ..builder.side_by_side import SharedGraphs, SideBySide


class EngineGraphs:
    """Graphs that the units of one engine share, removed behind the last unit that was expected. Any thread may ask.

    stop : once set, compilers are ended
    """

    def __init__(self, folder: Path, stop: threading.Event) -> None:
        self._folder = folder
        self._stop = stop
        self._lock = threading.Lock()
        self._left: collections.Counter[str] = collections.Counter()
        self._made: dict[str, SideBySide] = {}

    def expect(self, engine: str) -> None:
        """Say that one more unit of an engine will be compiled."""
        self._left[engine] += 1

    def of(self, engine: str) -> SideBySide:
        """Return what the builds of an engine's units share."""
        with self._lock:
            if engine not in self._made:
                folder = self._folder / hashlib.sha256(engine.encode()).hexdigest()
                self._made[engine] = SideBySide(SharedGraphs(folder), self._stop)
            return self._made[engine]

    @contextlib.contextmanager
    def used(self, engine: str) -> Iterator[None]:
        """Count a unit as compiled behind the block, also after an error."""
        try:
            yield
        finally:
            with self._lock:
                self._left[engine] -= 1
                done = self._made.pop(engine, None) if self._left[engine] <= 0 else None
            if done is not None:
                done.graphs.drop_all()
