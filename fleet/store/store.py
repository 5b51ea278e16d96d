"""What every store does, wherever it lies: records, refs, lists of files, chunks."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence

from ...runtime.errors import EngineFileError, Error, InvalidArgumentError, NotFoundError
from . import fields
from .chunks import Chunk, FileList, load_list
from .envelope import Envelope, check_signatures, dump_envelope, load_envelope
from .errors import DamagedError, SignatureError
from .fields import MAX_JSON_BYTES, Refuse
from .names import (
    FORMAT,
    MARKER,
    RECORDS,
    REFS,
    chunk_name,
    key_of,
    list_name,
    member_of,
    record_name,
    ref_name,
)
from .objects import Objects
from .record import Record, Ref, dump_record, dump_ref, load_record, load_ref
from .ref_signatures import check_ref, sign_ref
from .signing import PrivateKey, PublicKey


class Store:
    """A store of records, refs and files.

    trust : keys of which one has to have signed a record; empty: records need no signature
    key   : signs what is put here

    Methods may be called from any thread. All raise RemoteError when the place cannot be reached.
    """

    fix = "delete it there, then push again from a store that has it"
    fix_missing = "push again from a store that has it"

    def __init__(
        self, objects: Objects, trust: Sequence[PublicKey] = (), key: PrivateKey | None = None
    ) -> None:
        self.objects = objects
        self.trust = tuple(trust)
        self.key = key
        self._checked = False

    @property
    def url(self) -> str:
        """Where it lies, without a password."""
        return self.objects.url

    def has_record(self, key: str) -> bool:
        """Return whether there is a record of this key; not whether it is a good one."""
        self.check()
        return self.objects.has(record_name(key))

    def record(self, key: str) -> Record | None:
        """Return the record of a key, None when there is none.

        raises DamagedError when it cannot be read or is another key's, SignatureError when it is not to be trusted
        """
        envelope = self.envelope(key)
        return None if envelope is None else self.open_envelope(key, envelope)

    def records(self) -> Iterator[str]:
        """Return the keys of all records."""
        self.check()
        for name in self.objects.names(RECORDS):
            if (key := key_of(name)) is not None:
                yield key

    def put_record(self, record: Record) -> Record:
        """Return the record that is there afterwards: an equal key keeps what is there, if that can be read.

        raises InvalidArgumentError when one of its files was not added before, SignatureError when this store would
        refuse to read it
        """
        envelope = Envelope(dump_record(record))
        return self.put_envelope(record.key, envelope if self.key is None else envelope.signed(self.key))

    def refs(self, fleet: str, damaged: dict[str, Error] | None = None) -> dict[str, Ref]:
        """Return the refs of a fleet by member.

        damaged : takes the DamagedError of each that cannot be read, by member; None = the first is raised
        """
        self.check()
        ref_name(fleet, "any")
        refs: dict[str, Ref] = {}
        for name in self.objects.names(f"{REFS}/{fleet}"):
            if (found := member_of(name)) is None:
                continue
            try:
                ref = self.ref(*found)
            except DamagedError as error:
                if damaged is None:
                    raise
                damaged[found[1]] = error
                continue
            if ref is not None:
                refs[found[1]] = ref
        return refs

    def ref(self, fleet: str, member: str) -> Ref | None:
        """Return the ref of a fleet's member, None when there is none; DamagedError when it cannot be read."""
        name = ref_name(fleet, member)
        raw = self._json(name)
        return None if raw is None else load_ref(raw, self.refuse(name))

    def fleets(self) -> list[str]:
        """Return the names of the fleets that have refs."""
        self.check()
        return sorted({one[0] for name in self.objects.names(REFS) if (one := member_of(name)) is not None})

    def set_ref(self, fleet: str, member: str, ref: Ref) -> None:
        """Say which key a member has, signed if this store has a private key; the last one wins.

        raises NotFoundError when there is no such record: it may have been collected, so put or push it again;
        SignatureError when check_ref would refuse it
        """
        if self.key is not None:
            ref = sign_ref(fleet, member, ref, self.key)
        self.check_ref(fleet, member, ref)
        self.prepare()
        with self.objects.sharing():
            if not self.objects.keep(record_name(ref.key)):
                raise NotFoundError(
                    f"{self.url} has no record {ref.key}, which the ref {fleet}/{member} is to name; put or push it "
                    "first"
                )
            self.objects.write(ref_name(fleet, member), dump_ref(ref))

    def check_ref(self, fleet: str, member: str, ref: Ref) -> None:
        """Raise SignatureError for a ref that none of the trusted keys signed for this member.

        `refs` gives these as well, for who has the key that a member must have. Ask where a ref alone says which.
        """
        check_ref(fleet, member, ref, self.trust, f"{self.url}: {ref_name(fleet, member)}")

    def remove_ref(self, fleet: str, member: str) -> None:
        """Forget a member; what only it named goes with the next collection that finds it old enough."""
        self.prepare()
        self.objects.remove(ref_name(fleet, member))

    def envelope(self, key: str) -> Envelope | None:
        """Return the envelope of a record, nothing of it checked but its form; None when there is none."""
        self.check()
        name = record_name(key)
        raw = self._json(name)
        return None if raw is None else load_envelope(raw, self.refuse(name))

    def open_envelope(self, key: str, envelope: Envelope) -> Record:
        """Return the record in an envelope that was found, or is to lie, under a key; raises as `record` does."""
        name = record_name(key)
        signers = self.check_trust(envelope, f"{self.url}: {name}")
        found = load_record(envelope.payload, self.refuse(name))
        if found.key != key:
            raise self.refuse(name)(f"is the record of another key, {found.key}")
        return Record(
            found.key, found.kind, found.inputs, found.files, found.content, found.provenance, signers
        )

    def check_trust(self, envelope: Envelope, what: str) -> tuple[str, ...]:
        """Return the ids of the trusted keys that signed; SignatureError where one of them had to and none did.

        what : how an error calls it
        """
        return check_signatures(envelope, self.trust, what)

    def put_envelope(self, key: str, envelope: Envelope, has_files: bool = False) -> Record:
        """Put a record with its signatures; as `put_record`.

        has_files : the caller found or wrote the lists of all its files; they are not looked for again
        """
        self.prepare()
        record = self.open_envelope(key, envelope)
        name, raw = record_name(key), dump_envelope(envelope)
        with self.objects.sharing():
            if not has_files:
                self._check_files(record)
            if self.objects.write(name, raw, replace=False):
                return record
            kept = self.readable(key)
            if kept is not None:
                self.objects.keep(name)
                return kept
            self.objects.write(name, raw)
        return record

    def _check_files(self, record: Record) -> None:
        absent = next((file for file in record.files if not self.objects.keep(list_name(file.sha256))), None)
        if absent is not None:
            raise InvalidArgumentError(
                f"{self.url} has no file {absent.sha256} ({absent.path}), which the record {record.key} names; add a "
                "record's files first"
            )

    def replace_envelope(self, key: str, envelope: Envelope) -> None:
        """Put more signatures to a record that is there."""
        self.open_envelope(key, envelope)
        self.objects.write(record_name(key), dump_envelope(envelope))

    def readable(self, key: str) -> Record | None:
        """Return the record of a key; None when there is none, or none that can be read and trusted."""
        try:
            return self.record(key)
        except (DamagedError, SignatureError):
            return None

    def file_list(self, sha256: str) -> FileList | None:
        """Return the chunks of a file, None when there is no such file. DamagedError when the list cannot be read."""
        name = list_name(sha256)
        raw = self._json(name)
        return None if raw is None else load_list(raw, sha256, self.refuse(name))

    def readable_list(self, sha256: str) -> FileList | None:
        """Return the chunks of a file; None when there is no such list, or none that can be read."""
        try:
            return self.file_list(sha256)
        except DamagedError:
            return None

    def chunk(self, chunk: Chunk) -> bytes:
        """Return a chunk, its hash checked; DamagedError when it is missing, cut short or altered."""
        name = chunk_name(chunk.sha256)
        data = self.objects.read(name, limit=chunk.size)
        if data is None:
            raise self.missing(name)
        if len(data) != chunk.size:
            more = "more than " if len(data) > chunk.size else ""
            got = f"{more}{min(len(data), chunk.size)}"
            raise self.refuse(name)(f"has {got} bytes, wanted {chunk.size}")
        if hashlib.sha256(data).hexdigest() != chunk.sha256:
            raise self.refuse(name)("was altered: its bytes have another sha256 than its name says")
        return data

    def refuse(self, name: str) -> Refuse:
        """Return what makes the errors of an object."""
        return lambda what: DamagedError(self.url, name, what, self.fix)

    def missing(self, name: str, note: str = "") -> DamagedError:
        """Return the error of an object that ought to be there."""
        return DamagedError(self.url, name, f"is missing{note and f' ({note})'}", self.fix_missing)

    def check(self) -> None:
        """Raise EngineFileError for a store of another version, InvalidArgumentError for what is no store."""
        if not self._checked:
            self._checked = self._has_marker()

    def prepare(self) -> None:
        """Make the store if nothing is there yet; raises as `check` does."""
        self.check()
        if not self._checked:
            self.objects.write(MARKER, fields.dump({"format": FORMAT}))
            self._checked = True

    def _has_marker(self) -> bool:
        raw = self._json(MARKER)
        others = self.objects.others() if raw is None else []
        if raw is None and others:
            raw = self._json(MARKER)  # it comes first: a store that somebody makes just now has it by then
        if raw is None:
            if others:
                raise InvalidArgumentError(
                    f"{self.url} is no store: it has no {MARKER} and is not empty ({', '.join(others)}); give a new or "
                    "an empty place, or an existing store"
                )
            return False
        found = fields.load(raw, self.refuse(MARKER)).get("format")
        if found != FORMAT:
            raise EngineFileError(
                f"{self.url} is a store of format {str(found)[:40]}, this plansmith reads format {FORMAT}; use the "
                "version that made it, or another store"
            )
        return True

    def _json(self, name: str) -> bytes | None:
        raw = self.objects.read(name)
        if raw is not None and len(raw) > MAX_JSON_BYTES:
            raise self.refuse(name)(f"has more than {MAX_JSON_BYTES} bytes")
        return raw
