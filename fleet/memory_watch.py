"""How much memory this process and those it started hold together, and have held at most."""

from __future__ import annotations

import contextlib
import os
import threading
from pathlib import Path
from types import TracebackType

INTERVAL_S = 0.1
# What the kernel cannot drop: pages of files can be read again.
_HELD = ("RssAnon:", "RssShmem:")


def held_bytes(pid: int) -> int:
    """Return what a process holds, without pages of files; 0 for one that is gone, and where that cannot be told."""
    with contextlib.suppress(OSError, ValueError):
        lines = Path(f"/proc/{pid}/status").read_text(encoding="utf-8").splitlines()
        return sum(int(line.split()[1]) << 10 for line in lines if line.startswith(_HELD))
    return 0


def tree_bytes(pid: int) -> int:
    """Return what a process and its descendants hold."""
    return held_bytes(pid) + sum(tree_bytes(child) for child in _children(pid))


def _children(pid: int) -> list[int]:
    found: list[int] = []
    with contextlib.suppress(OSError, ValueError):
        for task in Path(f"/proc/{pid}/task").iterdir():
            with contextlib.suppress(OSError):
                found += map(int, (task / "children").read_text().split())
    return found


class MemoryWatch:
    """Looks several times a second, inside a `with` block; `peak_bytes` is the most it saw, 0 where it cannot tell."""

    def __init__(self, interval_s: float = INTERVAL_S) -> None:
        self.peak_bytes = 0
        self._interval_s = interval_s
        self._end = threading.Event()
        self._thread = threading.Thread(target=self._look, name="memory-watch", daemon=True)

    def __enter__(self) -> MemoryWatch:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._end.set()
        self._thread.join()

    def _look(self) -> None:
        while True:
            self.peak_bytes = max(self.peak_bytes, tree_bytes(os.getpid()))
            if self._end.wait(self._interval_s):
                return
