"""Files cut by content, and the lists that say how to put them together again."""

from __future__ import annotations

import dataclasses
import hashlib
import pathlib
from collections.abc import Iterator
from typing import Any

from pyfastcdc import FastCDC

from . import fields
from .fields import Refuse
from .names import is_key

# In bytes. Seven plans of one model at 298 MB (docs/store.md): with 512 KiB a further plan adds 2 to 13 MB in 434
# chunks; with 256 KiB 2 to 11 MB, but in 946; with 1 MiB 7 to 23 MB, in 214. Stores may mix sizes: cuts that differ
# cost room, nothing else.
AVERAGE_BYTES = 512 << 10
MIN_BYTES = AVERAGE_BYTES // 4
MAX_BYTES = AVERAGE_BYTES * 4
# What a reader takes; larger than what is cut, so that another version may cut otherwise.
MAX_READ_BYTES = 16 << 20


@dataclasses.dataclass(frozen=True)
class Chunk:
    """A piece of a file."""

    sha256: str
    size: int


@dataclasses.dataclass(frozen=True)
class FileList:
    """A file as its chunks, in order. sha256 is the whole file's."""

    sha256: str
    chunks: tuple[Chunk, ...]

    @property
    def size(self) -> int:
        """The file's bytes."""
        return sum(chunk.size for chunk in self.chunks)


def cut(path: pathlib.Path, average_bytes: int = AVERAGE_BYTES) -> Iterator[bytes]:
    """Return the pieces of a file, in order. The cuts depend on what is near them alone.

    Each piece is a copy: a file that changes meanwhile cannot make a piece differ from its hash.
    """
    if path.stat().st_size == 0:
        return
    cutter = FastCDC(average_bytes, min_size=average_bytes // 4, max_size=average_bytes * 4)
    for chunk in cutter.cut_file(path):
        yield bytes(chunk.data)


def describe(data: bytes) -> Chunk:
    """Return the chunk that data is."""
    return Chunk(hashlib.sha256(data).hexdigest(), len(data))


def dump_list(files: FileList) -> bytes:
    """Return the JSON of a file's list."""
    return fields.dump({"size": files.size, "chunks": [[chunk.sha256, chunk.size] for chunk in files.chunks]})


def load_list(raw: bytes, sha256: str, refuse: Refuse) -> FileList:
    """Return the list of its JSON. Whether the chunks make up that file is not checked."""
    value = fields.load(raw, refuse)
    chunks = tuple(_load_chunk(one, refuse) for one in fields.array(value, "chunks", refuse))
    made = FileList(sha256, chunks)
    if fields.number(value, "size", refuse) != made.size:
        raise refuse(f"says that the file has {value['size']} bytes, and its chunks have {made.size}")
    return made


def _load_chunk(value: Any, refuse: Refuse) -> Chunk:
    match value:
        case [str(sha256), int(size)] if is_key(sha256) and 0 < size <= MAX_READ_BYTES and size is not True:
            return Chunk(sha256, size)
    raise refuse("has a chunk that is not [sha256, bytes]")
