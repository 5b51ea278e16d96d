"""Where plansmith keeps what can be made again, for one user of a machine. Standard library only."""

from __future__ import annotations

import os
from pathlib import Path


def user_cache(name: str) -> Path:
    """Return the folder of that name in plansmith's part of the user's cache: $XDG_CACHE_HOME, else ~/.cache."""
    base = os.environ.get("XDG_CACHE_HOME") or os.path.join(os.path.expanduser("~"), ".cache")  # noqa: PTH111, PTH118
    return Path(base) / "plansmith" / name
