"""The build: one checkpoint in, one engine directory with a plan for each target out."""

from __future__ import annotations

import dataclasses
import pathlib
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from ..runtime.errors import BuildError, Error, InvalidArgumentError, UnsupportedError
from ..runtime.manifest import MANIFEST_NAME, Manifest, hash_entries
from ..runtime.manifest_entries import TargetEntry, TokenizerEntry
from .build_key import inputs_key, target_inputs
from .build_report import BuildReport, TargetReport, read_targets
from .checkpoint import Checkpoint, open_checkpoint
from .checkpoint.tokenizer_check import check_tokenizer_opens
from .compile import (
    Compiled,
    CompileRequest,
    clear_failure_logs,
    compile_targets,
    needed_bytes,
)
from .device_kernels import DeviceKernels, without_kernels
from .engine_dir import Work, check_room, check_source_stays, describe_file, destination, replacing
from .engine_manifest import limits_entry, make_manifest, target_entry
from .limits import Limits, make_limits
from .precision import Precision, draft_precision
from .progress import Progress, no_progress
from .reuse import carry, join, old_manifest, reusable
from .side_by_side import SideBySide
from .targets.registry import (
    CPU,
    Target,
    check_target,
    choose_precision,
    find_targets,
    recipe_for,
    with_kv_cache,
)

Todo = tuple[tuple[CompileRequest, tuple[Target, ...]], ...]
Judge = Callable[["BuildPlan", pathlib.Path | None], dict[str, Any]]
"""Takes what is built and its cpu plan, None where it has none, and returns an evaluation as JSON values."""


@dataclasses.dataclass(frozen=True)
class BuildPlan:
    """A build that was asked for, after every check that needs no work.

    draft : the recipe of what drafts for the targets; None = nothing does
    keep_draft : instead, whatever the directory has
    weight_streaming : weights of the GPU plans may stay in host memory
    refused : targets that were asked for and cannot be built, of a build that keeps going; why
    """

    checkpoint: Checkpoint
    targets: tuple[Target, ...]
    recipe: Precision
    limits: Limits
    draft: Precision | None = None
    keep_draft: bool = False
    weight_streaming: bool = False
    refused: Mapping[str, Error] = dataclasses.field(default_factory=dict)

    def requests(
        self, out: pathlib.Path, workers: int | None = None, side_by_side: SideBySide | None = None
    ) -> list[CompileRequest]:
        """Return what the compilers get: the targets' request, and their drafts'."""
        request = CompileRequest(
            self.checkpoint,
            self.recipe,
            self.limits,
            workers,
            out,
            weight_streaming=self.weight_streaming,
            side_by_side=side_by_side,
        )
        if self.draft is None:
            return [request]
        return [request, dataclasses.replace(request, recipe=self.draft, is_draft=True)]


