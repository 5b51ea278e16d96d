"""Records and refs: what a store says of a unit, and which unit a member of a fleet has."""

from __future__ import annotations

import dataclasses
import datetime
import re
from collections.abc import Mapping, Sequence
from typing import Any

from ...runtime.errors import InvalidArgumentError
from . import fields
from .envelope import Signature, dump_signatures, load_signatures
from .fields import Refuse, quoted
from .names import check_key, check_path, is_key

# An in-toto statement: any tool that reads those finds a record's files as its subjects.
STATEMENT_TYPE = "https://in-toto.io/Statement/v1"
PREDICATE_TYPE = "urn:plansmith:fleet-record:1"

_TIME = "%Y-%m-%dT%H:%M:%SZ"
_OWNER_READS = 0o400


@dataclasses.dataclass(frozen=True)
class FileRef:
    """A file of a record.

    path : below the folder that it was taken from, with "/"
    mode : its permission bits, 0o400 to 0o777: a file that its owner cannot read serves nobody
    """

    path: str
    size: int
    sha256: str
    mode: int


@dataclasses.dataclass(frozen=True)
class Record:
    """What is known of a unit. A store does not look into inputs, content and provenance.

    key     : sha256 over the inputs, 64 hexadecimal digits; the store's caller makes it
    kind    : what it is, such as "unit" or "gate"
    inputs  : name -> value, each of printable characters
    content, provenance : JSON objects
    signers : ids of trusted keys whose signature was checked when it was read
    """

    key: str
    kind: str
    inputs: Mapping[str, str]
    files: tuple[FileRef, ...]
    content: Mapping[str, Any]
    provenance: Mapping[str, Any]
    signers: tuple[str, ...] = dataclasses.field(default=(), compare=False)


@dataclasses.dataclass(frozen=True)
class Ref:
    """The key a member of a fleet had when it was last built.

    time : when that was, UTC, as 2026-01-31T12:00:00Z
    signatures : of whoever said so, see ref_signatures.py
    """

    key: str
    time: str
    signatures: tuple[Signature, ...] = dataclasses.field(default=(), compare=False, repr=False)

    @classmethod
    def now(cls, key: str) -> Ref:
        """Return the ref of a member that was built just now."""
        return cls(key, datetime.datetime.now(datetime.timezone.utc).strftime(_TIME))


def dump_record(record: Record) -> bytes:
    """Return the statement that is signed; InvalidArgumentError for a record that cannot be one."""
    check_key(record.key)
    paths = [check_path(file.path) for file in record.files]
    if (clash := _clash(paths)) is not None:
        raise InvalidArgumentError(
            f"the record {record.key} {clash}; give each of its files once, under its path"
        )
    if (wrong := _unprintable(record)) is not None:
        raise InvalidArgumentError(f"the record {record.key} {wrong}; spell out what cannot be printed")
    if (hidden := next((file for file in record.files if not file.mode & _OWNER_READS), None)) is not None:
        raise InvalidArgumentError(
            f"{hidden.path} has the mode {hidden.mode:04o}, which does not let its owner read it; chmod u+r it first"
        )
    predicate = {
        "key": record.key,
        "kind": record.kind,
        "inputs": dict(record.inputs),
        "content": dict(record.content),
        "provenance": dict(record.provenance),
    }
    statement = {
        "_type": STATEMENT_TYPE,
        "subject": [_dump_file(file) for file in record.files],
        "predicateType": PREDICATE_TYPE,
        "predicate": predicate,
    }
    try:
        return fields.dump(statement)
    except (TypeError, ValueError) as error:
        raise InvalidArgumentError(f"the record {record.key} cannot be written as JSON: {error}") from None


def _unprintable(record: Record) -> str | None:
    """Return which of the texts that are shown, each on a line of its own, cannot be; None where all can."""
    if not record.kind.isprintable():
        return f"is of the kind {quoted(record.kind)}, which is not printable"
    for name, value in record.inputs.items():
        if not (name.isprintable() and value.isprintable()):
            return f"has the input {quoted(name)} {quoted(value)}, which is not printable"
    return None


