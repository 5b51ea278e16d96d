"""What lies where a file is wanted. Standard library only, as manifest.py is."""

from __future__ import annotations

import errno
import stat
from pathlib import Path

MISSING = "is missing"
_KINDS = (
    (stat.S_ISDIR, "a directory"),
    (stat.S_ISFIFO, "a FIFO"),  # whose reader waits for a writer, for ever if there is none
    (stat.S_ISSOCK, "a socket"),
    (stat.S_ISCHR, "a device"),
    (stat.S_ISBLK, "a device"),
)


def no_file(path: Path) -> str | None:
    """Return what is wrong with a path as a file, to stand behind its name; None where a regular file is.

    returns : MISSING, "is a directory, not a file", "is a FIFO, not a file", ...; links are followed, nothing is
        opened
    raises OSError where the path cannot be looked at: rights, a name too long
    """
    try:
        mode = path.stat().st_mode
    except (FileNotFoundError, NotADirectoryError):
        return "is a link to nothing" if path.is_symlink() else MISSING
    except OSError as error:
        if error.errno != errno.ELOOP:
            raise
        return "is a loop of links"
    if stat.S_ISREG(mode):
        return None
    kind = next((text for test, text in _KINDS if test(mode)), "something else")
    return f"is {kind}, not a file"