def plan_build(
    checkpoint: str | pathlib.Path,
    targets: Sequence[str],
    *,
    precision: str = "auto",
    kv_cache_dtype: str = "auto",
    limits: dict[str, Any] | None = None,
    draft: str | None = None,
    tokenizer: str | pathlib.Path | None = None,
    weight_streaming: bool = False,
    group_size: int | None = None,
    keep_going: bool = False,
) -> BuildPlan:
    """Open the checkpoint and check what is asked for; nothing is read but its config and headers.

    targets : names as --target takes them
    kv_cache_dtype : of KV_CACHE_DTYPES; "auto" is the checkpoint's own where that is quantized, else float16 on cpu
        beside weights of at most 16 bits, and the type of the activations everywhere else
    limits : arguments of make_limits; None values mean "not given"
    draft : precision of a second plan that drafts for the first (speculation loses nothing by it); "none" = without;
        None = as the directory has it
    tokenizer : where the tokenizer is, if not in the checkpoint, see open_checkpoint
    weight_streaming : weights of the GPU plans that do not fit there stay in host memory and come over in every step
    group_size : int8 and int4 alone: the most columns that share a scale; None = each target's own
    keep_going : plan without the targets that cannot be built, where others can; build_engine raises why in the end
    raises CheckpointError, InvalidArgumentError or UnsupportedError, before any work.
    """
    found = find_targets(targets)
    if weight_streaming and all(target.compiler == CPU for target in found):
        raise InvalidArgumentError(
            "--weight-streaming is for plans of GPUs, and none is among the targets; leave it out, or name one in "
            "--target"
        )
    given = {name: value for name, value in (limits or {}).items() if value is not None}
    opened = open_checkpoint(checkpoint, given.get("max_seq_len"), tokenizer)
    check_tokenizer_opens(opened.tokenizer_files(), str(opened.path))
    made = make_limits(opened.spec.max_position_embeddings, **given)
    recipe = choose_precision(precision, opened, found).in_groups(group_size)
    recipe = with_kv_cache(recipe, kv_cache_dtype, opened, found)
    draft_recipe = None if draft is None else draft_precision(draft, recipe)
    if draft_recipe is not None and made.max_num_tokens < 2:
        raise InvalidArgumentError(
            f"--max_num_tokens is {made.max_num_tokens}, and a step that verifies a draft's tokens holds at least 2; "
            "raise it, or leave --draft out"
        )
    refused: dict[str, Error] = {}
    for target in found:
        try:
            check_target(target, opened.spec, recipe)
            if draft_recipe is not None:
                check_target(target, opened.spec, draft_recipe)
        except UnsupportedError as error:
            refused[target.name] = error
            if not keep_going or len(refused) == len(found):
                raise
    left = tuple(target for target in found if target.name not in refused)
    return BuildPlan(opened, left, recipe, made, draft_recipe, draft is None, weight_streaming, refused)


def check_build(
    plan: BuildPlan, out_dir: str | pathlib.Path, *, force: bool = False, progress: Progress = no_progress
) -> tuple[BuildPlan, int]:
    """Return the plan with the draft that it gets, and about how many bytes of disk its build takes.

    Writes nothing, and reads the checkpoint's contents only where an engine is there to be compared with them.
    raises whatever build_engine raises before it compiles
    """
    out = _checked_destination(plan, out_dir)
    is_there = (out / MANIFEST_NAME).is_file()
    fingerprint = _fingerprint(plan, progress) if is_there else ""
    found = _compared(plan, out, fingerprint, force=force)
    needed = found.needed_bytes()
    check_room(out, needed)
    return found.plan, needed


