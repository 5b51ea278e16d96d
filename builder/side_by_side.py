"""What builds that run side by side in one process share, and what each of them has of whoever runs it."""

from __future__ import annotations

import contextlib
import dataclasses
import shutil
import threading
from collections.abc import Callable
from pathlib import Path

from .engine_dir import Describe, describe_file


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


def _nothing() -> None:
    """Do nothing."""


@dataclasses.dataclass(frozen=True)
class SideBySide:
    """A build among others.

    graphs : shared by all
    stop : shared by all; once set, by any thread, compilers are ended and their builds raise Stopped
    compilers_ended : called by a build once it runs none any more; what is left takes neither memory nor a core for
        long
    describe : gives the manifest's entry of a plan's file; whoever stores it can hash it on the way
    """

    graphs: SharedGraphs
    stop: threading.Event
    compilers_ended: Callable[[], None] = _nothing
    describe: Describe = describe_file
