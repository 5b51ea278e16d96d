"""Answers between two models of a server, one at a time: the next goes when the last has been read.

The Python backend of Triton 24.10 locks up for good when two answers to one call come close together while another
call is made. Reading an answer takes the call's lock and then Python's; making a call takes Python's and then that of
all calls; an arriving answer takes that of all calls and then the call's. No answer arrives while one is being read if
the model that answers waits for its turn. So the model that calls counts the answers it has read where the other can
see it: in a file of counters in shared memory, one for each call in flight; its name and place go along with the call.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import re
import stat
import tempfile
import threading
import uuid
from collections.abc import Callable
from pathlib import Path

import numpy as np

from ...runtime.errors import InvalidArgumentError, QueueFullError

TURN = "turn"
"""Request parameter of a call: where its counter is."""

_NUM_SLOTS = 16384
_RUN = "PLANSMITH_TRITON_RUN"  # of the supervisor, which removes what such names begin with
_ADDRESS = re.compile(r"(plansmith[0-9a-z]*turns-\d+-[0-9a-f]{32}):(\d{1,6})")


def folder() -> Path:
    """Return where the counters' files are: in memory where the system has a place for that."""
    memory = Path("/dev/shm")
    return memory if memory.is_dir() else Path(tempfile.gettempdir())


class Turn:
    """The counter of one call. One thread at a time."""

    def __init__(self, board: TurnBoard, slot: int) -> None:
        self._board, self._slot = board, slot

    @property
    def address(self) -> str:
        """What the answering model finds it by."""
        return f"{self._board.name}:{self._slot}"

    def has_read(self) -> None:
        """Say that one answer more has been read."""
        self._board.counters[self._slot] += 1

    def release(self) -> None:
        """Give the counter back, once the last answer has been read."""
        self._board.give_back(self._slot)


class TurnBoard:
    """The counters of a model that calls others. Any thread."""

    def __init__(self, num_slots: int = _NUM_SLOTS) -> None:
        self.name = f"plansmith{os.environ.get(_RUN, '')}turns-{os.getpid()}-{uuid.uuid4().hex}"
        self._path = folder() / self.name
        descriptor = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        try:
            os.ftruncate(descriptor, num_slots * 4)
            self.counters = np.frombuffer(mmap.mmap(descriptor, num_slots * 4), np.uint32)
        finally:
            os.close(descriptor)
        self._lock = threading.Lock()
        self._free = list(range(num_slots - 1, -1, -1))

    def take(self) -> Turn:
        """Return a counter at 0; QueueFullError when all are in use."""
        with self._lock:
            if not self._free:
                raise QueueFullError(f"{len(self.counters)} calls are running; try again later")
            slot = self._free.pop()
        self.counters[slot] = 0
        return Turn(self, slot)

    def give_back(self, slot: int) -> None:
        """Take a slot back; see Turn.release."""
        with self._lock:
            self._free.append(slot)

    def close(self) -> None:
        """Remove the file; those who have it open keep it."""
        with contextlib.suppress(FileNotFoundError):
            self._path.unlink()


class TurnReader:
    """Reads the counters of callers. Any thread."""

    def __init__(self) -> None:
        self._boards: dict[str, np.ndarray[tuple[int], np.dtype[np.uint32]]] = {}
        self._lock = threading.Lock()

    def open(self, address: object) -> Callable[[], int]:
        """Return what tells how many answers a call has read.

        raises : InvalidArgumentError for an address that no caller of this server gives
        """
        found = _ADDRESS.fullmatch(address) if isinstance(address, str) else None
        if found is None:
            raise InvalidArgumentError(
                f"the parameter {TURN} is {str(address)[:80]!r}; it is for calls between the models of a server, "
                "leave it out"
            )
        counters, slot = self._board(found[1]), int(found[2])
        if slot >= len(counters):
            raise InvalidArgumentError(f"the parameter {TURN} has no place {slot}; leave it out")
        return lambda: int(counters[slot])

    def _board(self, name: str) -> np.ndarray[tuple[int], np.dtype[np.uint32]]:
        with self._lock:
            if name not in self._boards:
                if len(self._boards) >= 64:  # of callers that were loaded again
                    del self._boards[next(iter(self._boards))]
                self._boards[name] = _map(name)
            return self._boards[name]


def _map(name: str) -> np.ndarray[tuple[int], np.dtype[np.uint32]]:
    """Return a board's counters. Clients can send any name, so only a file of this user's own is opened."""
    try:
        descriptor = os.open(folder() / name, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
        try:
            found = os.fstat(descriptor)
            if not stat.S_ISREG(found.st_mode) or found.st_uid != os.geteuid() or found.st_size < 4:
                raise OSError("it is no file of counters")
            return np.frombuffer(mmap.mmap(descriptor, found.st_size, prot=mmap.PROT_READ), np.uint32)
        finally:
            os.close(descriptor)
    except (OSError, ValueError) as error:
        raise InvalidArgumentError(
            f"the parameter {TURN} names no file of counters ({error}); leave it out"
        ) from None
