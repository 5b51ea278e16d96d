"""`plansmith fleet build`: what the store lacks is compiled, and engines are assembled."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from ._fleet import FILE, AsJson, File, Only, Rehash, Shard, read_units
from ._output import BuildProgress, print_json, size_text
from ._stores import Remote, SigningKey, StoreFolder, open_stores

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from ..fleet.report import FleetReport, UnitResult
    from ..fleet.units import Unit


def build(
    file: File = FILE,
    only: Only = None,
    shard: Shard = None,
    memory: Annotated[
        str | None,
        typer.Option(
            help="What all compilers together may take, e.g. 16GiB. Default: nine tenths of what is available."
        ),
    ] = None,
    workers: Annotated[
        int | None, typer.Option(min=1, help="Units side by side. Default: one a core.")
    ] = None,
    push: Annotated[
        bool, typer.Option("--push", help="Bring every unit to the remote store as soon as it is built.")
    ] = False,
    assemble: Annotated[
        bool,
        typer.Option("--assemble/--no-assemble", help="Make the engine directories of what is in the store."),
    ] = True,
    complete: Annotated[
        bool,
        typer.Option(
            "--complete",
            help="Fail also where a unit needs another machine: for a CI job that is to build it.",
        ),
    ] = False,
    store: StoreFolder = None,
    remote: Remote = None,
    sign_key: SigningKey = None,
    rehash: Rehash = False,
    as_json: AsJson = False,
) -> int:
    """Compile every unit that no store has, side by side, and assemble the engines.

    What is interrupted or killed goes on where it ended when it is run again. A unit that fails does not stop the
    others. The exit code is 1 where one failed or cannot be compiled anywhere, else 0; units that need another
    machine's GPU are told, and left to it, unless --complete makes them failures.
    """
    from ..builder.checkpoint.hash_cache import HashCache
    from ..fleet.budget import make_budget
    from ..fleet.build import BuildOptions, build_fleet

    budget = make_budget(memory, workers)
    fleet, units = read_units(file, only, shard, rehash, store, remote)
    others = _others(file, units, store, remote) if only and assemble else []
    stores = open_stores(fleet, store, remote, sign_key, create=True)
    shared = stores.shared() if push else stores.remote
    with BuildProgress(quiet=as_json) as progress:
        # A shard has parts of engines; whoever has all of them assembles.
        options = BuildOptions(budget, shared, push, assemble and shard is None, HashCache(), progress)
        report = build_fleet(fleet, units, stores.local, options, others)
    if as_json:
        print_json(report.to_json())
    else:
        _print_report(report)
    elsewhere = complete and any(unit.status == "elsewhere" for unit in report.units)
    return 1 if report.failures or elsewhere else 0


def _others(file: Path, units: Sequence[Unit], store: str | None, remote: str | None) -> list[Unit]:
    """Return the units of the same engines that are not asked for; checkpoints of others are not opened."""
    engines = {unit.engine.name: unit.engine for unit in units}
    only = [f"{one.model.name}/{one.recipe.name}/*" for one in engines.values()]
    _, everyone = read_units(file, only, None, False, store, remote)
    names = {unit.name for unit in units}
    return [one for one in everyone if one.engine.name in engines and one.name not in names]


def _print_report(report: FleetReport) -> None:
    from rich.console import Console
    from rich.table import Table

    title = f"{report.fleet}  ({report.seconds:.1f} s, at most {size_text(report.peak_bytes)})"
    table = Table(title=title, title_justify="left")
    for column, justify in (
        ("unit", "left"),
        ("status", "left"),
        ("compiled in", "right"),
        ("memory said", "right"),
    ):
        table.add_column(column, justify=justify)  # type: ignore[arg-type]
    for unit in report.units:
        table.add_row(unit.name, unit.status, *_cost(unit))
    Console().print(table)
    for engine in report.engines:
        print(f"{engine.path}: {engine.status}" + (f" ({engine.why})" if engine.why else ""))
    for unit in report.units:
        if unit.why:
            print(f"{unit.name}: {unit.why}")


def _cost(unit: UnitResult) -> tuple[str, str]:
    """Return what a unit's compile took, and the memory it was expected to take; empty where there was none."""
    if unit.status != "built":
        return "", ""
    return f"{unit.compile_seconds:.1f} s", size_text(unit.predicted_bytes)
