"""`plansmith fleet plan`, `status` and `matrix`: what there is to build, what is stale and why, and jobs for CI."""

from __future__ import annotations

import enum
import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ._files import check_output
from ._fleet import FILE, AsJson, File, Only, Rehash, Shard, open_records, read_units, store_places
from ._output import print_json, size_text
from ._stores import Remote, StoreFolder

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ..fleet.matrix import Job
    from ..fleet.plan import Step
    from ..fleet.status import FleetStatus


class Format(str, enum.Enum):
    """A CI system."""

    GITHUB = "github"
    GITLAB = "gitlab"


def plan(
    file: File = FILE,
    only: Only = None,
    shard: Shard = None,
    store: StoreFolder = None,
    remote: Remote = None,
    rehash: Rehash = False,
    as_json: AsJson = False,
) -> None:
    """Show what a build of the fleet would do: of every unit whether, where and why.

    Nothing is compiled, and no weights are read of a checkpoint that was hashed before; those of one with a revision
    need not be here. What the remote store has is not built again.
    """
    from ..fleet.plan import plan_fleet, summary

    fleet, units = read_units(file, only, shard, rehash, store, remote)
    steps = plan_fleet(fleet, units, open_records(fleet, store, remote, shared=False))
    counts = summary(steps)
    if as_json:
        print_json(
            {
                "fleet": fleet.name,
                "store": str(store_places(fleet, store, remote).folder),
                "units": [step.to_json() for step in steps],
                "summary": counts,
            }
        )
        return
    _print_steps(steps)
    gates = f"; {counts['gates']} gate{'s' * (counts['gates'] > 1)} to measure" if counts["gates"] else ""
    print(
        f"{fleet.name}: {len(steps)} unit{'s' * (len(steps) != 1)}, {counts['kept']} in the store, to build: "
        f"{counts['here']} here, {counts['runner']} on a runner; {counts['nowhere']} cannot be built{gates}"
    )
    for step in steps:
        if step.action == "none":
            print(f"{step.unit.name}: {_next_step(step)}")
    for line in _to_fetch(steps):
        print(line)


def status(
    file: File = FILE,
    only: Only = None,
    store: StoreFolder = None,
    remote: Remote = None,
    rehash: Rehash = False,
    as_json: AsJson = False,
) -> int:
    """Tell which members are what the file describes, and which input makes the others stale.

    The exit code is 0 when all of them are and every gate has passed, else 1. Of a fleet with a remote store that
    one counts, since it is what other machines get.
    """
    from ..fleet.status import status_of

    fleet, units = read_units(file, only, None, rehash, store, remote)
    found = status_of(fleet, units, open_records(fleet, store, remote, shared=True))
    if as_json:
        print_json(found.to_json())
    else:
        gc = "fleet gc" if store_places(fleet, store, remote).url is None else "fleet gc --of-remote"
        _print_status(found, gc if remote is None else f"{gc} --remote {remote}")
    return 0 if found.is_true else 1


def matrix(
    file: File = FILE,
    format_: Annotated[
        Format,
        typer.Option(
            "--format", help="github = what strategy.matrix takes; gitlab = a child pipeline, as JSON."
        ),
    ] = Format.GITHUB,
    all_units: Annotated[
        bool, typer.Option("--all", help="Also units that are in the store already.")
    ] = False,
    max_jobs: Annotated[
        int, typer.Option(min=1, help="At most so many jobs; units share them where there are more.")
    ] = 256,
    github_output: Annotated[
        Path | None,
        typer.Option(
            help='Also append any=true|false and matrix=... to this file: "$GITHUB_OUTPUT".',
            show_default=False,
        ),
    ] = None,
    include: Annotated[
        str | None,
        typer.Option(
            help="Of gitlab: a file of the repository with the hidden job .plansmith, which all jobs extend.",
            show_default=False,
        ),
    ] = None,
    only: Only = None,
    store: StoreFolder = None,
    remote: Remote = None,
    rehash: Rehash = False,
) -> None:
    """Print the units that have to be built as jobs, one a unit, for a CI system to fan out.

    A fleet that is current gives an empty matrix, or a pipeline that only says so. Of a fleet with a remote store
    that one counts, and GitLab's jobs push to it.
    """
    from ..fleet.matrix import github_matrix, github_outputs, gitlab_pipeline, jobs_of
    from ..fleet.plan import plan_fleet

    if github_output is not None:
        check_output("--github-output", github_output)
    fleet, units = read_units(file, only, None, rehash, store, remote)
    steps = plan_fleet(fleet, units, open_records(fleet, store, remote, shared=True))
    jobs: Sequence[Job] = jobs_of(steps, all_units=all_units, max_jobs=max_jobs)
    if github_output is not None:
        with github_output.open("a", encoding="utf-8") as out:
            out.write(github_outputs(jobs))
    if format_ is Format.GITHUB:
        print(json.dumps(github_matrix(jobs)))  # one line, as a shell takes it
    else:
        url = store_places(fleet, store, remote).url
        # A job that lands on a machine without its GPU has to fail.
        options = ["--complete", *([] if url is None else ["--push", "--no-assemble"])]
        options += [] if remote is None else ["--remote", remote]
        print_json(gitlab_pipeline(jobs, str(file), include, options=options))


