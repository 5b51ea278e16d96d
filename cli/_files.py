"""Files that a command writes at its end: looked at before it begins, and there whole or not at all."""

from __future__ import annotations

import contextlib
import errno
import os
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import BinaryIO

from ..runtime.errors import InvalidArgumentError

# FIFOs that were opened when they were looked at, by path: closing one there would be the end of its reader's input.
_held: dict[Path, int] = {}


def check_output(flag: str, path: Path, suffixes: Sequence[str] = ()) -> None:
    """Refuse a path that could not be written in the end.

    suffixes : what the name has to end in, one of them; () = anything
    raises InvalidArgumentError that names the flag
    """
    if suffixes and path.suffix.lower() not in suffixes:
        ends = f"ends in {path.suffix}" if path.suffix else "has no ending"
        raise InvalidArgumentError(
            f"{flag} {path} {ends}; give a name that ends in {' or '.join(suffixes)}, which says the format"
        )
    real = Path(os.path.realpath(path))
    try:
        if path.is_dir():
            raise InvalidArgumentError(f"{flag} {path} is a directory; give a file's name")
        if is_special(path):
            _check_right(path)
            _hold_pipe(path)
            return
        if not real.parent.is_dir():
            raise InvalidArgumentError(
                f"{flag} {path}: there is no directory {real.parent}; make it, or write elsewhere"
            )
        if real.exists():
            _check_right(real)
        with tempfile.TemporaryFile(dir=real.parent):
            pass
    except OSError as error:
        raise InvalidArgumentError(
            f"{flag} {path} cannot be written: {error.strerror}; write elsewhere, or mend the rights"
        ) from error


@contextlib.contextmanager
def whole_file(path: Path) -> Iterator[BinaryIO]:
    """Give a file to write to, which becomes `path` when all is written; a device or a pipe is written as it is.

    A link stays one. What was written is removed where the body fails. An OSError of writing gets the path's name.
    """
    with naming(path):
        if is_special(path):
            with open_special(path) as out:
                yield out
            return
        real = Path(os.path.realpath(path))
        partial = real.with_name(f".plansmith-{os.getpid()}.partial")
        try:
            with partial.open("wb") as out:
                yield out
            partial.replace(real)
        except BaseException:
            partial.unlink(missing_ok=True)
            raise


@contextlib.contextmanager
def naming(path: Path | str) -> Iterator[None]:
    """Give an OSError that tells no file this one: those of a write, and of the flush behind the last one."""
    try:
        yield
    except OSError as error:
        if error.filename is None and error.errno is not None:  # else its text is all it has
            error.filename = str(path)
        raise


def is_special(path: Path) -> bool:
    """Return whether there is a device, a pipe or the like; its real name may be none: /dev/stdout is pipe:[4711]."""
    return path.exists() and not path.is_file()


def open_special(path: Path) -> BinaryIO:
    """Open a device or a pipe to be written; OSError for a pipe that nobody reads, which open() would wait for."""
    descriptor = _held.pop(path, None)
    return os.fdopen(_open_special(path) if descriptor is None else descriptor, "wb")


def _hold_pipe(path: Path) -> None:
    """Open a FIFO for open_special; a pipe without a name has its reader already."""
    if path in _held or not path.is_fifo() or os.path.realpath(path).startswith("/proc/"):
        return
    _held[path] = _open_special(path)


def _open_special(path: Path) -> int:
    try:
        descriptor = os.open(path, os.O_WRONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError as error:
        if error.errno == errno.ENXIO and path.is_fifo():
            raise OSError(errno.ENXIO, "it is a pipe that no program reads", str(path)) from error
        raise
    os.set_blocking(descriptor, True)
    return descriptor


def _check_right(path: Path) -> None:
    if not os.access(path, os.W_OK):
        raise PermissionError(None, "it is there, without the right to write it")
