"""Locks on files (flock). The kernel frees a lock with its process, however that ends.

A process that was forked while a lock was held shares it; programs that are started (exec) do not.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import pathlib
import time
from types import TracebackType


class Held:
    """A lock that is held until `release`, or the end of a `with`."""

    def __init__(self, descriptor: int, path: pathlib.Path | None = None) -> None:
        self._descriptor: int | None = descriptor
        self._path = path

    def release(self) -> None:
        """Give the lock back; a second time does nothing."""
        descriptor, self._descriptor = self._descriptor, None
        if descriptor is None:
            return
        if self._path is not None:
            self._path.unlink(missing_ok=True)
        fcntl.flock(
            descriptor, fcntl.LOCK_UN
        )  # closing alone leaves it with children that were forked meanwhile
        os.close(descriptor)

    def __enter__(self) -> Held:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.release()


def shared(path: pathlib.Path) -> Held:
    """Return a lock that many may hold, none of them beside an exclusive one; waits."""
    return Held(_lock(path, fcntl.LOCK_SH))


def exclusive(path: pathlib.Path) -> Held:
    """Return a lock that one alone holds; waits."""
    return Held(_lock(path, fcntl.LOCK_EX))


def own(path: pathlib.Path, blocking: bool) -> Held | None:
    """Return the lock of a file that is there only while somebody holds it; None when it is taken.

    The file holds its holder's process id.
    """
    tries = 3  # a collection has it for a moment
    while True:
        try:
            descriptor = _lock(path, fcntl.LOCK_EX | (0 if blocking else fcntl.LOCK_NB))
        except BlockingIOError:
            tries -= 1
            if tries == 0:
                return None
            time.sleep(0.001)
            continue
        # Its last holder may have removed the file between our open and our lock: then it locks nobody out.
        if _is_at(descriptor, path):
            with contextlib.suppress(OSError):  # for whoever looks; a full disk locks as well
                os.truncate(descriptor, 0)
                os.pwrite(descriptor, str(os.getpid()).encode(), 0)
            return Held(descriptor, path)
        os.close(descriptor)


def _lock(path: pathlib.Path, how: int) -> int:
    """Return an open file that is locked; BlockingIOError when that would have to wait and how says not to."""
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
    try:
        fcntl.flock(descriptor, how)
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor


def _is_at(descriptor: int, path: pathlib.Path) -> bool:
    try:
        return os.fstat(descriptor).st_ino == path.stat().st_ino
    except FileNotFoundError:
        return False
