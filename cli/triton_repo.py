"""`plansmith triton-repo`: a Triton model repository for an engine."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ..runtime.errors import InvalidArgumentError
from ._output import print_json

if TYPE_CHECKING:
    from ..serving.repository.carry import Carried
    from ..serving.repository.plan import Overrides, RepositoryPlan

_WIDEST = 10_000  # characters
_LOGITS = {"float32": "TYPE_FP32", "float16": "TYPE_FP16"}


def triton_repo(
    engine_dir: Annotated[
        Path | None,
        typer.Argument(metavar="ENGINE_DIR", help="An engine directory, made by plansmith build."),
    ] = None,
    out_dir: Annotated[
        Path | None, typer.Option("-o", "--output", metavar="REPO", help="Where the repository goes.")
    ] = None,
    old: Annotated[
        Path | None,
        typer.Option(
            "--from",
            metavar="OLD_REPO",
            help="Take over the settings of a repository of TensorRT-LLM, filled or not, or of one made here.",
        ),
    ] = None,
    settings: Annotated[
        list[str] | None,
        typer.Option(
            "--set", metavar="MODEL.KEY=VALUE", help="A parameter; without MODEL. one of tensorrt_llm."
        ),
    ] = None,
    list_parameters: Annotated[
        bool, typer.Option("--list-parameters", help="Show the parameters of tensorrt_llm and stop.")
    ] = False,
    target: Annotated[
        str | None, typer.Option("--target", help="Of the engine directory; default: cpu.")
    ] = None,
    max_batch_size: Annotated[
        int | None,
        typer.Option(
            "--max-batch-size",
            min=1,
            max=1 << 20,
            help="Most rows of one request; default: the engine's limit.",
        ),
    ] = None,
    decoupled: Annotated[
        bool | None,
        typer.Option(
            "--decoupled/--no-decoupled",
            help="Requests may stream, or have several rows; the default.",
        ),
    ] = None,
    max_queue_size: Annotated[
        int | None, typer.Option("--max-queue-size", min=0, help="Requests waiting in the engine; 0 = 1024.")
    ] = None,
    logits_dtype: Annotated[
        str | None,
        typer.Option("--logits-dtype", help="Of logits on the wire: float32, the default, or float16."),
    ] = None,
    preprocessing_instances: Annotated[
        int | None,
        typer.Option(
            "--preprocessing-instances", min=1, max=256, help="Processes of preprocessing; default: 1."
        ),
    ] = None,
    postprocessing_instances: Annotated[
        int | None,
        typer.Option(
            "--postprocessing-instances", min=1, max=256, help="Processes of postprocessing; default: 1."
        ),
    ] = None,
    bls_instances: Annotated[
        int | None,
        typer.Option("--bls-instances", min=1, max=256, help="Processes of tensorrt_llm_bls; default: 1."),
    ] = None,
    tokenizer_dir: Annotated[
        Path | None, typer.Option("--tokenizer-dir", help="Instead of the engine's own tokenizer.")
    ] = None,
    relative: Annotated[
        bool, typer.Option("--relative/--absolute", help="Write paths relative to the repository.")
    ] = False,
    force: Annotated[
        bool, typer.Option("--force", help="Replace a repository that was made elsewhere, or changed since.")
    ] = False,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print one JSON object instead of text for people.")
    ] = False,
) -> None:
    """Write a Triton model repository for an engine: five models under the names that clients of TensorRT-LLM know."""
    if list_parameters:
        _list_parameters(as_json)
        return
    if engine_dir is None or out_dir is None:
        raise typer.BadParameter("give an engine directory and -o REPO")
    from ..serving.repository.plan import make_plan
    from ..serving.repository.write import check_destination, write_repository

    numbers = {
        "triton_max_batch_size": max_batch_size,
        "max_queue_size": max_queue_size,
        "preprocessing_instance_count": preprocessing_instances,
        "postprocessing_instance_count": postprocessing_instances,
        "bls_instance_count": bls_instances,
    }
    own = _overrides(settings or [], numbers, target, decoupled, logits_dtype)
    force = force or (old is not None and _same(old, out_dir))
    check_destination(out_dir, engine_dir, force=force)
    carried = _carry(old, engine_dir, own, tokenizer_dir)
    both = own if carried is None else own.over(carried.overrides)
    plan = make_plan(engine_dir, out_dir, both, tokenizer_dir=tokenizer_dir, relative=relative)
    notes = _check(plan, out_dir)
    files = write_repository(plan, out_dir, force=force)
    _report(plan, out_dir, files, notes, carried, as_json)


def _overrides(
    settings: list[str],
    numbers: Mapping[str, int | None],
    target: str | None,
    decoupled: bool | None,
    logits_dtype: str | None,
) -> Overrides:
    """Return what the command line says."""
    from ..serving.repository.plan import Overrides, read_assignments

    own = Overrides(parameters=read_assignments(settings))
    own.variables.update({name: str(value) for name, value in numbers.items() if value is not None})
    if target is not None:
        own.parameters["tensorrt_llm", "target"] = target
    if decoupled is not None:
        own.variables["decoupled_mode"] = "true" if decoupled else "false"
    if logits_dtype is not None:
        own.variables["logits_datatype"] = _logits(logits_dtype)
    return own


def _logits(name: str) -> str:
    if name not in _LOGITS:
        raise InvalidArgumentError(f"--logits-dtype is {name!r}, it must be one of {', '.join(_LOGITS)}")
    return _LOGITS[name]


def _same(old: Path, out_dir: Path) -> bool:
    """Return whether a repository of ours is renewed in its place: what was changed by hand is read before."""
    from ..serving.repository.write import MARKER

    return (out_dir / MARKER).is_file() and old.resolve() == out_dir.resolve()


def _carry(old: Path | None, engine_dir: Path, own: Overrides, tokenizer_dir: Path | None) -> Carried | None:
    if old is None:
        return None
    from ..serving.repository.carry import carry_over
    from ..serving.repository.old_repository import read_repository

    return carry_over(read_repository(old), engine_dir, own, keep_tokenizer=tokenizer_dir is None)


def _check(plan: RepositoryPlan, out_dir: Path) -> list[str]:
    """Return notes on parameters without effect, after checking all that the model will before it opens the engine."""
    from ..serving.triton.parameters import read_parameters

    settings, notes = read_parameters(plan.parameters("tensorrt_llm"), out_dir.resolve())
    settings.check()
    return notes


def _report(
    plan: RepositoryPlan,
    out_dir: Path,
    files: list[str],
    notes: list[str],
    carried: Carried | None,
    as_json: bool,
) -> None:
    if as_json:
        content: dict[str, Any] = {
            "repository": str(out_dir),
            "engine_dir": str(plan.engine_dir),
            "models": dict(plan.names),
            "files": files,
            "notes": notes,
        }
        if carried is not None:
            content["carried"] = [row.to_json() for row in carried.rows]
            content["unfilled_variables"] = len(carried.unfilled)
            content["unfilled"] = carried.unfilled
        print_json(content)
        return
    if carried is not None:
        _print_rows(carried)
    for note in notes:
        print(f"note: {note}", file=sys.stderr)
    print(f"{out_dir}: {', '.join(plan.names.values())}, for the engine {plan.engine_dir}")
    print(f"serve it with: plansmith triton start {out_dir}{_server_hint()}")


def _server_hint() -> str:
    """Return what to add where the running environment has no tritonserver; "" where `start` would find one."""
    from ..serving.supervisor.install import ENVIRONMENT_VARIABLE, has_server

    if has_server():
        return ""
    return f" --triton-env DIR (the environment that has tritonserver; or set {ENVIRONMENT_VARIABLE})"


def _print_rows(carried: Carried) -> None:
    """Print what became of the older repository's settings, a line each, those that are as they were first."""
    lines: list[str] = []
    for model in dict.fromkeys(row.model for row in carried.rows):
        rows = [row for row in carried.rows if row.model == model]
        same = [f"{row.key} = {row.new}" for row in rows if row.state == "carried"]
        lines.append(f"{model}:" + (f" carried {', '.join(same)}" if same else ""))
        for row in rows:
            if row.state == "changed":
                lines.append(f"  changed {row.key}: {row.old} -> {row.new} ({row.why})")
            elif row.state == "not carried":
                lines.append(f"  not carried {row.key}{f' = {row.old}' if row.old else ''}: {row.why}")
    for line in lines:  # an older file may hold anything, a terminal's controls too
        print("".join(c if c.isprintable() else "\N{REPLACEMENT CHARACTER}" for c in line))
    if carried.unfilled:
        print(
            f"{len(carried.unfilled)} variables of its templates were not filled; they have their defaults:"
        )
        for model in dict.fromkeys(name.partition(".")[0] for name in carried.unfilled):
            keys = [name.partition(".")[2] for name in carried.unfilled if name.startswith(f"{model}.")]
            print(f"  {model}: {', '.join(keys)}")


def _list_parameters(as_json: bool) -> None:
    from ..serving.repository.plan import all_parameters

    if as_json:
        print_json(all_parameters())
        return
    from rich.console import Console
    from rich.table import Table

    table = Table(title="parameters of tensorrt_llm", title_justify="left")
    for column in ("key", "default", "becomes", "meaning"):
        table.add_column(column, overflow="fold")
    for row in all_parameters():
        table.add_row(*row.values())
    console = Console(markup=False)
    if not console.is_terminal:  # a file or a pipe gets a line a parameter
        console.width = console.measure(table, options=console.options.update(max_width=_WIDEST)).maximum
    console.print(table)
