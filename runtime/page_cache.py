"""Files in the system's page cache: how much of them is there, reading them in, keeping them there.

Linux alone. A file is mapped and its pages are had from the mapping, which asks for huge ones: what reads a file by
calls fills the cache with small pages, and whoever maps it later then walks 512 times as many.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import mmap
import os
import re
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import TracebackType

import numpy as np

from .control_groups import available_memory_bytes, small_file
from .errors import EngineFileError, UnsupportedError

_PIECE_BYTES = 8 << 20  # whole huge pages
_HUGE_PAGE_BYTES = 2 << 20
# madvise's, which the mmap module does not name everywhere.
_ADVICE_HUGE, _ADVICE_POPULATE = 14, 22
_POLL_SECONDS = 0.01


def check_system() -> None:
    """Raise UnsupportedError where the page cache cannot be looked at and filled as here."""
    if not sys.platform.startswith("linux"):
        raise UnsupportedError(
            f"the page cache can be read and locked on Linux alone, and this is {sys.platform}; start the server itself"
        )


class MappedFile:
    """A file, mapped, whose pages come and are locked as asked; a context manager that unmaps it.

    raises EngineFileError where it cannot be opened
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        with _naming(path), path.open("rb") as file:
            self.num_bytes = os.fstat(file.fileno()).st_size
            self._map = mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ) if self.num_bytes else None
            self._fd = os.dup(file.fileno())
        self._libc = ctypes.CDLL(None, use_errno=True)
        # An array over the mapping holds it open.
        self._view = None if self._map is None else np.frombuffer(self._map, np.uint8)
        if self._view is not None:
            self._call("madvise", 0, self.num_bytes, _ADVICE_HUGE)  # a refusal costs speed only

    def resident_bytes(self) -> int | None:
        """Return how many of its bytes are in the page cache; None where the system tells that to its owner alone."""
        if self._view is None:
            return 0
        if os.geteuid() not in (0, os.fstat(self._fd).st_uid) and not os.access(self.path, os.W_OK):
            return None
        page = mmap.PAGESIZE
        pages = np.zeros(-(-self.num_bytes // page), np.uint8)
        if self._libc.mincore(self._pointer(0), ctypes.c_size_t(self.num_bytes), _pointer_to(pages)) != 0:
            return None
        there = (pages & 1).astype(np.int64)
        return int(there.sum()) * page - (-self.num_bytes % page if there[-1] else 0)

    def huge_bytes(self) -> int:
        """Return how many of its bytes this process has mapped in huge pages, which the file system has to have."""
        if self._view is None:
            return 0
        begin = f"{self._view.ctypes.data:x}-"
        for entry in re.split(r"^(?=[0-9a-f]+-[0-9a-f]+ )", _smaps(), flags=re.MULTILINE):
            found = re.search(r"^FilePmdMapped: *(\d+) kB", entry, re.MULTILINE)
            if entry.startswith(begin) and found is not None:
                return int(found[1]) << 10
        return 0

    def read_in(self) -> None:
        """Have all of it in the page cache and mapped here, in the order of the file.

        raises EngineFileError where it has become shorter or cannot be read
        """
        for at in range(0, self.num_bytes, _PIECE_BYTES):
            length = min(_PIECE_BYTES, self.num_bytes - at)
            failed = self._call("madvise", at, length, _ADVICE_POPULATE)
            if failed == errno.EINVAL:  # Linux before 5.14
                failed = self._read(at, length)
            if failed:
                raise self._unreadable(at, failed)

    def lock(self) -> int:
        """Keep it in memory until it is unmapped; return 0, or the errno of what the system has against it."""
        return 0 if self._view is None else self._call("mlock", 0, self.num_bytes)

    def close(self) -> None:
        """Unmap it, which unlocks it. Twice is fine."""
        self._view = None
        if self._map is not None:
            self._map.close()
            self._map = None
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def __enter__(self) -> MappedFile:
        """Unmap it at the end of the block."""
        return self

    def __exit__(
        self, _type: type[BaseException] | None, _error: BaseException | None, _trace: TracebackType | None
    ) -> None:
        """Unmap it."""
        self.close()

    def _pointer(self, at: int) -> ctypes.c_void_p:
        assert self._view is not None
        return ctypes.c_void_p(self._view.ctypes.data + at)

    def _call(self, name: str, at: int, length: int, *more: int) -> int:
        """Call a function of the C library on a part of the mapping; return its errno, 0 when it worked."""
        failed = getattr(self._libc, name)(self._pointer(at), ctypes.c_size_t(length), *more)
        return ctypes.get_errno() if failed else 0

    def _read(self, at: int, length: int) -> int:
        buffer = bytearray(length)
        try:
            return 0 if os.preadv(self._fd, [buffer], at) else errno.EFAULT
        except OSError as error:
            return error.errno or errno.EIO

    def _unreadable(self, at: int, failed: int) -> EngineFileError:
        now = os.fstat(self._fd).st_size
        if now < self.num_bytes:
            what = (
                f"has {now} bytes, it had {self.num_bytes} when it was opened: it was cut while it was read"
            )
        else:
            # The kernel tells a page that cannot be had as an address that is none.
            text = os.strerror(errno.EIO if failed == errno.EFAULT else failed)
            what = f"cannot be read at byte {at}: {text}"
        return EngineFileError(f"{self.path} {what}; copy the engine again")


def start_read_ahead(paths: Sequence[Path]) -> threading.Thread | None:
    """Read files into the page cache on a thread of their own, in order; what is wrong with them is the reader's.

    returns : the thread, which ends by itself and keeps no process from its end; None where half of the free memory
        would not hold them, for then they would push out what is about to be used
    """
    with contextlib.suppress(OSError):
        if 2 * sum(path.stat().st_size for path in paths) <= available_memory_bytes():
            thread = threading.Thread(target=_read_all, args=(paths,), name="plansmith-read", daemon=True)
            thread.start()
            return thread
    return None


def _read_all(paths: Sequence[Path]) -> None:
    buffer = bytearray(_PIECE_BYTES)
    with contextlib.suppress(OSError):
        for path in paths:
            with path.open("rb", buffering=0) as file:
                while file.readinto(buffer):
                    pass


def is_prefetching() -> bool:
    """Return whether a thread of the core is still bringing a plan of this process into memory."""
    with contextlib.suppress(OSError):
        tasks = Path("/proc/self/task").iterdir()
        return any(small_file(f"{one}/comm") == "psm-prefetch\n" for one in tasks)
    return False


def wait_prefetched() -> None:
    """Return once all plans of this process are where they will stay: what is measured before is slower."""
    while is_prefetching():
        time.sleep(_POLL_SECONDS)


def _smaps() -> str:
    try:
        return Path("/proc/self/smaps").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""


def _pointer_to(array: np.ndarray[tuple[int, ...], np.dtype[np.uint8]]) -> ctypes.c_void_p:
    return ctypes.c_void_p(array.ctypes.data)


@contextlib.contextmanager
def _naming(path: Path) -> Iterator[None]:
    try:
        yield
    except (OSError, ValueError) as error:
        raise EngineFileError(f"{path} cannot be read ({error}); copy the engine again") from error
