"""A JSON line for each request, written by a thread of its own: a full pipe must not stop the event loop."""

from __future__ import annotations

import json
import queue
import sys
import threading
from collections.abc import Mapping
from typing import Any

_MOST_WAITING = 10_000


class AccessLog:
    """Lines on standard error. Any thread."""

    def __init__(self) -> None:
        self._lines: queue.Queue[str | None] = queue.Queue(_MOST_WAITING)
        self._num_lost = 0
        self._thread = threading.Thread(target=self._write, name="plansmith-access-log", daemon=True)
        self._thread.start()

    def note(self, fields: Mapping[str, Any]) -> None:
        """Queue a line; one that finds the queue full is counted and lost."""
        try:
            self._lines.put_nowait(json.dumps({**fields, "lost_lines": self._num_lost}))
        except queue.Full:
            self._num_lost += 1

    def close(self) -> None:
        """Write what waits, for a second at most."""
        try:
            self._lines.put(None, timeout=1.0)
        except queue.Full:
            return
        self._thread.join(1.0)

    def _write(self) -> None:
        while (line := self._lines.get()) is not None:
            try:
                print(line, file=sys.stderr, flush=True)
            except OSError:
                return
