"""What can be verified: the cpu plan of an engine directory, or one made of a checkpoint for the purpose."""

from __future__ import annotations

import contextlib
import dataclasses
import pathlib
from collections.abc import Iterator, Mapping
from typing import Any

from ..runtime.errors import EngineFileError, InvalidArgumentError
from ..runtime.file_kind import MISSING, no_file
from ..runtime.manifest import MANIFEST_NAME, Manifest, load_manifest
from .build import plan_build
from .checkpoint import Checkpoint, open_checkpoint
from .graph import build_graph
from .limits import Limits, make_limits
from .precision import Precision
from .scheme import KvFormat
from .scratch import scratch_directory
from .targets.registry import choose_precision, find_targets


@dataclasses.dataclass(frozen=True)
class Subject:
    """What is verified: a cpu plan of a checkpoint; recipe is what the plan holds, with its rounding of inputs."""

    checkpoint: Checkpoint
    recipe: Precision
    limits: Limits
    plan: pathlib.Path
    notes: tuple[str, ...] = ()


@contextlib.contextmanager
def open_subject(
    path: pathlib.Path,
    checkpoint: pathlib.Path | None = None,
    precision_name: str | None = None,
    tokenizer: pathlib.Path | None = None,
    limits: Mapping[str, Any] | None = None,
) -> Iterator[Subject]:
    """Give what is to be verified: an engine directory's cpu plan, or one made of a checkpoint for the purpose.

    checkpoint : of an engine, where it is not at its recorded place any more
    precision_name : of a checkpoint ("auto" when None); an engine has its own
    tokenizer : of a checkpoint that has none; an engine has its own
    limits : of a checkpoint, arguments of make_limits; an engine has its own
    raises EngineFileError, CheckpointError, or InvalidArgumentError when the two do not belong together.
    """
    if no_file(path / MANIFEST_NAME) != MISSING:  # what is there and no file, is told
        yield _engine_subject(path, checkpoint, precision_name)
        return
    if checkpoint is not None:
        raise InvalidArgumentError(
            f"--checkpoint goes with an engine directory, {path} has no {MANIFEST_NAME}; leave it out or give an engine"
        )
    plan = plan_build(
        path, ["cpu"], precision=precision_name or "auto", limits=dict(limits or {}), tokenizer=tokenizer
    )
    from .targets.cpu import compile_plan

    with scratch_directory("verify") as folder:
        file = folder / "model.plan"
        spec = plan.checkpoint.spec
        recipe = plan.recipe.on_cpu()
        model = build_graph(spec, plan.checkpoint.weights, recipe, plan.limits)
        compile_plan(model, spec, plan.limits, file)
        yield Subject(plan.checkpoint, recipe, plan.limits, file)


def tokenizer_for(checkpoint: pathlib.Path, engine: pathlib.Path) -> pathlib.Path | None:
    """Return the engine's tokenizer where its checkpoint has none beside it."""
    if checkpoint.is_dir() and not (checkpoint / "tokenizer.json").is_file():
        return engine / "tokenizer"
    return None


def recorded_limits(manifest: Manifest) -> dict[str, Any]:
    """Return an engine's limits as make_limits takes them."""
    return {field.name: getattr(manifest.limits, field.name) for field in dataclasses.fields(Limits)}


def open_recorded(path: pathlib.Path, manifest: Manifest, moved_to: pathlib.Path | None) -> Checkpoint:
    """Return the checkpoint that the engine at `path` was built from.

    moved_to : where it is now; None = at its recorded place
    raises InvalidArgumentError when there is none, or another
    """
    source = pathlib.Path(moved_to or manifest.checkpoint.path)
    if not source.exists():
        raise InvalidArgumentError(
            f"the checkpoint of {path} is not at {source} any more; say where it is with --checkpoint"
        )
    opened = open_checkpoint(source, manifest.limits.max_seq_len, tokenizer_for(source, path))
    if opened.fingerprint() != manifest.checkpoint.fingerprint:
        raise InvalidArgumentError(
            f"{source} is not the checkpoint that {path} was built from (fingerprint {opened.fingerprint()[:12]}, "
            f"recorded {manifest.checkpoint.fingerprint[:12]}); give the right one with --checkpoint or build again"
        )
    return opened


def _engine_subject(
    path: pathlib.Path, checkpoint: pathlib.Path | None, precision_name: str | None
) -> Subject:
    manifest = load_manifest(path)
    manifest.check_files(hashes=True)
    if precision_name not in (None, "auto", manifest.precision):
        raise InvalidArgumentError(
            f"--precision {precision_name} is asked for, {path} has {manifest.precision}; leave --precision out, or "
            "verify the checkpoint itself"
        )
    if "cpu" not in manifest.targets:
        raise EngineFileError(
            f"the files of {path} are whole (sha256); logits are compared of the cpu target, which it does not have; "
            f"add it with: {manifest.build_command('cpu')}"
        )
    opened = open_recorded(path, manifest, checkpoint)
    notes = [
        f"target {name}: "
        + (
            f"files whole (sha256); its plan was not run, it needs a GPU that is {' or '.join(target.sm)}"
            if target.sm
            else "files whole (sha256); its plan was run and its logits compared"
        )
        for name, target in manifest.targets.items()
    ]
    recipe = choose_precision(manifest.precision, opened, find_targets(["cpu"]))
    return Subject(
        opened,
        _as_built(recipe.in_groups(manifest.targets["cpu"].group_size), manifest),
        make_limits(opened.spec.max_position_embeddings, **recorded_limits(manifest)),
        manifest.plan_path("cpu"),
        tuple(notes),
    )


def _as_built(recipe: Precision, manifest: Manifest) -> Precision:
    """Return the recipe as the engine's cpu target runs it: what its KV pools hold is the manifest's."""
    held: dict[str, KvFormat] = {"float32": "float", "float16": "float16"}
    return dataclasses.replace(recipe, kv_format=held.get(manifest.target("cpu").kv_dtype)).on_cpu()
