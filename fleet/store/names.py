"""Where things lie in a store, and which names are allowed."""

from __future__ import annotations

import re

from ...runtime.errors import InvalidArgumentError

FORMAT = 1
MARKER = "plansmith-store.json"

CHUNKS = "chunks"
FILES = "files"
RECORDS = "records"
REFS = "refs"
# Of a remote store alone: what a collection took aside.
TRASH = "trash"
# Of a local store alone, but for tmp/, which a remote file system has too where an upload takes two steps.
LOCKS = "locks"
TMP = "tmp"
BUILT = "built"
# What a process that was killed while it made a store may have left.
BEFORE_MARKER = (LOCKS, TMP)

# What file systems take of a name and a path, in bytes.
_MAX_NAME, _MAX_PATH = 255, 2048
_KEY = re.compile(r"[0-9a-f]{64}")
_SEGMENT = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.+@=-]{0,127}")


def is_key(text: str) -> bool:
    """Return whether this is the hexadecimal form of a sha256."""
    return _KEY.fullmatch(text) is not None


def check_key(key: str) -> str:
    """Return key; InvalidArgumentError when it is no sha256."""
    if not is_key(key):
        raise InvalidArgumentError(
            f"{key!r} is no key of a record; wanted are the 64 hexadecimal digits of a sha256"
        )
    return key


def chunk_name(sha256: str) -> str:
    """Return where a chunk lies. 256 folders, so that none grows long."""
    return f"{CHUNKS}/{sha256[:2]}/{sha256}"


def list_name(sha256: str) -> str:
    """Return where the list of a file's chunks lies; sha256 is the whole file's."""
    return f"{FILES}/{sha256[:2]}/{sha256}.json"


def record_name(key: str) -> str:
    """Return where a record lies."""
    return f"{RECORDS}/{check_key(key)}.json"


def ref_name(fleet: str, member: str) -> str:
    """Return where the ref of a fleet's member lies; InvalidArgumentError for names that are not allowed."""
    for segment in (fleet, *member.split("/")):
        if not _SEGMENT.fullmatch(segment):
            raise InvalidArgumentError(
                f"{fleet!r} and {member!r} name no member of a fleet: {segment!r} has to be a letter or digit, then "
                "at most 127 letters, digits or _ . + @ = -"
            )
    return f"{REFS}/{fleet}/{member}.json"


def key_of(name: str) -> str | None:
    """Return the key or hash in the name of a chunk, list or record; None if this is none."""
    stem = name.rsplit("/", 1)[-1].removesuffix(".json")
    made = {CHUNKS: chunk_name, FILES: list_name, RECORDS: record_name}.get(name.split("/", 1)[0])
    return stem if made is not None and is_key(stem) and made(stem) == name else None


def member_of(name: str) -> tuple[str, str] | None:
    """Return the fleet and the member that a ref's name says; None if it is no ref's."""
    folder, _, rest = name.partition("/")
    fleet, _, member = rest.partition("/")
    if folder != REFS or not member.endswith(".json"):
        return None
    member = member.removesuffix(".json")
    is_one = all(_SEGMENT.fullmatch(segment) for segment in (fleet, *member.split("/")))
    return (fleet, member) if is_one else None


def check_path(path: str) -> str:
    """Return the path of a file of a record; InvalidArgumentError unless it is relative and stays below its root.

    What no file system has room for is refused as well, before any of the record is written.
    """
    parts = path.split("/")
    sizes = [len(part.encode(errors="replace")) for part in parts]
    is_long = max(sizes) > _MAX_NAME or sum(sizes) + len(sizes) > _MAX_PATH
    if not path.isprintable() or "\\" in path or is_long or any(part in ("", ".", "..") for part in parts):
        raise InvalidArgumentError(
            f"{path[:_MAX_NAME]!r} is no path of a file below a folder, such as targets/cpu/model.plan"
        )
    return path
