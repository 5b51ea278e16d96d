"""Directories for the time being, in the system's place for them, that no killed process leaves for good."""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

PREFIX = "plansmith-"
MARKER = ".plansmith-scratch"  # locked while the directory is in use; a directory without it is not ours
YOUNG_SECONDS = 60.0  # younger ones may be between their making and their lock


@contextlib.contextmanager
def scratch_directory(what: str, place: Path | None = None) -> Iterator[Path]:
    """Give an empty directory that is removed behind the block, and remove those that killed processes left.

    what : a word of its name, "plansmith-<what>-..."
    place : the directory that it is made in; None = the system's for such things
    A process holds a lock in its directory, which the kernel drops with the process however it ends. Plans of large
    models lie in them, so what is left would fill the disk.
    """
    place = Path(tempfile.gettempdir()) if place is None else place
    place.mkdir(parents=True, exist_ok=True)
    _remove_left(place)
    folder = Path(tempfile.mkdtemp(prefix=f"{PREFIX}{what}-", dir=place))
    try:
        descriptor = os.open(folder / MARKER, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    except BaseException:
        shutil.rmtree(folder, ignore_errors=True)
        raise
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield folder
    finally:
        try:
            _remove(folder)
        finally:
            os.close(descriptor)


def _remove_left(place: Path) -> None:
    """Remove our user's directories below `place` that no process holds."""
    for marker in place.glob(f"{PREFIX}*/{MARKER}"):
        with contextlib.suppress(OSError):
            _remove_if_left(marker)


def _remove_if_left(marker: Path) -> None:
    found = marker.parent.lstat()
    if found.st_uid != os.getuid() or time.time() - found.st_mtime < YOUNG_SECONDS:
        return
    descriptor = os.open(marker, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        _remove(marker.parent)
    finally:
        os.close(descriptor)


def _remove(folder: Path) -> None:
    """Remove a directory, its marker last: whoever is killed meanwhile leaves what is still known as ours.

    What cannot be removed stays, and the marker with it.
    """
    with contextlib.suppress(OSError):
        for path in folder.iterdir():
            if path.is_dir() and not path.is_symlink():
                shutil.rmtree(path, ignore_errors=True)
            elif path.name != MARKER:
                path.unlink(missing_ok=True)
        if [path.name for path in folder.iterdir()] in ([], [MARKER]):
            shutil.rmtree(folder, ignore_errors=True)
