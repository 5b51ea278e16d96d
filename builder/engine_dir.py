"""Writing an engine directory so that it is there whole or not at all.

A build works in a directory beside its destination and swaps the two at the end. A lock beside the destination keeps
two builds of one engine apart; only its holder makes work directories, so whatever lies there when the lock is taken
was left by a build that was killed, and is removed.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import os
import pathlib
import shutil
import tempfile
from collections.abc import Callable, Iterator

from ..runtime.errors import BuildError, InvalidArgumentError, OutOfMemoryError
from ..runtime.manifest import MANIFEST_NAME, hash_file
from ..runtime.manifest_entries import FileEntry

NO_SPACE = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
# What the names of the lock, of a work directory and of a failed compile's log add to the engine's own, in bytes.
_BESIDE_BYTES = 40
AT_FDCWD = -100
RENAME_EXCHANGE = 2


class Work:
    """The directory a build works in.

    path : where to write
    """

    def __init__(self, path: pathlib.Path) -> None:
        self.path = path
        self.needed_bytes = 0
        self.kept_old = False

    def reserve(self, needed_bytes: int) -> None:
        """Raise OutOfMemoryError if the disk has less than this; the number is also for later errors' text."""
        self.needed_bytes = needed_bytes
        check_room(self.path, needed_bytes)

    def keep_old(self) -> None:
        """Leave what is at the destination; nothing is replaced."""
        self.kept_old = True


@contextlib.contextmanager
def replacing(out_dir: pathlib.Path, marker: str = MANIFEST_NAME) -> Iterator[Work]:
    """Give a fresh directory that takes the place of out_dir when the block ends without an error.

    out_dir : may be absent, empty, or a directory that has `marker`, which is replaced in one step (programs that have
        it open keep what they opened). Anything else is refused: nothing but what we made is ever deleted.
    raises InvalidArgumentError for a destination that cannot be, BuildError while another build holds it,
        OutOfMemoryError when the disk is full. After an error or a kill, out_dir is as it was.
    """
    out_dir = destination(out_dir, marker)
    work = Work(out_dir.parent / f"{_prefix(out_dir)}{os.getpid()}.new")
    with _parents(out_dir), _disk_errors(work), _lock(out_dir):
        _clean(out_dir)
        work.path.mkdir()
        try:
            yield work
            if not work.kept_old:
                sync_tree(work.path)
                _swap(work.path, out_dir)
        finally:
            shutil.rmtree(work.path, ignore_errors=True)


@contextlib.contextmanager
def _parents(out_dir: pathlib.Path) -> Iterator[None]:
    """Make the directories above out_dir; after an error those that were made and hold nothing are removed."""
    missing = [path for path in out_dir.parents if not path.exists()]
    try:
        out_dir.parent.mkdir(parents=True, exist_ok=True)
        yield
    except BaseException:
        with contextlib.suppress(OSError):
            for path in missing:
                path.rmdir()
        raise


@contextlib.contextmanager
def _disk_errors(work: Work) -> Iterator[None]:
    """Turn "no space left" of any write into OutOfMemoryError with the numbers."""
    try:
        yield
    except OSError as error:
        if error.errno not in NO_SPACE and "requested and" not in str(
            error
        ):  # numpy's words for a short write
            raise
        raise _no_space(work.path.parent, work.needed_bytes, error.strerror or "no space left") from error


def check_room(out_dir: pathlib.Path, needed_bytes: int) -> None:
    """Raise OutOfMemoryError if the disk that out_dir lies on, or will lie on, has less than this."""
    place = next(path for path in out_dir.parents if path.is_dir())
    if shutil.disk_usage(place).free < needed_bytes:
        raise _no_space(place, needed_bytes, "checked before the build")


def _no_space(place: pathlib.Path, needed_bytes: int, why: str) -> OutOfMemoryError:
    free = shutil.disk_usage(place).free
    needed = f"about {needed_bytes / 1e6:.0f} MB needed, " if needed_bytes else ""
    return OutOfMemoryError(
        f"the output does not fit on the disk of {place}: {needed}{free / 1e6:.0f} MB free ({why}); free some space, "
        "build fewer targets at once, or give another -o"
    )


def destination(out_dir: pathlib.Path, marker: str = MANIFEST_NAME) -> pathlib.Path:
    """Return out_dir as an absolute path; InvalidArgumentError when no engine can go there. Nothing is made."""
    out_dir = pathlib.Path(os.path.abspath(out_dir))  # noqa: PTH100 - realpath would follow the last link too early
    try:
        out_dir = pathlib.Path(os.path.realpath(out_dir)) if out_dir.is_symlink() else out_dir
        str(out_dir).encode()
        _check_destination(out_dir, marker)
    except UnicodeEncodeError:
        raise InvalidArgumentError(f"the path {str(out_dir)!r} is not UTF-8; give another -o") from None
    except OSError as error:
        raise InvalidArgumentError(f"{out_dir} cannot be used: {error.strerror}; give another -o") from error
    return out_dir


def check_source_stays(source: pathlib.Path, out_dir: pathlib.Path) -> None:
    """Raise InvalidArgumentError when replacing out_dir would delete the checkpoint that is read."""
    resolved, replaced = source.resolve(), out_dir.resolve()
    if replaced == resolved or replaced in resolved.parents:
        raise InvalidArgumentError(
            f"{out_dir} is replaced as a whole, and the checkpoint {source} lies in it; give another -o, or move the "
            "checkpoint out"
        )


