"""Pull: what a local store lacks, nothing of it under its name here before it was checked."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from ...builder.progress import Progress, no_progress
from ...runtime.errors import NotFoundError
from .chunks import Chunk, FileList
from .envelope import Envelope
from .folder import check_room
from .local import LocalStore
from .names import list_name, record_name
from .record import FileRef, Record
from .store import Store
from .threads import side_by_side
from .transfer import Transferred, chunks_of, count


def pull(
    remote: Store, local: LocalStore, keys: Iterable[str], progress: Progress = no_progress
) -> Transferred:
    """Bring records with all that they name from the remote store; `extract` works for them afterwards.

    Records are checked against the trust of both stores before anything else is read, every chunk against its name,
    every file against its hash, all before it has its name here. A record that is here already is completed. Running
    it again goes on where it ended.
    raises NotFoundError for a key that the remote store has no record of, DamagedError and SignatureError for what is
        not as it was made, OutOfMemoryError when the disk has no room for what is missing
    """
    local.prepare()
    found = {key: _record(remote, local, key) for key in dict.fromkeys(keys)}
    files = {file.sha256: file for record, _ in found.values() for file in record.files}
    lists = {sha256: _list(remote, local, file) for sha256, file in files.items()}
    chunks = chunks_of(lists.values())
    lacking = [chunk for chunk in chunks if not local.has_chunk(chunk)]
    check_room(local.root, sum(chunk.size for chunk in lacking))
    _receive(remote, local, lacking, progress)
    new = [made for made in lists.values() if not local.has_list(made)]
    for made in new:
        local.add_list(made, remote.refuse(list_name(made.sha256)))
    absent = [key for key in found if local.readable(key) is None]
    for key in absent:
        local.put_envelope(key, found[key][1])
    return count(len(absent), len(new), chunks, lacking)


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


def _receive(remote: Store, local: LocalStore, chunks: Sequence[Chunk], progress: Progress) -> None:
    total, done = sum(chunk.size for chunk in chunks), 0

    def receive(chunk: Chunk) -> int:
        local.add_chunk(chunk, remote.chunk(chunk))
        return chunk.size

    for size in side_by_side(receive, chunks, remote.objects.jobs):
        done += size
        progress(remote.url, "pull", done, total)
