"""Files that a command writes at its end: looked at before it begins, and there whole or not at all."""

from __future__ import annotations

import contextlib
import os
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

from ..runtime.errors import InvalidArgumentError


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
        if _is_special(path):
            _check_right(path)
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
def whole_file(path: Path) -> Iterator[Path]:
    """Give the path to write to, which becomes `path` when all is written; a device or a pipe is written as it is.

    A link stays one. What was written is removed where the body fails.
    """
    if _is_special(path):  # its real name may be none: /dev/stdout is pipe:[4711]
        yield path
        return
    real = Path(os.path.realpath(path))
    partial = real.with_name(f".plansmith-{os.getpid()}.partial")
    try:
        yield partial
        partial.replace(real)
    except BaseException:
        partial.unlink(missing_ok=True)
        raise


def _check_right(path: Path) -> None:
    if not os.access(path, os.W_OK):
        raise PermissionError(None, "it is there, without the right to write it")


def _is_special(path: Path) -> bool:
    return path.exists() and not path.is_file()
