"""Pull: what a local store lacks, nothing of it under its name here before it was checked."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Mapping, Sequence

from ...builder.progress import Progress, no_progress
from ...runtime.errors import Error, NotFoundError
from .chunks import Chunk, FileList
from .envelope import Envelope
from .errors import DamagedError, SignatureError
from .folder import check_room
from .local import LocalStore
from .names import list_name, record_name
from .record import FileRef, Record
from .store import Store
from .threads import side_by_side
from .transfer import Transferred, chunks_of, count

# What is wrong with one record, or with what it names, and with no other.
_OF_ONE = (DamagedError, SignatureError, NotFoundError)


def pull(
    remote: Store,
    local: LocalStore,
    keys: Iterable[str],
    progress: Progress = no_progress,
    failed: dict[str, Error] | None = None,
) -> Transferred:
    """Bring records with all that they name from the remote store; `extract` works for them afterwards.

    Records are checked against the trust of both stores before anything else is read, every chunk against its name,
    every file against its hash, all before it has its name here. A record that is here already is completed. Running
    it again goes on where it ended.

    failed : takes by key what is wrong with a record or with what it names, and the other records come all the same;
        None = it is raised
    raises NotFoundError for a key that the remote store has no record of, DamagedError and SignatureError for what is
        not as it was made, OutOfMemoryError when the disk has no room for what is missing
    """
    local.prepare()
    faults = _Faults(failed)
    found: dict[str, tuple[Record, Envelope]] = {}
    for key in dict.fromkeys(keys):
        with faults.of([key]):
            found[key] = _record(remote, local, key)
    users: dict[str, list[str]] = {}
    for key, (record, _) in found.items():
        for file in record.files:
            users.setdefault(file.sha256, []).append(key)
    lists = _lists(remote, local, found, users, faults)
    chunks = chunks_of(lists.values())
    lacking = [chunk for chunk in chunks if not local.has_chunk(chunk)]
    check_room(local.root, sum(chunk.size for chunk in lacking))
    damaged = _receive(remote, local, lacking, progress, is_strict=failed is None)
    num_lists = 0
    for made in lists.values():
        with faults.of(users[made.sha256]):
            if bad := [damaged[chunk] for chunk in made.chunks if chunk in damaged]:
                raise bad[0]
            if not local.has_list(made):
                local.add_list(made, remote.refuse(list_name(made.sha256)))
                num_lists += 1
    absent = [key for key in faults.without(found) if local.readable(key) is None]
    for key in absent:
        local.put_envelope(key, found[key][1])
    return count(len(absent), num_lists, chunks, [chunk for chunk in lacking if chunk not in damaged])


class _Faults:
    """What is wrong with records, by key. None instead of a place for it: the first is raised."""

    def __init__(self, failed: dict[str, Error] | None) -> None:
        self._failed = failed

    @contextlib.contextmanager
    def of(self, keys: Sequence[str]) -> Iterator[None]:
        """Note what is raised meanwhile as the fault of these records."""
        try:
            yield
        except _OF_ONE as error:
            if self._failed is None:
                raise
            for key in keys:
                self._failed.setdefault(key, error)

    def without(self, keys: Iterable[str]) -> list[str]:
        """Return the keys of records that nothing is wrong with."""
        return [key for key in keys if not self._failed or key not in self._failed]


def _lists(
    remote: Store,
    local: LocalStore,
    found: Mapping[str, tuple[Record, Envelope]],
    users: Mapping[str, Sequence[str]],
    faults: _Faults,
) -> dict[str, FileList]:
    """Return the lists of the files of all records that are whole as far as that, by the files' sha256.

    users : the keys of the records that have a file
    """
    files = {file.sha256: file for record, _ in found.values() for file in record.files}
    lists = {}
    for sha256, file in files.items():
        with faults.of(users[sha256]):
            lists[sha256] = _list(remote, local, file)
    needed = {file.sha256 for key in faults.without(found) for file in found[key][0].files}
    return {sha256: made for sha256, made in lists.items() if sha256 in needed}


def _record(remote: Store, local: LocalStore, key: str) -> tuple[Record, Envelope]:
    """Return what is here if it can be read and trusted, else what the other side has."""
    source: Store = local if local.readable(key) is not None else remote
    envelope = source.envelope(key)
    if envelope is None:
        raise NotFoundError(
            f"{remote.url} has no record {key}; build it, and push it from where it was built"
        )
    record = source.open_envelope(key, envelope)
    local.check_trust(envelope, f"{source.url}: {record_name(key)}")
    return record, envelope


def _list(remote: Store, local: LocalStore, file: FileRef) -> FileList:
    """Return a file's list, ours if there is one."""
    refuse = remote.refuse(list_name(file.sha256))
    made = local.readable_list(file.sha256)
    if made is None or made.size != file.size:
        made = remote.file_list(file.sha256)
    if made is None:
        raise remote.missing(list_name(file.sha256), file.path)
    if made.size != file.size:
        raise refuse(f"is of a file of {made.size} bytes, the record's {file.path} has {file.size}")
    return made


def _receive(
    remote: Store, local: LocalStore, chunks: Sequence[Chunk], progress: Progress, *, is_strict: bool
) -> dict[Chunk, DamagedError]:
    """Bring chunks, and return those that did not come because they are damaged. is_strict : the first is raised."""
    total, done = sum(chunk.size for chunk in chunks), 0
    damaged: dict[Chunk, DamagedError] = {}

    def receive(chunk: Chunk) -> int:
        try:
            data = remote.chunk(chunk)
        except DamagedError as error:
            if is_strict:
                raise
            damaged[chunk] = error
        else:
            local.add_chunk(chunk, data)
        return chunk.size

    for size in side_by_side(receive, chunks, remote.objects.jobs):
        done += size
        progress(remote.url, "pull", done, total)
    return damaged