def _clash(paths: Sequence[str]) -> str | None:
    """Return what is wrong with paths that cannot be below one folder together; None where they can."""
    known = set(paths)
    if len(known) != len(paths):
        return "names a file twice"
    folders = {path[:end] for path in known for end in range(len(path)) if path[end] == "/"}
    return f"has {min(known & folders)} as a file and as a folder" if known & folders else None


def _dump_file(file: FileRef) -> dict[str, Any]:
    notes = {"size": file.size, "mode": f"{file.mode:04o}"}
    return {"name": file.path, "digest": {"sha256": file.sha256}, "annotations": notes}


def load_record(raw: bytes, refuse: Refuse) -> Record:
    """Return the record of a statement. Of content and provenance, characters that a terminal obeys are replaced."""
    statement = fields.load(raw, refuse)
    for name, wanted in (("_type", STATEMENT_TYPE), ("predicateType", PREDICATE_TYPE)):
        if (got := fields.text(statement, name, refuse)) != wanted:
            raise refuse(f"has {name} {quoted(got)}, wanted {wanted!r}")
    predicate = fields.mapping(statement, "predicate", refuse)
    inputs = fields.mapping(predicate, "inputs", refuse)
    if not all(isinstance(value, str) for value in inputs.values()):
        raise refuse("has inputs that are no text")
    files = tuple(_load_file(one, refuse) for one in fields.array(statement, "subject", refuse))
    if (clash := _clash([file.path for file in files])) is not None:
        raise refuse(clash)
    key = fields.text(predicate, "key", refuse)
    if not is_key(key):
        raise refuse(f"names the key {quoted(key)}, which is no sha256")
    record = Record(
        key=key,
        kind=fields.text(predicate, "kind", refuse),
        inputs=inputs,
        files=files,
        content=fields.shown(fields.mapping(predicate, "content", refuse)),
        provenance=fields.shown(fields.mapping(predicate, "provenance", refuse)),
    )
    if (wrong := _unprintable(record)) is not None:
        raise refuse(wrong)
    return record


def _load_file(value: Any, refuse: Refuse) -> FileRef:
    if not isinstance(value, dict):
        raise refuse("has a subject that is no object")
    notes = fields.mapping(value, "annotations", refuse)
    sha256 = fields.text(fields.mapping(value, "digest", refuse), "sha256", refuse)
    mode = fields.text(notes, "mode", refuse)
    if not is_key(sha256):
        raise refuse(f"names the hash {quoted(sha256)}, which is no sha256")
    if re.fullmatch("0[4-7][0-7][0-7]", mode) is None:
        raise refuse(f"has the mode {quoted(mode)}, wanted is one of 0400 to 0777 that lets the owner read")
    try:
        path = check_path(fields.text(value, "name", refuse))
    except InvalidArgumentError as error:
        raise refuse(f"names a file that cannot be: {error}") from None
    return FileRef(path, fields.number(notes, "size", refuse), sha256, int(mode, 8))


def dump_ref(ref: Ref) -> bytes:
    """Return the JSON of a ref; InvalidArgumentError for a key or a time that is none."""
    if not is_time(ref.time):
        raise InvalidArgumentError(f"{quoted(ref.time)} is no time of a ref, such as 2026-01-31T12:00:00Z")
    signatures = {"signatures": dump_signatures(ref.signatures)} if ref.signatures else {}
    return fields.dump({"key": check_key(ref.key), "time": ref.time, **signatures})


def load_ref(raw: bytes, refuse: Refuse) -> Ref:
    """Return the ref of its JSON."""
    value = fields.load(raw, refuse)
    key = fields.text(value, "key", refuse)
    if not is_key(key):
        raise refuse(f"names the key {quoted(key)}, which is no sha256")
    time = fields.text(value, "time", refuse)
    if not is_time(time):
        raise refuse(f"has the time {quoted(time)}, wanted is one such as 2026-01-31T12:00:00Z")
    signatures = load_signatures(value, refuse) if "signatures" in value else ()
    return Ref(key, time, signatures)


def is_time(text: str) -> bool:
    """Return whether this is a time in the one form that refs have it in."""
    try:
        return datetime.datetime.strptime(text, _TIME).strftime(_TIME) == text
    except ValueError:
        return False