def build_engine(
    plan: BuildPlan,
    out_dir: str | pathlib.Path,
    *,
    force: bool = False,
    keep_going: bool = False,
    workers: int | None = None,
    progress: Progress = no_progress,
    judge: Judge | None = None,
    side_by_side: SideBySide | None = None,
) -> BuildReport:
    """Build the targets that are missing or out of date, and return how it went.

    out_dir : a new or empty directory, or an engine, which gets the targets in addition
    force : compile all targets again, and replace an engine of another checkpoint or precision
    keep_going : when a target fails, still write those that succeed; without it out_dir stays as it was
    workers : compilers side by side; None = as many as cores and memory allow
    judge : says what the engine's precision costs, before anything is written; its errors fail the build
    side_by_side : what this build shares with others that run in this process
    raises BuildError when a target fails (after the others are written, with keep_going), and what
        engine_dir.replacing raises.
    """
    start = time.monotonic()
    out = _checked_destination(plan, out_dir)
    fingerprint = _fingerprint(plan, progress)
    failures: dict[str, Error] = dict(plan.refused)
    with replacing(out) as work:
        clear_failure_logs(out)
        found = _compared(plan, out, fingerprint, force=force, workers=workers, side_by_side=side_by_side)
        plan, keys, kept = found.plan, found.keys, found.kept
        tokenizer = _write_tokenizer(plan.checkpoint, work.path)
        reports = {name: one for name, one in read_targets(out).items() if name in kept}
        kernels = DeviceKernels(plan.targets)
        outdated = kernels.outdated(kept, out)
        if judge is None and not outdated and found.is_same(tokenizer):
            work.keep_old()
            if failures:
                raise _summary(failures)
            return _report(plan, out, start, reports, kept)
        carried = {name: without_kernels(one) if name in outdated else one for name, one in kept.items()}
        entries = carry(carried, out, work)
        work.reserve(found.needed_bytes())
        compiled = _compile(found.todo, failures, work.path, progress, keep_going)
        if failures and not any("/" not in name for name in (*entries, *compiled)):
            raise _summary(failures)
        bare = [name for name, entry in entries.items() if not entry.kernel_files()]
        kernels.compile([*bare, *compiled], progress)
        if side_by_side is not None:
            side_by_side.compilers_ended()
        describe = describe_file if side_by_side is None else side_by_side.describe
        for name, (request, target, result) in compiled.items():
            inputs = _inputs(plan, request, target, fingerprint)
            entries[name] = target_entry(target, request, result, keys[name], work.path, inputs, describe)
            reports[name] = _built(result, entries[name], recipe_for(target, request.recipe).weight_groups)
        entries, notes = kernels.add(entries, work.path)
        reports = {name: _noted(one, name, plan, notes) for name, one in reports.items()}
        evaluation = None
        if judge is not None:
            cpu = entries.get(CPU)
            evaluation = judge(plan, None if cpu is None else work.path / cpu.files[0].path)
        report = dataclasses.replace(_report(plan, out, start, reports, kept), evaluation=evaluation)
        _finish(plan, fingerprint, work, tokenizer, entries, report)
    if failures:
        raise _summary(failures)
    return report


def _compile(
    todo: Todo,
    failures: dict[str, Error],
    work: pathlib.Path,
    progress: Progress,
    keep_going: bool,
) -> dict[str, tuple[CompileRequest, Target, Compiled]]:
    """Compile what is to be done, and return it by its piece name; what fails is added to the failures."""
    compiled = {}
    for request, targets in todo:
        wanted = [target for target in targets if target.name not in failures]  # no draft without its target
        for target, result in compile_targets(request, wanted, work, progress, keep_going):
            if isinstance(result, Error):
                failures[request.label(target)] = result
            else:
                compiled[request.label(target)] = request, target, result
    return compiled


@dataclasses.dataclass(frozen=True)
class _Compared:
    """A plan beside what its destination holds.

    plan : with the directory's own draft, unless another was asked for
    old : what is there; None = nothing of this model and precision
    keys : of every plan to be made, by its piece name
    kept, lost : of the plans that are there, see reuse.reusable
    todo : what the compilers get, and of which targets
    """

    plan: BuildPlan
    old: Manifest | None
    keys: dict[str, str]
    kept: dict[str, TargetEntry]
    lost: bool
    todo: Todo

    def needed_bytes(self) -> int:
        """Return about how much disk the build takes."""
        plans = sum(needed_bytes(one, targets) for one, targets in self.todo if targets)
        tokenizer = self.plan.checkpoint.tokenizer_files().values()
        return plans + sum(len(one) if isinstance(one, bytes) else one.stat().st_size for one in tokenizer)

    def is_same(self, tokenizer: TokenizerEntry) -> bool:
        """Whether the build would write the engine that is there already."""
        if self.old is None or self.lost or not self.keys.keys() <= self.kept.keys():
            return False
        return tokenizer == self.old.tokenizer and self.old.limits == limits_entry(self.plan.limits)


