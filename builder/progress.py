"""How long work says where it is."""

from __future__ import annotations

from collections.abc import Callable

Progress = Callable[[str, str, int, int], None]
"""Called as (who, phase, done, in all): who is a target or a command; in all is 0 where it is not known.

May come from another thread than the caller's.
"""


def no_progress(who: str, phase: str, done: int, total: int) -> None:
    """Tell nobody."""
