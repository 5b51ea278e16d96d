"""What a store's records of units hold, and whether all of it is there."""

from __future__ import annotations

import json
from pathlib import Path

from ..runtime.errors import EngineFileError, Error
from ..runtime.manifest import Manifest, checksum, parse_manifest
from .store.names import chunk_name, record_name
from .store.record import Record
from .store.store import Store


def has_its_files(record: Record) -> bool:
    """Return whether a unit's record names every file of its manifest, and as the manifest has it."""
    try:
        entries = manifest_of(record, Path()).all_files()
    except Error:
        return False
    found = {(file.path, file.size, file.sha256) for file in record.files}
    return all((entry.path, entry.size, entry.sha256) in found for entry in entries)


def is_whole(store: Store, record: Record) -> bool:
    """Return whether a unit's record can be an engine: every file is in the store, by the sizes of its chunks.

    Contents are not read.
    """
    if not has_its_files(record):
        return False
    for sha256 in {file.sha256 for file in record.files}:
        made = store.readable_list(sha256)
        if made is None:
            return False
        if any(store.objects.size(chunk_name(chunk.sha256)) != chunk.size for chunk in made.chunks):
            return False
    return True


def forget(store: Store, key: str) -> None:
    """Remove a record, whose files then go with the next collection."""
    store.objects.remove(record_name(key))


def manifest_of(record: Record, root: Path) -> Manifest:
    """Return the checked manifest of the engine that a unit's record was made of; root is where its files are to lie.

    raises EngineFileError for one that is not as this version writes it
    """
    content = record.content.get("manifest")
    if not isinstance(content, dict):
        raise EngineFileError(
            f"the record {record.key} has no manifest, so it is no unit's; build it again with this version"
        )
    return parse_manifest(json.dumps({**content, "checksum": checksum(content)}).encode(), root)