def _print_steps(steps: Sequence[Step]) -> None:
    rows = [
        (
            step.unit.name,
            ", ".join(sku.name for sku in step.unit.skus),
            step.action,
            "" if step.action == "keep" else _where(step),
            size_text(step.unit.weight_bytes),
            size_text(step.peak_bytes) if step.peak_bytes else "",
            "; ".join(step.why),
        )
        for step in steps
    ]
    _print_rows(("unit", "for", "do", "where", "weights", "memory", "why"), rows)


def _print_rows(head: tuple[str, ...], rows: Sequence[tuple[str, ...]]) -> None:
    """Print columns without borders; the last is as wide as it likes, so that no reason is cut in a log."""
    table = [head, *rows]
    widths = [max(len(row[idx]) for row in table) for idx in range(len(head) - 1)]
    for row in table:
        cells = [cell.ljust(width) for cell, width in zip(row, widths, strict=False)]
        print("  ".join([*cells, row[-1]]).rstrip())


def _next_step(step: Step) -> str:
    """Say what to do about a unit that cannot be built."""
    buildable = step.unit.buildable
    if buildable.state == "refused":
        return buildable.why
    if buildable.state == "extra":
        return f"run: pip install '{buildable.needs}', or name a runner under runners"
    return (
        f"run `plansmith fleet build --only {step.unit.name}` on a machine with {buildable.needs}, or name a runner "
        f"under runners: {step.unit.target.sm[0]}: [labels]"
    )


def _to_fetch(steps: Sequence[Step]) -> list[str]:
    """Say which weights are not here that something here would be made of, each checkpoint once."""
    found: dict[str, str] = {}
    for step in steps:
        unit = step.unit
        if unit.missing_weights and step.action in ("build", "gate") and step.where == "here":
            found[str(unit.checkpoint.path)] = f"{unit.missing_weights}; its revision is {unit.fingerprint}"
    return [
        f"{path}: to be fetched before anything is built of it here ({why})" for path, why in found.items()
    ]


def _where(step: Step) -> str:
    if step.where == "here":
        return "here"
    needs = f"needs {step.needs}" if step.needs else ""
    return f"runner {', '.join(step.runner)} ({needs})" if step.where == "runner" else needs


def _print_status(found: FleetStatus, gc: str) -> None:
    rows = [(one.name, one.status, one.time, "; ".join(one.why)) for one in found.members]
    _print_rows(("member", "status", "built", "why"), rows)
    for gate in found.gates:
        verdict = {True: "passed", False: "failed", None: "not measured"}[gate.passed]
        print(f"gate of {gate.engine}: {verdict}{_bounds(gate.bounds)}")
    for name in found.orphans:
        print(f"orphan: {name} is in the store and not in the file; plansmith {gc} drops it")
    behind = sum(one.status != "current" for one in found.members)
    print(f"{found.fleet}: {len(found.members) - behind} of {len(found.members)} members are current")


def _bounds(bounds: Sequence[object]) -> str:
    told = [
        f"{one['metric']} is {one['got']:.4g}, wanted {one['compare']} {one['wanted']:g}"
        for one in bounds
        if isinstance(one, dict) and isinstance(one.get("got"), float)
    ]
    return f": {'; '.join(told)}" if told else ""
