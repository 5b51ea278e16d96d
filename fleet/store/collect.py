"""Collection: removes what no ref needs and nothing young names.

Roots are the refs of all fleets, and records younger than keep_days. Kept are the files that these records name, and
those files' chunks.

Why that is safe beside a build or a push:

- In a folder, every write and every "it is there already" (`keep`, which gives a file the present time) is made under a
  shared lock, and the whole collection under the exclusive one. So a builder either wrote or kept an object before the
  collection, which then finds it younger than the grace period and leaves it, a list with all its chunks; or it comes
  after, finds the object gone, and writes it. A record is put, and a ref is set, only where what it names is there,
  under one lock. What has to hold: from a file's first chunk to its record less time passes than the grace period.
- Behind a URL there are no locks. There, nothing is removed at once; see trash.py.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterator

from .collected import Collected
from .errors import DamagedError
from .folder import Folder
from .locks import own
from .names import BUILT, CHUNKS, FILES, LOCKS, RECORDS, TMP, is_key, key_of
from .reach import named_by_lists, named_by_records, named_by_refs
from .remote_objects import RemoteObjects
from .store import Store
from .trash import collect_remote

DAY_S = 86400.0
_TEMPORARY = re.compile(r"\d+-[0-9a-f]{32}")


def collect(store: Store, *, keep_days: float, dry_run: bool = False, grace_s: float = DAY_S) -> Collected:
    """Remove what nothing needs, and return what that was.

    keep_days : how long a record stays that no ref names, from when it was put
    grace_s   : how long an object stays that nothing names, in seconds: longer than any push or build takes to store
    dry_run   : say what would go, and change nothing
    raises    : DamagedError when a ref, or a record or list that is needed, cannot be read; nothing is removed then
    """
    store.check()
    if isinstance(store.objects, RemoteObjects):
        return collect_remote(store, store.objects, keep_days * DAY_S, dry_run, grace_s)
    if isinstance(store.objects, Folder):
        return _collect_folder(store, store.objects, keep_days * DAY_S, dry_run, grace_s)
    raise TypeError(f"no way to collect {type(store.objects).__name__}")


def _collect_folder(store: Store, folder: Folder, keep_s: float, dry_run: bool, grace_s: float) -> Collected:
    with folder.alone():
        records = set(folder.names(RECORDS))
        kept = named_by_refs(store) & records
        kept |= {name for name in records - kept if _is_young(folder, name, keep_s)}
        lists = set(folder.names(FILES))
        kept_lists = named_by_records(store, kept) & lists
        young_lists = {name for name in lists - kept_lists if _is_young(folder, name, grace_s)}
        needed_chunks = named_by_lists(store, kept_lists)
        kept_lists |= young_lists
        kept_chunks = needed_chunks | named_by_lists(store, young_lists)
        unneeded = {name for name in folder.names(CHUNKS) if name not in needed_chunks}
        chunks = {name for name in unneeded - kept_chunks if not _is_young(folder, name, grace_s)}
        waiting = young_lists | (unneeded - chunks)
        left = [*_leftovers(folder), *_stale_marks(store, folder, kept)]
        gone = (sorted(records - kept), sorted(lists - kept_lists), sorted(chunks))
        num_bytes = sum(folder.size(name) for names in (*gone, left) for name in names)
        waiting_bytes = sum(map(folder.size, waiting))
        if not dry_run:
            # What names comes before what is named: a kill leaves nothing that names what is gone.
            for name in (name for names in (*gone, left) for name in names):
                folder.remove(name)
            _free_locks(folder)
    num_records, num_files, num_chunks = map(len, gone)
    return Collected(
        num_records,
        num_files,
        num_chunks,
        num_bytes,
        len(left),
        kept_records=len(kept),
        waiting=len(waiting),
        waiting_bytes=waiting_bytes,
    )


def _is_young(folder: Folder, name: str, than_s: float) -> bool:
    age_s = folder.age_s(name)
    return age_s is not None and age_s < than_s


def _leftovers(folder: Folder) -> list[str]:
    """Return the temporary files of killed writers: whoever writes holds the lock that keeps this out."""
    return [name for name in folder.names(TMP) if _TEMPORARY.fullmatch(name.removeprefix(f"{TMP}/"))]


def _stale_marks(store: Store, folder: Folder, kept: set[str]) -> Iterator[str]:
    """Return the marks of records that were built here and are no more."""
    payloads = {hashlib.sha256(payload).hexdigest() for payload in _payloads(store, kept)}
    for name in folder.names(BUILT):
        if name.removeprefix(f"{BUILT}/") not in payloads and not _is_young(folder, name, DAY_S):
            yield name


def _payloads(store: Store, kept: set[str]) -> Iterator[bytes]:
    for name in sorted(kept):
        try:
            envelope = store.envelope(key_of(name) or "")
        except DamagedError:
            continue
        if envelope is not None:
            yield envelope.payload


def _free_locks(folder: Folder) -> None:
    """Remove the lock files of units that no process holds."""
    for name in folder.names(LOCKS):
        if (
            is_key(name.removeprefix(f"{LOCKS}/"))
            and (held := own(folder.root / name, blocking=False)) is not None
        ):
            held.release()
