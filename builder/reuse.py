"""What an engine directory holds already: which of its plans a build keeps, and which engines it must not replace."""

from __future__ import annotations

import dataclasses
import pathlib
from collections.abc import Mapping

from ..runtime.errors import EngineFileError, InvalidArgumentError
from ..runtime.manifest import MANIFEST_NAME, Manifest, load_manifest
from ..runtime.manifest_entries import DraftEntry, TargetEntry
from .build_key import plan_limits
from .compile import DRAFT, piece_name
from .engine_dir import Work, carry_over
from .limits import Limits
from .precision import Precision


def old_manifest(out: pathlib.Path, fingerprint: str, recipe: Precision, *, force: bool) -> Manifest | None:
    """Return the manifest of the engine at the destination; None when there is none or all of it is replaced.

    raises EngineFileError when it cannot be read, InvalidArgumentError when another model's or precision's engine
        would be overwritten without --force.
    """
    if not (out / MANIFEST_NAME).is_file():
        return None
    try:
        old = load_manifest(out)
    except EngineFileError:
        if force:
            return None
        raise
    differing = []
    if old.checkpoint.fingerprint != fingerprint:
        differing.append(f"checkpoint (it was built from {old.checkpoint.path})")
    if old.precision != recipe.name:
        differing.append(f"precision (it has {old.precision}, asked for is {recipe.name})")
    if differing and not force:
        raise InvalidArgumentError(
            f"{out} holds an engine of another {' and another '.join(differing)}; give another -o, or --force to "
            "replace it"
        )
    return None if differing else old


def reusable(
    old: Manifest | None, keys: Mapping[str, str], limits: Limits, draft: Precision | None, *, force: bool
) -> tuple[dict[str, TargetEntry], bool]:
    """Return the plans of the old engine that stay, by their piece names, and whether others are lost.

    keys : of the pieces that are asked for
    draft : the recipe of the drafts; those of another are lost
    raises InvalidArgumentError when the limits differ and targets that are not asked for would be lost.
    """
    if old is None:
        return {}, False
    pieces = split(old)
    others = {name: entry for name, entry in pieces.items() if name.partition("/")[0] not in keys}
    if differences := _differences(old, limits):
        if others and not force:
            targets = [name for name in others if "/" not in name]
            raise InvalidArgumentError(
                f"{old.root} was built for other limits ({differences}) and holds "
                f"{', '.join(targets)} besides; name all of them in --target to rebuild them, give another -o, or "
                "--force to drop them"
            )
        return {}, bool(others)
    same_draft = old.draft is not None and draft is not None and old.draft.precision == draft.name
    usable = {name: entry for name, entry in pieces.items() if same_draft or "/" not in name}
    kept = {
        name: entry
        for name, entry in usable.items()
        if (name in others or (not force and entry.key == keys.get(name))) and _is_whole(old, entry)
    }
    return kept, any(name not in kept and name not in keys for name in pieces)


def split(manifest: Manifest) -> dict[str, TargetEntry]:
    """Return every plan of an engine by its piece name, those of drafts included."""
    drafts = {} if manifest.draft is None else manifest.draft.targets
    return {
        **manifest.targets,
        **{piece_name(name, is_draft=True): entry for name, entry in drafts.items()},
    }


def join(
    pieces: Mapping[str, TargetEntry], draft: Precision | None
) -> tuple[dict[str, TargetEntry], DraftEntry | None]:
    """Return plans by their piece names as a manifest has them; a draft without its target is left out."""
    targets = {name: entry for name, entry in sorted(pieces.items()) if "/" not in name}
    drafts = {name: pieces[f"{name}/{DRAFT}"] for name in targets if f"{name}/{DRAFT}" in pieces}
    return targets, DraftEntry(draft.name, drafts) if draft is not None and drafts else None


def carry(kept: Mapping[str, TargetEntry], out: pathlib.Path, work: Work) -> dict[str, TargetEntry]:
    """Bring the files of plans that stay, and their logs, into the new directory."""
    for name, target in kept.items():
        for entry in target.files:
            carry_over(entry.path, out, work.path)
        log = f"targets/{name}/build.log"
        if (out / log).is_file():
            carry_over(log, out, work.path)
    return dict(kept)


def _is_whole(old: Manifest, target: TargetEntry) -> bool:
    try:
        for entry in target.files:
            old.check_file(entry, hashes=True, what="file")
    except EngineFileError:
        return False
    return True


def _differences(old: Manifest, limits: Limits) -> str:
    had, asked = dataclasses.asdict(old.limits), plan_limits(limits)
    return ", ".join(
        f"{name} {had[name]}, asked for {asked[name]}" for name in asked if had[name] != asked[name]
    )
