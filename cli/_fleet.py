"""What the commands of `plansmith fleet` share: their options, and the fleet and store behind them."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ..runtime.errors import InvalidArgumentError

if TYPE_CHECKING:
    from ..fleet.compare import Records
    from ..fleet.fleet_file import Fleet
    from ..fleet.store.store import Store
    from ..fleet.units import Unit

File = Annotated[
    Path, typer.Option("-f", "--file", help="The fleet file, or the directory that has plansmith.yaml.")
]
Only = Annotated[
    list[str] | None,
    typer.Option(
        "--only",
        help="Patterns over units and members, with commas between or repeated: 'smol/*', '*/int8/l4', '*/sm89'.",
        show_default=False,
    ),
]
Shard = Annotated[
    str | None,
    typer.Option("--shard", help="i/n: the i-th of n parts of the units, by the bytes of their weights."),
]
Rehash = Annotated[
    bool, typer.Option("--rehash", help="Read all checkpoints again, whatever is remembered of them.")
]
AsJson = Annotated[bool, typer.Option("--json", help="Print everything as JSON.")]
FILE = Path("plansmith.yaml")


def read_units(
    file: Path,
    only: list[str] | None,
    shard: str | None,
    rehash: bool,
    store: str | None = None,
    remote: str | None = None,
) -> tuple[Fleet, list[Unit]]:
    """Return the fleet of a file, and the units that a command is about.

    store, remote : as of _stores.open_stores; asked where weights of a pinned checkpoint are not here
    """
    from ..builder.checkpoint.hash_cache import HashCache
    from ..fleet.fleet_file import read_fleet
    from ..fleet.selection import parse_shard
    from ..fleet.selection import shard as part_of
    from ..fleet.units import units_of

    part = None if shard is None else parse_shard(shard)
    fleet = read_fleet(file)
    units = units_of(
        fleet,
        only=only or (),
        hashes=HashCache(rehash=rehash),
        open_stores=lambda: _stores(fleet, store, remote),
    )
    return fleet, units if part is None else part_of(units, *part)


def open_records(fleet: Fleet, location: str | None, remote: str | None, *, shared: bool) -> Records:
    """Return what commands that only look ask of a fleet's stores; nothing is made, and what is not there is empty.

    location, remote : see _stores.open_stores
    shared : of a fleet with a remote store that one alone, which is what other machines see; else both
    """
    from ..fleet.stores import FirstOf

    stores = _stores(fleet, location, remote)
    return stores[-1] if shared or len(stores) == 1 else FirstOf(stores)


def _stores(fleet: Fleet, location: str | None, remote: str | None) -> list[Store]:
    """Return the store here, and behind it the remote one, where there is one."""
    from ..fleet.store.local import LocalStore
    from ..fleet.store.remote import RemoteStore
    from ..fleet.store.signing import load_public

    places = store_places(fleet, location, remote)
    trust = [load_public(key) for key in fleet.trust]
    if places.folder.exists() and not places.folder.is_dir():
        raise InvalidArgumentError(f"{places.folder} is a file, a store is a folder; give another place")
    local = LocalStore(places.folder, trust, trusts_own=places.is_ours)
    return [local] if places.url is None else [local, RemoteStore(places.url, trust=trust)]


@dataclasses.dataclass(frozen=True)
class Places:
    """Where a fleet's stores lie.

    folder : of this machine's store
    url : of the one that is shared; None = there is none
    is_ours : whether nobody else writes into the folder. One that is the fleet's store may be anybody's
    """

    folder: Path
    url: str | None
    is_ours: bool


def store_places(fleet: Fleet, location: str | None, remote: str | None) -> Places:
    """Return where a fleet's stores lie; location and remote are what --store and --remote say.

    raises InvalidArgumentError for a URL as the folder, and for what is nearly a URL
    """
    from ..fleet.fleet_file import DEFAULT_STORE
    from ..fleet.places import is_url

    if location is not None and is_url(location, "--store"):
        raise InvalidArgumentError(
            f"--store {location} is a URL, and what is built is kept in a folder first; give --remote {location}"
        )
    if remote is not None:
        is_url(remote, "--remote")
    default = str(fleet.path.parent / DEFAULT_STORE)
    shared = fleet.store if "://" in fleet.store else None
    folder = location or (default if shared is not None else fleet.store)
    url = remote or shared
    # Beside a URL only we write into our own folder: the default one, or the one that the command line names.
    is_ours = url is not None and (location is not None or folder == default)
    return Places(Path(folder).expanduser().absolute(), url, is_ours)
