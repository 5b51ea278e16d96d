"""`plansmith fleet push`, `pull`, `gc`, `verify` and `keygen`: the stores of a fleet, and the key that signs."""

from __future__ import annotations

import dataclasses
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ._fleet import FILE, AsJson, File, Only, Rehash, read_units
from ._output import BuildProgress, print_json, size_text
from ._stores import Remote, SigningKey, StoreFolder, open_stores

if TYPE_CHECKING:
    from ..fleet.report import EngineResult
    from ..fleet.store.transfer import Transferred

DEFAULT_KEEP_DAYS = 30.0


def push(
    file: File = FILE,
    only: Only = None,
    store: StoreFolder = None,
    remote: Remote = None,
    sign_key: SigningKey = None,
    complete: Annotated[
        bool, typer.Option("--complete", help="Fail also where some of the units are not built here.")
    ] = False,
    rehash: Rehash = False,
    as_json: AsJson = False,
) -> int:
    """Bring the units that are built here to the remote store: what it lacks of them, and nothing else.

    With them goes what has to be known of checkpoints that have a revision, so that others plan without their weights.
    The exit code is 1 where none of the units is built here, unless it was a whole fleet whose checkpoints have a
    revision.
    """
    from ..fleet.share import push_fleet

    fleet, units = read_units(file, only, None, rehash, store, remote)
    # What is known of pinned checkpoints is pushed also from where nothing was built.
    is_pinned = any(unit.engine.source.revision is not None for unit in units)
    stores = open_stores(fleet, store, remote, sign_key, create=is_pinned)
    with BuildProgress(quiet=as_json) as progress:
        sent, absent = push_fleet(fleet, units, stores.local, stores.shared(), progress)
    _print_transfer("pushed", sent, as_json, {"not_built": absent})
    if absent and not as_json:
        print(f"not built here: {', '.join(absent)}")
    is_nothing = len(absent) == len(units) and (bool(only) or not is_pinned)
    return 1 if is_nothing or (complete and absent) else 0


def pull(
    file: File = FILE,
    only: Only = None,
    output: Annotated[
        Path | None,
        typer.Option("-o", "--output", help="Where the engine directories go. Default: the file's output."),
    ] = None,
    assemble: Annotated[
        bool, typer.Option("--assemble/--no-assemble", help="Make the engine directories of what is pulled.")
    ] = True,
    check_hashes: Annotated[
        bool,
        typer.Option(
            "--check-hashes",
            help="Read the engines that are there already from end to end, and write anew what was altered.",
        ),
    ] = False,
    store: StoreFolder = None,
    remote: Remote = None,
    as_json: AsJson = False,
) -> int:
    """Get the fleet's units from the remote store, every byte that comes checked, and assemble their engines.

    What the store's refs name is taken, so a machine that serves needs no checkpoints for it. An engine that is there
    already is told by its manifest and the sizes of its files; --check-hashes reads all of it. The exit code is 1
    where a plan is absent or damaged, which does not stop the engines of the others.
    """
    from ..fleet.fleet_file import read_fleet
    from ..fleet.share import pull_fleet

    fleet = read_fleet(file)
    if output is not None:
        fleet = dataclasses.replace(fleet, output=output.absolute())
    stores = open_stores(fleet, store, remote, None, create=True)
    with BuildProgress(quiet=as_json) as progress:
        pulled = pull_fleet(
            fleet,
            only or (),
            stores.local,
            stores.shared(),
            assemble=assemble,
            check_hashes=check_hashes,
            progress=progress,
        )
    found = {
        "engines": [dataclasses.asdict(one) for one in pulled.engines],
        "absent": list(pulled.absent),
        "damaged": dict(pulled.damaged),
    }
    _print_transfer("pulled", pulled.transferred, as_json, found)
    if not as_json:
        _print_engines(pulled.engines, pulled.absent)
    for name, why in pulled.damaged.items():
        print(f"{name}: {why}", file=sys.stderr)
    is_short = pulled.absent or pulled.damaged
    return 1 if is_short or any(one.status in ("failed", "waiting") for one in pulled.engines) else 0


