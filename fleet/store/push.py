"""Push: what a remote store lacks, in an order that leaves it whole wherever it ends.

Chunks come before lists, lists before records, records before refs. What was sent stays, so running it again goes on
where it ended.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from ...builder.progress import Progress, no_progress
from ...runtime.errors import NotFoundError
from .chunks import Chunk, FileList, dump_list
from .envelope import Envelope, check_signatures
from .errors import SignatureError
from .local import LocalStore
from .names import chunk_name, list_name, record_name
from .record import FileRef, Record, Ref
from .ref_signatures import sign_ref
from .store import Store
from .threads import side_by_side
from .transfer import Transferred, chunks_of, count


def push(
    local: LocalStore,
    remote: Store,
    keys: Iterable[str],
    refs: Mapping[tuple[str, str], Ref] | None = None,
    progress: Progress = no_progress,
) -> Transferred:
    """Bring records with all that they name to the remote store, then refs by (fleet, member).

    A record that was put here by its maker is signed if `local` has a private key, and so is every ref. A record that
    the remote store has is kept there if it can be read and trusted; it gets what it lacks of our files and of our
    signatures.
    raises NotFoundError for a key or ref without a record, SignatureError for a record or ref that the remote store's
        trust refuses (nothing is sent then), DamagedError for what is damaged here
    """
    remote.prepare()
    members: dict[str, list[str]] = {}
    for (_, member), ref in (refs or {}).items():
        members.setdefault(ref.key, []).append(member)
    ready = {key: _ready(local, remote, key, members.get(key, ())) for key in dict.fromkeys(keys)}
    named = {place: _signed(local, remote, *place, ref) for place, ref in (refs or {}).items()}
    there = {key: _there(remote, key) for key in ready}
    lists = _lists(local, ready, there)
    chunks, sent = _send_chunks(local, remote, lists, progress)
    lacking = [made for made in lists if not remote.objects.keep(list_name(made.sha256))]
    for made in lacking:
        remote.objects.write(list_name(made.sha256), dump_list(made))
    num_records = 0
    for done, (key, (_, envelope)) in enumerate(ready.items(), 1):
        num_records += _send_record(remote, key, envelope, there[key])
        progress(remote.url, "records", done, len(ready))
    for (fleet, member), ref in named.items():
        remote.set_ref(fleet, member, ref)
    return count(num_records, len(lacking), chunks, sent)


def _ready(local: LocalStore, remote: Store, key: str, members: Sequence[str]) -> tuple[Record, Envelope]:
    """Return a record that is to be pushed, signed if it is ours, and checked against what the other side trusts.

    members : who has it; errors name them
    """
    envelope = local.envelope(key)
    if envelope is None:
        raise NotFoundError(f"{local.url} has no record {key}; build it here, or pull it first")
    record = local.open_envelope(key, envelope)
    if local.key is not None and local.is_built_here(envelope):
        envelope = envelope.signed(local.key)
    try:
        check_signatures(envelope, remote.trust, f"{local.url}: {record_name(key)}")
    except SignatureError as error:
        whose = f"{', '.join(members)}: " if members else ""
        if not local.is_built_here(envelope):
            raise SignatureError(f"{whose}{error}") from None
        given = "no" if local.key is None else "another"
        raise SignatureError(
            f"{whose}{remote.url} takes what a key under trust has signed, and {given} key is given; give --sign-key "
            f"KEY.pem, or set PLANSMITH_SIGNING_KEY ({error})"
        ) from None
    return record, envelope


def _signed(local: LocalStore, remote: Store, fleet: str, member: str, ref: Ref) -> Ref:
    """Return a ref that is to be pushed, signed if either store has a private key, and checked."""
    for key in filter(None, (local.key, remote.key)):
        ref = sign_ref(fleet, member, ref, key)
    remote.check_ref(fleet, member, ref)
    return ref


def _there(remote: Store, key: str) -> Record | None:
    """Return the other side's record, if it can be read and trusted, and no collection took it aside before."""
    return remote.readable(key) if remote.objects.keep(record_name(key)) else None


def _lists(
    local: LocalStore, ready: Mapping[str, tuple[Record, Envelope]], there: Mapping[str, Record | None]
) -> list[FileList]:
    """Return the lists of the files of all records, each once."""
    made: dict[str, FileList] = {}
    for key, (record, _) in ready.items():
        other = there[key]
        for file in record.files if other is None else other.files:
            found = _list(local, file, record if other is None else None)
            if found is not None:
                made[file.sha256] = found
    return list(made.values())


def _list(local: LocalStore, file: FileRef, record: Record | None) -> FileList | None:
    """Return a file's list. A record of the other side (record is None) may name files that only it has."""
    made = local.file_list(file.sha256)
    if made is None and record is not None:
        raise local.missing(list_name(file.sha256), f"{file.path} of record {record.key}")
    return made


def _send_chunks(
    local: LocalStore, remote: Store, lists: Sequence[FileList], progress: Progress
) -> tuple[list[Chunk], list[Chunk]]:
    """Send what lacks; return all chunks, and those that were sent."""
    chunks = chunks_of(lists)
    names = [chunk_name(chunk.sha256) for chunk in chunks]
    kept = side_by_side(remote.objects.keep, names, remote.objects.jobs)
    lacking = [chunk for chunk, there in zip(chunks, kept, strict=True) if not there]
    total, done = sum(chunk.size for chunk in lacking), 0

    def send(chunk: Chunk) -> int:
        remote.objects.write(chunk_name(chunk.sha256), local.chunk(chunk))
        return chunk.size

    for size in side_by_side(send, lacking, remote.objects.jobs):
        done += size
        progress(remote.url, "push", done, total)
    return chunks, lacking


def _send_record(remote: Store, key: str, envelope: Envelope, there: Record | None) -> bool:
    """Send a record, or the signatures that the same record there has not; return whether anything was sent."""
    if there is None:
        # A collection may have taken files aside since they were found; it puts them back for this record.
        remote.put_envelope(key, envelope, has_files=True)
        return True
    other = remote.envelope(key)
    if (
        other is None
        or other.payload != envelope.payload
        or set(envelope.signatures) <= set(other.signatures)
    ):
        return False
    remote.replace_envelope(key, other.with_signatures(envelope))
    return True
