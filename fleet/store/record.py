"""Records and refs: what a store says of a unit, and which unit a member of a fleet has."""

from __future__ import annotations

import dataclasses
import datetime
from collections.abc import Mapping, Sequence
from typing import Any

from ...runtime.errors import InvalidArgumentError
from . import fields
from .envelope import Signature, dump_signatures, load_signatures
from .fields import Refuse
from .names import check_key, check_path, is_key

# An in-toto statement: any tool that reads those finds a record's files as its subjects.
STATEMENT_TYPE = "https://in-toto.io/Statement/v1"
PREDICATE_TYPE = "urn:plansmith:fleet-record:1"


@dataclasses.dataclass(frozen=True)
class FileRef:
    """A file of a record.

    path : below the folder that it was taken from, with "/"
    mode : its permission bits, 0 to 0o777
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
        return cls(key, datetime.datetime.now(datetime.timezone.utc).strftime("%Y-%m-%dT%H:%M:%SZ"))


def dump_record(record: Record) -> bytes:
    """Return the statement that is signed; InvalidArgumentError for a record that cannot be one."""
    check_key(record.key)
    paths = [check_path(file.path) for file in record.files]
    if (clash := _clash(paths)) is not None:
        raise InvalidArgumentError(
            f"the record {record.key} {clash}; give each of its files once, under its path"
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
    """Return the record of a statement."""
    statement = fields.load(raw, refuse)
    for name, wanted in (("_type", STATEMENT_TYPE), ("predicateType", PREDICATE_TYPE)):
        if (got := fields.text(statement, name, refuse)) != wanted:
            raise refuse(f"has {name} {got!r}, wanted {wanted!r}")
    predicate = fields.mapping(statement, "predicate", refuse)
    inputs = fields.mapping(predicate, "inputs", refuse)
    if not all(isinstance(value, str) for value in inputs.values()):
        raise refuse("has inputs that are no text")
    files = tuple(_load_file(one, refuse) for one in fields.array(statement, "subject", refuse))
    if (clash := _clash([file.path for file in files])) is not None:
        raise refuse(clash)
    return Record(
        key=fields.text(predicate, "key", refuse),
        kind=fields.text(predicate, "kind", refuse),
        inputs=inputs,
        files=files,
        content=fields.mapping(predicate, "content", refuse),
        provenance=fields.mapping(predicate, "provenance", refuse),
    )


def _load_file(value: Any, refuse: Refuse) -> FileRef:
    if not isinstance(value, dict):
        raise refuse("has a subject that is no object")
    notes = fields.mapping(value, "annotations", refuse)
    sha256 = fields.text(fields.mapping(value, "digest", refuse), "sha256", refuse)
    mode = fields.text(notes, "mode", refuse)
    if not is_key(sha256):
        raise refuse(f"names the hash {sha256!r}, which is no sha256")
    if len(mode) != 4 or mode[0] != "0" or not set(mode) <= set("01234567"):
        raise refuse(f"has the mode {mode!r}, wanted is one of 0000 to 0777")
    try:
        path = check_path(fields.text(value, "name", refuse))
    except InvalidArgumentError as error:
        raise refuse(f"names a file that cannot be: {error}") from None
    return FileRef(path, fields.number(notes, "size", refuse), sha256, int(mode, 8))


def dump_ref(ref: Ref) -> bytes:
    """Return the JSON of a ref."""
    signatures = {"signatures": dump_signatures(ref.signatures)} if ref.signatures else {}
    return fields.dump({"key": check_key(ref.key), "time": ref.time, **signatures})


def load_ref(raw: bytes, refuse: Refuse) -> Ref:
    """Return the ref of its JSON."""
    value = fields.load(raw, refuse)
    key = fields.text(value, "key", refuse)
    if not is_key(key):
        raise refuse(f"names the key {key!r}, which is no sha256")
    signatures = load_signatures(value, refuse) if "signatures" in value else ()
    return Ref(key, fields.text(value, "time", refuse), signatures)