def gc(
    file: File = FILE,
    keep_days: Annotated[
        float,
        typer.Option(min=0, help="Records that no member has stay so many days from when they were made."),
    ] = DEFAULT_KEEP_DAYS,
    of_remote: Annotated[
        bool, typer.Option("--of-remote", help="Of the remote store instead of the folder here.")
    ] = False,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Say what would go, and remove nothing.")
    ] = False,
    store: StoreFolder = None,
    remote: Remote = None,
    as_json: AsJson = False,
) -> None:
    """Forget members that the file does not have any more, and remove what nothing names since --keep-days."""
    from ..fleet.fleet_file import read_fleet
    from ..fleet.share import collect_fleet

    fleet = read_fleet(file)
    # Who looks after the remote store may have no folder yet.
    stores = open_stores(fleet, store, remote, None, create=of_remote)
    where = stores.shared() if of_remote else stores.local
    forgotten, gone = collect_fleet(fleet, where, keep_days=keep_days, dry_run=dry_run)
    if as_json:
        print_json({"forgotten": forgotten, **dataclasses.asdict(gone)})
        return
    verb = "would go" if dry_run else "removed"
    for name in forgotten:
        print(f"{name}: no member of {fleet.name} any more")
    print(
        f"{where.url}: {verb}: {gone.records} records, {gone.files} files, {gone.chunks} chunks, "
        f"{size_text(gone.num_bytes)}; {gone.kept_records} records stay"
    )
    if gone.aside:
        print(
            f"{gone.aside} objects ({size_text(gone.aside_bytes)}) are taken aside, and go with a later collection"
        )
    if gone.waiting:
        print(
            f"{gone.waiting} objects ({size_text(gone.waiting_bytes)}) that no record needs are not a day old, and go "
            "with a collection after that"
        )


def verify(
    file: File = FILE,
    of_remote: Annotated[
        bool, typer.Option("--of-remote", help="The remote store instead of the folder here.")
    ] = False,
    engines: Annotated[
        bool, typer.Option("--engines", help="Also the engine directories, beside their manifests.")
    ] = False,
    output: Annotated[
        Path | None,
        typer.Option("-o", "--output", help="Of --engines: where these are. Default: the file's output."),
    ] = None,
    store: StoreFolder = None,
    remote: Remote = None,
    as_json: AsJson = False,
) -> int:
    """Read a store from end to end, and say of everything in it that is not as it was made what to do about it."""
    from ..fleet.fleet_file import read_fleet
    from ..fleet.share import verify_engines
    from ..fleet.store.verify import verify as verify_store

    fleet = read_fleet(file)
    if output is not None:
        fleet = dataclasses.replace(fleet, output=output.absolute())
    # Who looks after the remote store may have no folder yet.
    stores = open_stores(fleet, store, remote, None, create=of_remote)
    where = stores.shared() if of_remote else stores.local
    with BuildProgress(quiet=as_json) as progress:
        problems = {where.url: verify_store(where, progress)}
        if engines:
            pulls = "run plansmith fleet pull --check-hashes"
            builds = "delete that engine's directory, then run plansmith fleet build"
            fix = builds if stores.remote is None else pulls
            problems[str(fleet.output)] = verify_engines(fleet, fix, progress)
    if as_json:
        told = [[dataclasses.asdict(one) for one in found] for found in problems.values()]
        print_json({"store": where.url, "problems": told[0], **({"engines": told[1]} if engines else {})})
    else:
        for place, found in problems.items():
            for one in found:
                print(f"{one.name} {one.what}; {one.fix}")
            print(f"{place}: {len(found) or 'no'} problem{'s' * (len(found) != 1)}")
    return 1 if any(problems.values()) else 0


def keygen(
    output: Annotated[Path, typer.Option("-o", "--output", help="Where the private key goes; a new file.")],
    as_json: AsJson = False,
) -> None:
    """Make a key, and print the public part, which goes into plansmith.yaml under trust."""
    from ..fleet.store.signing import make_key

    public = make_key(output)
    if as_json:
        print_json({"private_key": str(output), "public_key": public})
    else:
        print(f"private key: {output} (give it as --sign-key, or its text in PLANSMITH_SIGNING_KEY)")
        print(f"public key, for plansmith.yaml:\ntrust:\n  - {public}")


def _print_transfer(verb: str, sent: Transferred, as_json: bool, more: dict[str, object]) -> None:
    if as_json:
        print_json({**dataclasses.asdict(sent), **more})
        return
    print(
        f"{verb} {sent.records} records, {sent.chunks} chunks, {size_text(sent.num_bytes)}; "
        f"{size_text(sent.kept_bytes)} were there"
    )


def _print_engines(engines: tuple[EngineResult, ...], absent: tuple[str, ...]) -> None:
    for engine in engines:
        print(f"{engine.path}: {engine.status}" + (f" ({engine.why})" if engine.why else ""))
    for name in absent:
        print(f"{name}: the remote store has no plan of it; build it with plansmith fleet build --push")
