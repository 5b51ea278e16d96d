"""What push and pull share: what went over the wire, and which chunks files have."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Iterable

from .chunks import Chunk, FileList


@dataclasses.dataclass(frozen=True)
class Transferred:
    """What went over the wire, and what was there already.

    files : lists of files that were missing; num_bytes : of the chunks
    """

    records: int
    files: int
    chunks: int
    num_bytes: int
    kept_chunks: int
    kept_bytes: int


def chunks_of(lists: Iterable[FileList]) -> list[Chunk]:
    """Return the chunks of files, each once."""
    return list(dict.fromkeys(chunk for made in lists for chunk in made.chunks))


def count(records: int, files: int, chunks: Collection[Chunk], sent: Collection[Chunk]) -> Transferred:
    """Return what went over the wire, of all chunks and those that were sent."""
    sent_bytes = sum(chunk.size for chunk in sent)
    all_bytes = sum(chunk.size for chunk in chunks)
    return Transferred(records, files, len(sent), sent_bytes, len(chunks) - len(sent), all_bytes - sent_bytes)
