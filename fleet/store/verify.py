"""Reads a store from end to end and says what is wrong with it."""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Iterator

from ...builder.progress import Progress, no_progress
from .chunks import MAX_READ_BYTES, FileList
from .errors import DamagedError, SignatureError
from .local import OTHER_FILE
from .names import CHUNKS, FILES, RECORDS, REFS, key_of, list_name, member_of, record_name
from .record import Record
from .store import Store
from .threads import side_by_side


@dataclasses.dataclass(frozen=True)
class Problem:
    """What is wrong with an object of a store, and what to do about it."""

    name: str
    what: str
    fix: str


def verify(store: Store, progress: Progress = no_progress) -> list[Problem]:
    """Return what is wrong with a store: every chunk, file, record, signature and ref is checked, all bytes hashed.

    What nothing names is no problem: a collection removes it. Writers may be at work meanwhile; a collection may not.
    """
    store.check()
    problems: dict[str, Problem] = {}
    for problem in (*_chunks(store, progress), *_lists(store, progress), *_records(store), *_refs(store)):
        problems.setdefault(problem.name, problem)
    return [problems[name] for name in sorted(problems)]


def _chunks(store: Store, progress: Progress) -> Iterator[Problem]:
    names = list(store.objects.names(CHUNKS))
    for done, problem in enumerate(
        side_by_side(lambda name: _chunk(store, name), names, store.objects.jobs), 1
    ):
        progress(store.url, "verify chunks", done, len(names))
        if problem is not None:
            yield problem


def _chunk(store: Store, name: str) -> Problem | None:
    sha256 = key_of(name)
    if sha256 is None:
        return _unknown(name)
    try:
        data = store.objects.read(name, limit=MAX_READ_BYTES)
    except DamagedError as error:
        return Problem(error.name, error.what, error.fix)
    if data is None or hashlib.sha256(data).hexdigest() == sha256:  # None: collected since it was listed
        return None
    return Problem(name, f"has {len(data)} bytes with another sha256 than its name says", store.fix)


def _lists(store: Store, progress: Progress) -> Iterator[Problem]:
    names = list(store.objects.names(FILES))
    for done, name in enumerate(names, 1):
        sha256 = key_of(name)
        if sha256 is None:
            yield _unknown(name)
            continue
        try:
            made = store.file_list(sha256)
            if made is not None:
                _check_file(store, made)
        except DamagedError as error:
            yield Problem(error.name, error.what, error.fix)
        progress(store.url, "verify files", done, len(names))


def _check_file(store: Store, made: FileList) -> None:
    digest = hashlib.sha256()
    for data in side_by_side(store.chunk, made.chunks, store.objects.jobs):
        digest.update(data)
    if digest.hexdigest() != made.sha256:
        raise store.refuse(list_name(made.sha256))(OTHER_FILE)


def _records(store: Store) -> Iterator[Problem]:
    for name in store.objects.names(RECORDS):
        key = key_of(name)
        if key is None:
            yield _unknown(name)
            continue
        try:
            record = store.record(key)
            if record is not None:
                _check_files(store, record)
        except DamagedError as error:
            yield Problem(error.name, error.what, error.fix)
        except SignatureError as error:
            yield Problem(name, str(error).removeprefix(f"{store.url}: {name} "), store.fix)


def _check_files(store: Store, record: Record) -> None:
    for file in record.files:
        name = list_name(file.sha256)
        made = store.file_list(file.sha256)
        if made is None:
            raise store.missing(name, f"{file.path} of record {record.key}")
        if made.size != file.size:
            raise store.refuse(name)(f"is of {made.size} bytes, the record {record.key} says {file.size}")


def _refs(store: Store) -> Iterator[Problem]:
    known = set(store.objects.names(RECORDS))
    for name in store.objects.names(REFS):
        member = member_of(name)
        if member is None:
            yield _unknown(name)
            continue
        try:
            ref = store.ref(*member)
            if ref is not None:
                store.check_ref(*member, ref)
        except (DamagedError, SignatureError) as error:
            yield Problem(name, str(error).removeprefix(f"{store.url}: {name} "), store.fix)
            continue
        if (
            ref is not None
            and record_name(ref.key) not in known
            and store.objects.read(record_name(ref.key)) is None
        ):
            yield Problem(name, f"names the record {ref.key}, which is missing", store.fix)


def _unknown(name: str) -> Problem:
    return Problem(name, "has a name that nothing in a store has", "look where it comes from, then delete it")
