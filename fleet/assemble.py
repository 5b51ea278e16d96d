"""Engine directories from a store: the units of one engine side by side, as if one build had made them."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import tempfile
import uuid
from collections.abc import Mapping, Sequence
from pathlib import Path

from ..builder.build_key import inputs_key
from ..builder.build_report import BuildReport, parse_targets
from ..builder.engine_dir import carry_over, destination, replacing
from ..runtime.errors import EngineFileError, Error
from ..runtime.manifest import MANIFEST_NAME, Manifest, hash_file, load_manifest
from ..runtime.manifest_entries import DraftEntry
from .store.local import LocalStore
from .store.record import FileRef, Record
from .stored import manifest_of
from .unit_files import KeptFiles

# What all units of an engine agree on.
_SHARED = ("schema_version", "model", "precision", "limits", "tokenizer", "graph_contract")


def assemble(
    records: Sequence[Record], store: LocalStore, out: Path, built: Mapping[str, KeptFiles] | None = None
) -> bool:
    """Make the engine directory of some units; return False where it is there already as it would be made.

    out : a new or empty directory, or an engine, which is replaced in one step; files that stay the same are kept
    built : the files of units that were stored just now, by their keys; they are moved where that can be done

    raises EngineFileError for units that do not belong together, DamagedError for what the store does not give back as
        it was, and what engine_dir.replacing raises; out is as it was then
    """
    out = destination(out)
    manifest = _joined([manifest_of(record, out) for record in records])
    if _is_there(manifest, _old(out)):
        return False
    # Two builders of one store make the same engine: who comes second finds it made.
    held = store.lock_unit(inputs_key({"engine": str(out)}), blocking=True)
    with held or contextlib.nullcontext():
        return _assemble(records, store, out, manifest, built or {})


def can_move(folder: Path, out: Path) -> bool:
    """Return whether files of a folder can be moved to where out is, or will be; mounts of one disk differ, too."""
    there = next(path for path in (out, *out.parents) if path.is_dir())
    new = there / f".plansmith-{uuid.uuid4().hex}"
    try:
        with tempfile.NamedTemporaryFile(dir=folder) as file:
            os.link(file.name, new)
        new.unlink()
    except OSError:
        return False
    return True


def _assemble(
    records: Sequence[Record],
    store: LocalStore,
    out: Path,
    manifest: Manifest,
    built: Mapping[str, KeptFiles],
) -> bool:
    old = _old(out)
    if _is_there(manifest, old):
        return False
    with replacing(out) as work:
        files = {file.path: file for record in records for file in record.files}
        kept = _carry(files, old, out, work.path)
        for record in records:
            kept |= _moved(
                [file for file in record.files if file.path not in kept], built.get(record.key), work.path
            )
        missing = [file for path, file in files.items() if path not in kept]
        work.reserve(sum(file.size for file in missing))
        store.extract(missing, work.path)
        manifest = dataclasses.replace(manifest, root=work.path)
        manifest.check_files(hashes=False)
        (work.path / MANIFEST_NAME).write_text(manifest.to_text(), encoding="utf-8")
        _report(records, manifest, out).write(work.path)
    return True


def _joined(manifests: Sequence[Manifest]) -> Manifest:
    """Return one manifest of several units': the newest one's, with the plans of all."""
    newest = max(manifests, key=lambda one: one.created)
    for one in manifests:
        for name in _SHARED:
            if getattr(one, name) != getattr(newest, name):
                raise EngineFileError(
                    f"units of {newest.root.name} differ in {name}, so they are no one engine; build them again with "
                    "one version of plansmith: plansmith fleet build"
                )
    targets = {name: entry for one in manifests for name, entry in sorted(one.targets.items())}
    return dataclasses.replace(newest, targets=dict(sorted(targets.items())), draft=_joined_draft(manifests))


def _joined_draft(manifests: Sequence[Manifest]) -> DraftEntry | None:
    drafts = [one.draft for one in manifests if one.draft is not None]
    entries = {name: entry for one in drafts for name, entry in one.targets.items()}
    return dataclasses.replace(drafts[0], targets=dict(sorted(entries.items()))) if drafts else None


def _old(out: Path) -> Manifest | None:
    """Return the manifest of the engine that is there; None where there is none that can be read."""
    try:
        return load_manifest(out)
    except EngineFileError:
        return None


def _is_there(manifest: Manifest, old: Manifest | None) -> bool:
    """Return whether the engine that is there is the one that would be made, with all its files."""
    if old is None or old.to_text() != manifest.to_text():
        return False
    try:
        old.check_files(hashes=False)
    except Error:
        return False
    return True


def _carry(files: Mapping[str, FileRef], old: Manifest | None, out: Path, work: Path) -> set[str]:
    """Link what an engine that is there has already; return the paths."""
    if old is None:
        return set()
    kept = set()
    for path, file in files.items():
        there = out / path
        if there.is_file() and there.stat().st_size == file.size and hash_file(there) == file.sha256:
            carry_over(path, out, work)
            kept.add(path)
    return kept


def _moved(files: Sequence[FileRef], built: KeptFiles | None, work: Path) -> set[str]:
    """Move what was stored just now, without reading it again; return the paths."""
    moved = set[str]()
    if built is None:
        return moved
    for file in files:
        new = work / file.path
        new.parent.mkdir(parents=True, exist_ok=True)
        if built.move(file.path, new):
            moved.add(file.path)
    return moved


def _report(records: Sequence[Record], manifest: Manifest, out: Path) -> BuildReport:
    """Return how the plans were built, each when it was."""
    found = (parse_targets(record.content.get("report")) for record in records)
    targets = dict(sorted(item for one in found for item in one.items()))
    return BuildReport(
        engine_dir=str(out),
        checkpoint=manifest.checkpoint.path,
        precision=manifest.precision,
        limits=dataclasses.asdict(manifest.limits),
        seconds=round(sum(one.seconds for one in targets.values()), 3),
        targets=targets,
        draft=None if manifest.draft is None else manifest.draft.precision,
    )
