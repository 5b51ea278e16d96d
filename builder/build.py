"""The build: one checkpoint in, one engine directory with a plan for each target out."""

from __future__ import annotations

import dataclasses
import pathlib
import time
from collections.abc import Sequence
from typing import Any

from ..runtime.errors import BuildError, EngineFileError, Error, InvalidArgumentError
from ..runtime.manifest import MANIFEST_NAME, Manifest, hash_entries, load_manifest
from ..runtime.manifest_entries import TargetEntry, TokenizerEntry
from .build_key import target_key
from .build_report import BuildReport, TargetReport, read_targets
from .checkpoint import Checkpoint, open_checkpoint
from .checkpoint.tokenizer_check import check_tokenizer_opens
from .compile import (
    Compiled,
    CompileRequest,
    Progress,
    clear_failure_logs,
    compile_targets,
    needed_bytes,
    no_progress,
)
from .engine_dir import Work, carry_over, describe_file, destination, replacing
from .engine_manifest import limits_entry, make_manifest, target_entry
from .limits import Limits, make_limits
from .precision import Precision
from .targets.registry import Target, check_target, choose_precision, find_targets


@dataclasses.dataclass(frozen=True)
class BuildPlan:
    """A build that was asked for, after every check that needs no work."""

    checkpoint: Checkpoint
    targets: tuple[Target, ...]
    recipe: Precision
    limits: Limits


def plan_build(
    checkpoint: str | pathlib.Path,
    targets: Sequence[str],
    *,
    precision: str = "auto",
    limits: dict[str, Any] | None = None,
) -> BuildPlan:
    """Open the checkpoint and check what is asked for; nothing is read but its config and headers.

    targets : names as --target takes them
    limits : arguments of make_limits; None values mean "not given"
    raises CheckpointError, InvalidArgumentError or UnsupportedError, before any work.
    """
    found = find_targets(targets)
    given = {name: value for name, value in (limits or {}).items() if value is not None}
    opened = open_checkpoint(checkpoint, given.get("max_seq_len"))
    check_tokenizer_opens(opened.tokenizer_files(), str(opened.path))
    made = make_limits(opened.spec.max_position_embeddings, **given)
    recipe = choose_precision(precision, opened.spec, found)
    for target in found:
        check_target(target, opened.spec, recipe)
    return BuildPlan(opened, tuple(found), recipe, made)


def needed_disk(plan: BuildPlan, out_dir: str | pathlib.Path) -> int:
    """Return about how many bytes of disk the build takes, if none of its targets is there already."""
    request = CompileRequest(plan.checkpoint, plan.recipe, plan.limits, None, pathlib.Path(out_dir))
    return needed_bytes(request, plan.targets)


def build_engine(
    plan: BuildPlan,
    out_dir: str | pathlib.Path,
    *,
    force: bool = False,
    keep_going: bool = False,
    workers: int | None = None,
    progress: Progress = no_progress,
) -> BuildReport:
    """Build the targets that are missing or out of date, and return how it went.

    out_dir : a new or empty directory, or an engine, which gets the targets in addition
    force : compile all targets again, and replace an engine of another checkpoint or precision
    keep_going : when a target fails, still write those that succeed; without it out_dir stays as it was
    workers : compilers side by side; None = as many as cores and memory allow
    raises BuildError when a target fails (after the others are written, with keep_going), and what
        engine_dir.replacing raises.
    """
    start = time.monotonic()
    out = destination(pathlib.Path(out_dir))
    progress("checkpoint", "hashing", 0, 0)
    fingerprint = plan.checkpoint.fingerprint()
    keys = {
        t.name: target_key(t, fingerprint, plan.checkpoint.spec, plan.recipe, plan.limits)
        for t in plan.targets
    }
    failures: dict[str, Error] = {}
    with replacing(out) as work:
        clear_failure_logs(out)
        old = _old_manifest(out, plan, fingerprint, force)
        kept, lost = _reusable(old, plan, keys, force)
        tokenizer = _write_tokenizer(plan.checkpoint, work.path)
        todo = [t for t in plan.targets if t.name not in kept]
        reports = {name: one for name, one in read_targets(out).items() if name in kept}
        if old is not None and not todo and not lost and tokenizer == old.tokenizer:
            work.keep_old()
            return _report(plan, out, start, reports, kept)
        entries = _carry(kept, out, work)
        request = CompileRequest(plan.checkpoint, plan.recipe, plan.limits, workers, out)
        work.reserve(needed_bytes(request, todo) + sum(one.size for one in tokenizer.files))
        for target, result in compile_targets(request, todo, work.path, progress, keep_going):
            if isinstance(result, Error):
                failures[target.name] = result
            else:
                entries[target.name] = target_entry(target, plan, result, keys[target.name], work.path)
                reports[target.name] = _built(result, entries[target.name])
        if failures and not entries:
            raise _summary(failures)
        report = _report(plan, out, start, reports, kept)
        _finish(plan, fingerprint, work, tokenizer, entries, report)
    if failures:
        raise _summary(failures)
    return report


