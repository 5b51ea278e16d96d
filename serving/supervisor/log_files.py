"""Log files that do not grow for ever."""

from __future__ import annotations

import contextlib
import shutil
from pathlib import Path

_KEPT = 3


def put_aside(path: Path, max_bytes: int) -> bool:
    """Copy a log that is larger than max_bytes to path.1 (.1 to .2 ...) and cut it; whether that was done.

    Its writer goes on writing: it appends, so it goes on at the new end. Lines written between copy and cut are lost,
    and on a full disk those that cannot be copied.
    """
    try:
        if path.stat().st_size <= max_bytes:
            return False
    except FileNotFoundError:
        return False
    with contextlib.suppress(OSError):
        for number in range(_KEPT, 1, -1):
            earlier = path.with_name(f"{path.name}.{number - 1}")
            if earlier.exists():
                earlier.replace(path.with_name(f"{path.name}.{number}"))
        shutil.copyfile(path, path.with_name(f"{path.name}.1"))
    with path.open("r+b") as file:
        file.truncate(0)
    return True


def last_lines(path: Path, num_lines: int) -> list[str]:
    """Return the last lines of a log; [] when there is none."""
    try:
        with path.open("rb") as file:
            file.seek(max(0, path.stat().st_size - 65536))
            return file.read().decode("utf-8", "replace").splitlines()[-num_lines:]
    except FileNotFoundError:
        return []
