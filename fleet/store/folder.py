"""Objects in a folder of this machine (or one that several machines mount): flushed, then renamed."""

from __future__ import annotations

import contextlib
import errno
import os
import pathlib
import shutil
import stat
import threading
import time
import uuid
from collections.abc import Iterator

from ...builder.engine_dir import NO_SPACE, sync
from ...runtime.errors import InvalidArgumentError, OutOfMemoryError
from .errors import DamagedError
from .fields import MAX_JSON_BYTES
from .locks import exclusive, shared
from .names import BEFORE_MARKER, CHUNKS, LOCKS, TMP

_READ_ONLY = (errno.EROFS, errno.EACCES, errno.EPERM)
# What opening says of sockets, of devices without a driver, and of links in a circle.
_NO_FILE = (errno.ENXIO, errno.ENODEV, errno.ELOOP)


class Folder:
    """Objects as files below a folder; see `Objects`.

    An object is written under tmp/, flushed, and renamed. Chunks' folders are flushed before anything else gets its
    name, so that what is named by a list or a record survives a power cut if they do.
    """

    def __init__(self, root: pathlib.Path) -> None:
        self.root = root
        self.url = str(root)
        self.jobs = 4  # flushing waits for the disk, hashing runs without the interpreter's lock
        self._unflushed: set[pathlib.Path] = set()
        self._mutex = threading.Lock()

    def read(self, name: str, limit: int = MAX_JSON_BYTES) -> bytes | None:
        """Return an object, at most the first limit + 1 bytes of it; None when there is none.

        raises DamagedError for a pipe, a device or a socket, none of which is waited for
        """
        try:
            # Without it, opening a pipe blocks until somebody writes to it; files know no difference.
            descriptor = os.open(self.root / name, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        except (FileNotFoundError, NotADirectoryError):
            return None
        except OSError as error:
            if error.errno in _NO_FILE:
                raise self._no_file(name) from error
            raise
        try:
            found = os.fstat(descriptor)
            if stat.S_ISDIR(found.st_mode):
                return None
            if not stat.S_ISREG(found.st_mode):
                raise self._no_file(name)
            with open(descriptor, "rb", closefd=False) as file:
                return file.read(min(limit, found.st_size) + 1)
        finally:
            os.close(descriptor)

    def write(self, name: str, data: bytes, replace: bool = True) -> bool:
        """Write an object; False when there was one and replace is False, which stays as it is."""
        with self._write_errors(len(data)), self.sharing():
            path = self.root / name
            self._make_parents(path)
            if not name.startswith(f"{CHUNKS}/"):
                self.flush()
            written = self._rename(self._write_aside(data), path, replace)
            self._later(path.parent)
            if not name.startswith(f"{CHUNKS}/"):
                self.flush()
        return written

    def flush(self) -> None:
        """Flush the folders in which names appeared."""
        with self._mutex:  # held meanwhile: who finds nothing to flush may rely on it
            while self._unflushed:
                folder = self._unflushed.pop()
                try:
                    sync(folder)
                except BaseException:
                    self._unflushed.add(folder)
                    raise

    def has(self, name: str) -> bool:
        """Return whether there is such an object."""
        return self._stat(name) is not None

    def keep(self, name: str) -> bool:
        """Return whether there is such an object, and give it the present time.

        Another user's file cannot be given one: it is said not to be there, and is written anew.
        """
        with self._write_errors(0), self.sharing():
            if self._stat(name) is None:
                return False
            try:
                os.utime(self.root / name)
            except (FileNotFoundError, NotADirectoryError):
                return False
            except PermissionError:
                return False
        self._later((self.root / name).parent)  # whoever wrote it may not have come to that
        return True

    def names(self, folder: str) -> Iterator[str]:
        """Return the names of all objects below a folder, sorted; also of what is there and no file."""
        for path, folders, files in os.walk(self.root / folder):
            folders.sort()
            for file in sorted(files):
                yield pathlib.Path(path, file).relative_to(self.root).as_posix()

    def age_s(self, name: str) -> float | None:
        """Return how long ago an object was written or kept; None when there is none."""
        found = self._stat(name)
        return None if found is None else time.time() - found.st_mtime

    def size(self, name: str) -> int:
        """Return an object's bytes, 0 when there is none."""
        found = self._stat(name)
        return 0 if found is None else found.st_size

    def remove(self, name: str) -> None:
        """Remove an object, if there is one."""
        with self._write_errors(0):
            (self.root / name).unlink(missing_ok=True)

    def others(self) -> list[str]:
        """Return some of the names directly below the place: empty when there is nothing."""
        try:
            found = sorted(path.name for path in self.root.iterdir())
        except FileNotFoundError:
            return []
        return [name for name in found if name not in BEFORE_MARKER][:3]

    @contextlib.contextmanager
    def sharing(self) -> Iterator[None]:
        """Keep collections out; other writers may be in."""
        with self._write_errors(0):
            (self.root / LOCKS).mkdir(parents=True, exist_ok=True)
            held = shared(self._lock)
        with held:
            yield

    @contextlib.contextmanager
    def alone(self) -> Iterator[None]:
        """Keep every writer out, waiting for those that are in. Nothing may be written meanwhile, only removed."""
        with self._write_errors(0):
            (self.root / LOCKS).mkdir(parents=True, exist_ok=True)
            held = exclusive(self._lock)
        with held:
            yield

    def _stat(self, name: str) -> os.stat_result | None:
        """Return what the file system says of an object; None when there is none, or when it is no regular file."""
        try:
            found = (self.root / name).stat()
        except (FileNotFoundError, NotADirectoryError):
            return None
        except OSError as error:
            if error.errno in _NO_FILE:
                return None
            raise
        return found if stat.S_ISREG(found.st_mode) else None

    def _no_file(self, name: str) -> DamagedError:
        return DamagedError(
            self.url, name, "is no regular file", "delete it there, then build, pull or push again"
        )

    @property
    def _lock(self) -> pathlib.Path:
        return self.root / LOCKS / "store"

    def _write_aside(self, data: bytes) -> pathlib.Path:
        """Return a flushed file with data, of which nothing is left after an error."""
        path = self.root / TMP / f"{os.getpid()}-{uuid.uuid4().hex}"
        path.parent.mkdir(exist_ok=True)
        try:
            with path.open("xb") as file:
                file.write(data)
                file.flush()
                os.fsync(file.fileno())
        except BaseException:
            path.unlink(missing_ok=True)
            raise
        return path

    def _rename(self, aside: pathlib.Path, path: pathlib.Path, replace: bool) -> bool:
        try:
            if replace:
                aside.replace(path)
            else:
                os.link(aside, path)  # fails where there is one, unlike a rename
        except FileExistsError:
            return False
        except OSError as error:
            if replace or error.errno in NO_SPACE:
                raise
            if path.exists():  # a file system without links: two writers of one name may both succeed
                return False
            aside.replace(path)
        finally:
            aside.unlink(missing_ok=True)
        return True

    def _make_parents(self, path: pathlib.Path) -> None:
        missing = [folder for folder in path.parents if not folder.exists()]
        path.parent.mkdir(parents=True, exist_ok=True)
        for folder in missing:
            self._later(folder.parent)

    def _later(self, folder: pathlib.Path) -> None:
        with self._mutex:
            self._unflushed.add(folder)

    @contextlib.contextmanager
    def _write_errors(self, num_bytes: int) -> Iterator[None]:
        """Turn what the file system says of writing into errors with a next step."""
        try:
            yield
        except OSError as error:
            if error.errno in NO_SPACE:
                raise no_room(self.root, num_bytes, error.strerror or "no space left") from error
            if error.errno in _READ_ONLY:
                raise InvalidArgumentError(
                    f"the store {self.root} cannot be written to ({error.strerror}); what is in it can be read. Change "
                    "its permissions, or give another store"
                ) from error
            raise


def no_room(place: pathlib.Path, num_bytes: int, why: str) -> OutOfMemoryError:
    """Return the error of a disk that has not enough room for num_bytes."""
    free = shutil.disk_usage(place).free
    return OutOfMemoryError(
        f"the disk of {place} is full: {num_bytes / 1e6:.1f} MB to write, {free / 1e6:.1f} MB free ({why}); free some "
        "space, or collect what no engine needs with `plansmith fleet gc`"
    )


def check_room(place: pathlib.Path, num_bytes: int) -> None:
    """Raise OutOfMemoryError if the disk of a folder has less than this."""
    if shutil.disk_usage(place).free < num_bytes:
        raise no_room(place, num_bytes, "checked before anything is written")
