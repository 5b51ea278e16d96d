"""What a collection did."""

from __future__ import annotations

import dataclasses


@dataclasses.dataclass(frozen=True)
class Collected:
    """What a collection removed, or would remove.

    files     : lists of files
    num_bytes : of all that was removed
    leftovers : temporary files of killed writers, and marks of records that are gone
    aside, aside_bytes : objects of a remote store that were taken aside; a later collection removes them
    restored  : objects of a remote store that were put back, because something names them again
    waiting, waiting_bytes : objects of a folder that no record needs and that are too young to go, for somebody may be
        about to name them; a collection after the grace period removes them
    """

    records: int
    files: int
    chunks: int
    num_bytes: int
    leftovers: int
    kept_records: int
    aside: int = 0
    aside_bytes: int = 0
    restored: int = 0
    waiting: int = 0
    waiting_bytes: int = 0
