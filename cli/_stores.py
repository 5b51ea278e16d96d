"""The stores behind a fleet: the folder that this machine builds into, and the one that machines share."""

from __future__ import annotations

import dataclasses
import os
from typing import TYPE_CHECKING, Annotated

import typer

from ..runtime.errors import InvalidArgumentError
from ._fleet import store_places

if TYPE_CHECKING:
    from ..fleet.fleet_file import Fleet
    from ..fleet.store.local import LocalStore
    from ..fleet.store.remote import RemoteStore

KEY_VARIABLE = "PLANSMITH_SIGNING_KEY"

StoreFolder = Annotated[
    str | None,
    typer.Option(
        "--store", help="The folder of this machine's store, instead of the file's.", show_default=False
    ),
]
Remote = Annotated[
    str | None,
    typer.Option("--remote", help="The shared store: a URL. Default: the file's store, where that is one."),
]
SigningKey = Annotated[
    str | None,
    typer.Option(
        "--sign-key",
        envvar=KEY_VARIABLE,
        show_envvar=True,
        help="A private key, as PEM file or text, that signs what was built here; see plansmith fleet keygen.",
    ),
]


@dataclasses.dataclass(frozen=True)
class Stores:
    """A fleet's stores. remote : None = it has the folder alone."""

    local: LocalStore
    remote: RemoteStore | None

    def shared(self) -> RemoteStore:
        """Return the remote store; raises InvalidArgumentError where there is none."""
        if self.remote is None:
            raise InvalidArgumentError(
                f"the fleet's store is the folder {self.local.url}, and nothing else; name a shared one: --remote "
                "s3://BUCKET/FOLDER, or store: in plansmith.yaml"
            )
        return self.remote


def open_stores(
    fleet: Fleet, location: str | None, remote: str | None, sign_key: str | None, *, create: bool
) -> Stores:
    """Return the stores of a fleet.

    location : the folder, instead of the file's; with a URL in the file the default is .plansmith/store beside it
    create : make the folder where there is none
    raises what open_store and RemoteStore raise, InvalidArgumentError for keys that are none
    """
    from ..fleet.store.opening import open_store
    from ..fleet.store.remote import RemoteStore
    from ..fleet.store.signing import load_private, load_public

    os.environ.pop(KEY_VARIABLE, None)  # no compiler's process needs to have it
    trust = [load_public(key) for key in fleet.trust]
    key = load_private(sign_key) if sign_key else None
    places = store_places(fleet, location, remote)
    local = open_store(places.folder, trust=trust, trusts_own=places.is_ours, key=key, create=create)
    return Stores(local, None if places.url is None else RemoteStore(places.url, trust=trust, key=key))