def _check_destination(out_dir: pathlib.Path, marker: str) -> None:
    if out_dir.is_symlink():
        raise InvalidArgumentError(f"{out_dir} is a symbolic link that leads to itself; give another -o")
    if out_dir.exists() and not out_dir.is_dir():
        raise InvalidArgumentError(f"{out_dir} is a file, an engine is a directory; give another -o")
    if out_dir.is_dir():
        # A volume's root cannot be renamed, and this is where a container would want its engine.
        if os.path.ismount(out_dir):
            raise InvalidArgumentError(
                f"{out_dir} is a mount point, which cannot be swapped in one step; give a directory inside it: "
                f"-o {out_dir / 'engine'}"
            )
        if any(out_dir.iterdir()) and not (out_dir / marker).is_file():
            raise InvalidArgumentError(
                f"{out_dir} holds files but no {marker}, so it was not made here and is not replaced; give a new or "
                "an empty directory with -o"
            )
    parent = next(path for path in out_dir.parents if path.exists() or path.is_symlink())
    if not parent.is_dir():
        raise InvalidArgumentError(f"{parent} is no directory, so nothing can go below it; give another -o")
    _check_writable(parent)
    longest = os.pathconf(parent, "PC_NAME_MAX") - _BESIDE_BYTES
    if 0 < longest < len(os.fsencode(out_dir.name)):  # some file systems tell none
        raise InvalidArgumentError(
            f"{out_dir} has a name of more than {longest} bytes, and files beside it have longer ones; give another -o"
        )


def _check_writable(folder: pathlib.Path) -> None:
    """Raise InvalidArgumentError where no file can be made; a full disk is left to whoever knows what is needed."""
    try:
        with tempfile.TemporaryFile(dir=folder):  # rights tell root nothing, nor what a file system refuses
            pass
    except OSError as error:
        if error.errno not in NO_SPACE:
            raise InvalidArgumentError(
                f"{folder} cannot be written to ({error.strerror}); give another -o or change its permissions"
            ) from error


def _prefix(out_dir: pathlib.Path) -> str:
    return f".{out_dir.name}.plansmith-"


@contextlib.contextmanager
def _lock(out_dir: pathlib.Path) -> Iterator[None]:
    """Hold the lock file of out_dir. The kernel drops the lock with the process, however it ends."""
    path = out_dir.parent / f".{out_dir.name}.plansmith.lock"
    while True:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            # Its last holder may have removed the file between our open and our lock: then it locks nobody out.
            if path.exists() and os.fstat(descriptor).st_ino == path.stat().st_ino:
                break
        except BlockingIOError:
            holder = os.pread(descriptor, 32, 0).decode("ascii", "replace").strip() or "unknown"
            os.close(descriptor)
            raise BuildError(
                f"another build (process {holder}) is writing {out_dir}; wait for it to end, or give another -o"
            ) from None
        except FileNotFoundError:
            pass
        os.close(descriptor)
    try:
        os.truncate(descriptor, 0)
        os.pwrite(descriptor, str(os.getpid()).encode(), 0)
        yield
    finally:
        path.unlink(missing_ok=True)
        os.close(descriptor)


def _clean(out_dir: pathlib.Path) -> None:
    """Remove what killed builds left, putting an engine back that was taken aside and not yet replaced."""
    aside = out_dir.parent / f"{_prefix(out_dir)}old"
    if aside.is_dir() and not out_dir.exists():
        aside.rename(out_dir)
    for left in out_dir.parent.glob(f"{_glob_escape(_prefix(out_dir))}*"):
        shutil.rmtree(left, ignore_errors=True)


def _glob_escape(text: str) -> str:
    return "".join(f"[{c}]" if c in "*?[" else c for c in text)


def _swap(work: pathlib.Path, out_dir: pathlib.Path) -> None:
    """Put work in out_dir's place; what was there is in work afterwards, or gone."""
    if not out_dir.exists():
        work.rename(out_dir)
    elif not _exchange(work, out_dir):
        # No exchange on this system: a kill between these two is mended by the next build (see _clean).
        aside = out_dir.parent / f"{_prefix(out_dir)}old"
        out_dir.rename(aside)
        work.rename(out_dir)
        shutil.rmtree(aside, ignore_errors=True)
    sync(out_dir.parent)


def _exchange(one: pathlib.Path, two: pathlib.Path) -> bool:
    """Exchange two directories in one step; False where the system cannot."""
    try:
        renameat2 = ctypes.CDLL(None, use_errno=True).renameat2
    except (AttributeError, OSError):
        return False
    arguments = (ctypes.c_int(AT_FDCWD), os.fsencode(one), ctypes.c_int(AT_FDCWD), os.fsencode(two))
    return bool(renameat2(*arguments, ctypes.c_uint(RENAME_EXCHANGE)) == 0)


def sync(path: pathlib.Path) -> None:
    """Flush a file or a directory to the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def sync_tree(root: pathlib.Path) -> None:
    """Flush all files below root, then the directories."""
    for path in sorted(root.rglob("*"), reverse=True):
        sync(path)
    sync(root)


Describe = Callable[[pathlib.Path, pathlib.Path], FileEntry]
"""Called with a directory and a file below it; returns the manifest's entry of that file."""


def describe_file(root: pathlib.Path, path: pathlib.Path) -> FileEntry:
    """Return the manifest's entry of a file below root."""
    return FileEntry(path=path.relative_to(root).as_posix(), size=path.stat().st_size, sha256=hash_file(path))


def carry_over(path: str, source: pathlib.Path, work: pathlib.Path) -> None:
    """Bring a file of the old engine, which the caller has checked, into the new one: a hard link where there are any.

    path : below both directories
    """
    old, new = source / path, work / path
    new.parent.mkdir(parents=True, exist_ok=True)
    try:
        os.link(old, new)
    except OSError:
        shutil.copyfile(old, new)