def _finish(
    plan: BuildPlan,
    fingerprint: str,
    work: Work,
    tokenizer: TokenizerEntry,
    entries: dict[str, TargetEntry],
    report: BuildReport,
) -> None:
    """Write the manifest and the report, targets in order of their names."""
    manifest = make_manifest(plan, fingerprint, tokenizer, dict(sorted(entries.items())))
    (work.path / MANIFEST_NAME).write_text(manifest.to_text(), encoding="utf-8")
    report.write(work.path)


def _old_manifest(out: pathlib.Path, plan: BuildPlan, fingerprint: str, force: bool) -> Manifest | None:
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
    if old.precision != plan.recipe.name:
        differing.append(f"precision (it has {old.precision}, asked for is {plan.recipe.name})")
    if differing and not force:
        raise InvalidArgumentError(
            f"{out} holds an engine of another {' and another '.join(differing)}; give another -o, or --force to "
            "replace it"
        )
    return None if differing else old


def _reusable(
    old: Manifest | None, plan: BuildPlan, keys: dict[str, str], force: bool
) -> tuple[dict[str, TargetEntry], bool]:
    """Return the old targets that stay, and whether others are lost.

    raises InvalidArgumentError when the limits differ and targets that are not asked for would be lost.
    """
    if old is None:
        return {}, False
    asked = {target.name for target in plan.targets}
    others = {name: entry for name, entry in old.targets.items() if name not in asked}
    if old.limits != limits_entry(plan.limits):
        if others and not force:
            raise InvalidArgumentError(
                f"{old.root} was built for other limits ({_differences(old, plan.limits)}) and holds "
                f"{', '.join(others)} besides; name all of them in --target to rebuild them, give another -o, or "
                "--force to drop them"
            )
        return {}, bool(others)
    same = {} if force else {name: old.targets[name] for name in asked & old.targets.keys()}
    fresh = {name: entry for name, entry in same.items() if entry.key == keys[name] and _is_whole(old, name)}
    kept = {name: entry for name, entry in others.items() if _is_whole(old, name)}
    return {**kept, **fresh}, len(kept) < len(others)


def _is_whole(old: Manifest, name: str) -> bool:
    try:
        for entry in old.targets[name].files:
            old.check_file(entry, hashes=True, what="file")
    except EngineFileError:
        return False
    return True


def _differences(old: Manifest, limits: Limits) -> str:
    had, asked = dataclasses.asdict(old.limits), dataclasses.asdict(limits_entry(limits))
    return ", ".join(
        f"{name} {had[name]}, asked for {asked[name]}" for name in had if had[name] != asked[name]
    )


def _write_tokenizer(checkpoint: Checkpoint, work: pathlib.Path) -> TokenizerEntry:
    folder = work / "tokenizer"
    folder.mkdir()
    entries = []
    for name, content in sorted(checkpoint.tokenizer_files().items()):
        data = content if isinstance(content, bytes) else content.read_bytes()
        (folder / name).write_bytes(data)
        entries.append(describe_file(work, folder / name))
    return TokenizerEntry(files=tuple(entries), sha256=hash_entries(entries))


def _carry(kept: dict[str, TargetEntry], out: pathlib.Path, work: Work) -> dict[str, TargetEntry]:
    for name, target in kept.items():
        for entry in target.files:
            carry_over(entry.path, out, work.path)
        log = f"targets/{name}/build.log"
        if (out / log).is_file():
            carry_over(log, out, work.path)
    return dict(kept)


def _built(result: Compiled, entry: TargetEntry) -> TargetReport:
    return TargetReport(
        status="built",
        compiler=entry.compiler,
        compiler_version=entry.compiler_version,
        seconds=entry.seconds,
        peak_rss_bytes=result.peak_rss_bytes,
        plan_bytes=sum(file.size for file in entry.files),
        weight_bytes=result.weight_bytes,
        warnings=result.warnings,
        log_tail=result.log_tail,
    )


def _report(
    plan: BuildPlan,
    out: pathlib.Path,
    start: float,
    reports: dict[str, TargetReport],
    kept: dict[str, TargetEntry],
) -> BuildReport:
    marked = {
        name: dataclasses.replace(one, status="kept") if name in kept else one
        for name, one in reports.items()
    }
    return BuildReport(
        engine_dir=str(out),
        checkpoint=str(plan.checkpoint.path),
        precision=plan.recipe.name,
        limits=dataclasses.asdict(plan.limits),
        seconds=round(time.monotonic() - start, 3),
        targets=dict(sorted(marked.items())),
    )


def _summary(failures: dict[str, Error]) -> BuildError:
    lines = [line for error in failures.values() if isinstance(error, BuildError) for line in error.log_lines]
    text = "; ".join(f"{name}: {error}" for name, error in failures.items())
    return BuildError(f"{len(failures)} target{'s' * (len(failures) > 1)} failed: {text}", lines)
