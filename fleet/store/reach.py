"""What is named by what: from refs to records, from records to files, from files to chunks."""

from __future__ import annotations

from collections.abc import Iterable

from .chunks import FileList
from .names import REFS, chunk_name, key_of, list_name, member_of, record_name
from .record import Record, load_record
from .store import Store
from .threads import side_by_side


def named_by_refs(store: Store) -> set[str]:
    """Return the names of the records that the refs of all fleets name; DamagedError when a ref cannot be read."""
    found = {member for name in store.objects.names(REFS) if (member := member_of(name)) is not None}
    keys = {ref.key for fleet in {fleet for fleet, _ in found} for ref in store.refs(fleet).values()}
    return {record_name(key) for key in keys}


def named_by_records(store: Store, names: Iterable[str]) -> set[str]:
    """Return the names of the lists of all files of these records; DamagedError when one cannot be read.

    A record need not be trusted here: what it names may only stay longer for it.
    """
    records = side_by_side(lambda name: _record(store, name), sorted(names), store.objects.jobs)
    return {list_name(file.sha256) for record in records if record is not None for file in record.files}


def named_by_lists(store: Store, names: Iterable[str]) -> set[str]:
    """Return the names of the chunks of all these lists; DamagedError when one cannot be read."""
    lists = side_by_side(lambda name: _list(store, name), sorted(names), store.objects.jobs)
    return {chunk_name(chunk.sha256) for made in lists if made is not None for chunk in made.chunks}


def _record(store: Store, name: str) -> Record | None:
    envelope = store.envelope(key_of(name) or "")
    return None if envelope is None else load_record(envelope.payload, store.refuse(name))


def _list(store: Store, name: str) -> FileList | None:
    return store.file_list(key_of(name) or "")