def _compared(
    plan: BuildPlan,
    out: pathlib.Path,
    fingerprint: str,
    *,
    force: bool,
    workers: int | None = None,
    side_by_side: SideBySide | None = None,
) -> _Compared:
    """Return what is to be done at a destination; raises what old_manifest and reusable raise."""
    old = old_manifest(out, fingerprint, plan.recipe, force=force)
    plan = _settle_draft(plan, old)
    requests = plan.requests(out, workers, side_by_side)
    keys = _keys(plan, requests, fingerprint)
    kept, lost = reusable(old, keys, plan.limits, plan.draft, force=force)
    todo = tuple((one, tuple(t for t in plan.targets if one.label(t) not in kept)) for one in requests)
    return _Compared(plan, old, keys, kept, lost, todo)


def _checked_destination(plan: BuildPlan, out_dir: str | pathlib.Path) -> pathlib.Path:
    """Return out_dir as `destination` does, once the checkpoint is known not to lie in it."""
    out = destination(pathlib.Path(out_dir))
    check_source_stays(plan.checkpoint.path, out)
    return out


def _fingerprint(plan: BuildPlan, progress: Progress) -> str:
    progress("checkpoint", "hashing", 0, 0)
    return plan.checkpoint.fingerprint()


def _settle_draft(plan: BuildPlan, old: Manifest | None) -> BuildPlan:
    """Return the plan with the directory's own draft, unless another was asked for."""
    if not plan.keep_draft or old is None or old.draft is None:
        return plan
    return dataclasses.replace(plan, draft=draft_precision(old.draft.precision, plan.recipe))


def _keys(plan: BuildPlan, requests: Sequence[CompileRequest], fingerprint: str) -> dict[str, str]:
    """Return the key of every plan to be made, by its piece name."""
    return {
        request.label(target): inputs_key(_inputs(plan, request, target, fingerprint))
        for request in requests
        for target in plan.targets
    }


def _inputs(plan: BuildPlan, request: CompileRequest, target: Target, fingerprint: str) -> dict[str, str]:
    """Return what the key of a plan is made of."""
    spec, streams = plan.checkpoint.spec, request.streams(target)
    return target_inputs(target, fingerprint, spec, request.recipe, plan.limits, streams)


def _finish(
    plan: BuildPlan,
    fingerprint: str,
    work: Work,
    tokenizer: TokenizerEntry,
    entries: dict[str, TargetEntry],
    report: BuildReport,
) -> None:
    """Write the manifest and the report, targets in order of their names."""
    targets, draft = join(entries, plan.draft)
    manifest = make_manifest(plan, fingerprint, tokenizer, targets, draft)
    (work.path / MANIFEST_NAME).write_text(manifest.to_text(), encoding="utf-8")
    report.write(work.path)


def _write_tokenizer(checkpoint: Checkpoint, work: pathlib.Path) -> TokenizerEntry:
    folder = work / "tokenizer"
    folder.mkdir()
    entries = []
    for name, content in sorted(checkpoint.tokenizer_files().items()):
        data = content if isinstance(content, bytes) else content.read_bytes()
        (folder / name).write_bytes(data)
        entries.append(describe_file(work, folder / name))
    return TokenizerEntry(files=tuple(entries), sha256=hash_entries(entries))


def _built(result: Compiled, entry: TargetEntry, weight_groups: str) -> TargetReport:
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
        group_size=weight_groups,
        kv_dtype=entry.kv_dtype,
    )


def _noted(
    report: TargetReport, name: str, plan: BuildPlan, notes: dict[str, tuple[str, ...]]
) -> TargetReport:
    """Return a report with this build's notes; those of targets that were not asked for stay."""
    asked = any(name == target.name for target in plan.targets)
    return dataclasses.replace(report, notes=notes.get(name, ())) if asked else report


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
        draft=None if plan.draft is None else plan.draft.name,
    )


def _summary(failures: dict[str, Error]) -> BuildError:
    lines = [line for error in failures.values() if isinstance(error, BuildError) for line in error.log_lines]
    text = "; ".join(f"{name}: {error}" for name, error in failures.items())
    return BuildError(f"{len(failures)} target{'s' * (len(failures) > 1)} failed: {text}", lines)
