"""What builds in one process share when they run side by side: graphs that are written once, and the wish to stop."""

from __future__ import annotations

import contextlib
import dataclasses
import shutil
import threading
from collections.abc import Callable
from pathlib import Path


class SharedGraphs:
    """Lowered graphs in a folder, each written by the first build that asks for it, in a folder of its own.

    Any thread may ask. A graph is as large as the model's weights, so the caller drops those that nobody needs.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._lock = threading.Lock()
        self._locks: dict[str, threading.Lock] = {}

    def file(self, name: str, write: Callable[[Path], None]) -> Path:
        """Return the ONNX file of that name; `write` makes it, with its weights beside it, where nobody has.

        raises what write raises; the next who asks tries again
        """
        path = self._folder / name / "graph.onnx"
        with self._lock:
            lock = self._locks.setdefault(name, threading.Lock())
        with lock:
            if not path.is_file():
                self._write(path, write)
        return path

    def _write(self, path: Path, write: Callable[[Path], None]) -> None:
        path.parent.mkdir(parents=True)
        try:
            write(path)
        except BaseException:
            shutil.rmtree(path.parent, ignore_errors=True)
            raise

    def drop_all(self) -> None:
        """Remove all graphs; nobody may be using one."""
        with self._lock, contextlib.suppress(FileNotFoundError):
            for folder in self._folder.iterdir():
                shutil.rmtree(folder, ignore_errors=True)


@dataclasses.dataclass(frozen=True)
class SideBySide:
    """What builds share. stop : once set, by any thread, compilers are ended and their builds raise Stopped."""

    graphs: SharedGraphs
    stop: threading.Event
