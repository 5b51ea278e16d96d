"""Printing shared by the commands: JSON, sizes, progress."""

from __future__ import annotations

import json
import sys
import threading
import time
from types import TracebackType
from typing import Any

# Without a terminal, a line a target at most this often: a log is read later.
PLAIN_INTERVAL_S = 10.0


def print_json(value: Any, indent: int | None = 2) -> None:
    """Print a value as JSON on stdout."""
    print(json_text(value, sys.stdout.encoding, indent))


def json_text(value: Any, encoding: str | None, indent: int | None = None) -> str:
    """Return JSON that a stream of this encoding takes; characters are spelled out where it is not UTF-8."""
    plain = (encoding or "ascii").lower().replace("-", "") != "utf8"
    return json.dumps(value, indent=indent, ensure_ascii=plain)


def size_text(num_bytes: int) -> str:
    """Return a size for people: 0 B, 12.3 kB, 300.1 MB."""
    size = float(num_bytes)
    for unit in ("B", "kB", "MB", "GB"):
        if size < 1000 or unit == "GB":
            return f"{size:.0f} {unit}" if unit == "B" else f"{size:.1f} {unit}"
        size /= 1000
    raise AssertionError("not reached")


class BuildProgress:
    """Shows on stderr where a build or a comparison is: bars on a terminal, else now and then a line.

    Where there are more bars than lines, those whose work has ended go first, then those that told something longest
    ago. Work has ended when its thread tells of other work. Any thread may call it.
    """

    def __init__(self, quiet: bool = False) -> None:
        self._quiet = quiet
        self._bars: Any = None
        self._tasks: dict[str, Any] = {}
        self._order: dict[str, None] = {}  # who told something, the last one last
        self._at_work: dict[int, str] = {}  # of whom each thread told last
        self._told: dict[str, float] = {}
        self._lock = threading.Lock()

    def __enter__(self) -> BuildProgress:
        if not self._quiet and sys.stderr.isatty():
            from rich.console import Console
            from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

            columns = ("{task.fields[target]:<10}", BarColumn(), TimeElapsedColumn(), "{task.description}")
            self._bars = Progress(
                *(TextColumn(c) if isinstance(c, str) else c for c in columns),
                console=Console(stderr=True),
                transient=True,
            )
            self._bars.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._bars is not None:
            self._bars.stop()

    def __call__(self, target: str, phase: str, done: int, total: int) -> None:
        """Take one step of a target, or of what has its place; `total` is 0 where it is not known."""
        if self._quiet:
            return
        with self._lock:
            if self._bars is not None:
                self._show(target, phase, done, total)
            else:
                self._tell(target, phase, done, total)

    def _show(self, target: str, phase: str, done: int, total: int) -> None:
        if target not in self._tasks:
            self._tasks[target] = self._bars.add_task(phase, target=target, total=None)
        self._bars.update(self._tasks[target], description=phase, completed=done, total=total or None)
        self._order.pop(target, None)
        self._order[target] = None
        self._at_work[threading.get_ident()] = target
        self._hide_what_has_no_room()

    def _hide_what_has_no_room(self) -> None:
        at_work = set(self._at_work.values())
        newest = list(reversed(self._order))
        first = sorted(newest, key=lambda target: target not in at_work)
        room = max(1, self._bars.console.height - 1)
        for n, target in enumerate(first):
            self._bars.update(self._tasks[target], visible=n < room)

    def _tell(self, target: str, phase: str, done: int, total: int) -> None:
        now = time.monotonic()
        if now - self._told.get(target, -PLAIN_INTERVAL_S) >= PLAIN_INTERVAL_S:
            self._told[target] = now
            share = f" ({100 * done // total} %)" if total else ""
            print(f"plansmith: {target}: {phase}{share}", file=sys.stderr, flush=True)
