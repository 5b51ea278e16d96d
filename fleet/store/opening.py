"""Opening the store of a folder."""

from __future__ import annotations

import pathlib
from collections.abc import Sequence

from ...runtime.errors import InvalidArgumentError, NotFoundError
from ..places import is_url
from .local import LocalStore
from .names import MARKER
from .signing import PrivateKey, PublicKey


def open_store(
    location: str | pathlib.Path,
    *,
    trust: Sequence[PublicKey] = (),
    key: PrivateKey | None = None,
    create: bool = True,
    trusts_own: bool = False,
) -> LocalStore:
    """Return the store in a folder.

    create : make one where nothing is; a folder that holds other things is never made into one
    trust, key : see `Store`; trusts_own : see `LocalStore`
    raises InvalidArgumentError for a folder that is no store or cannot be written to, EngineFileError for a store of
        another version, NotFoundError when there is none and create is False
    """
    root = pathlib.Path(location).absolute()
    if isinstance(location, str) and is_url(location, "the store"):
        raise InvalidArgumentError(f"{location} is a URL, wanted is a folder; a RemoteStore takes URLs")
    if root.exists() and not root.is_dir():
        raise InvalidArgumentError(f"{root} is a file, a store is a folder; give another place")
    store = LocalStore(root, trust, key, trusts_own=trusts_own)
    if create:
        _make_folder(root)
        store.prepare()
    elif not root.is_dir() or not store.objects.has(MARKER):
        store.check()
        raise NotFoundError(f"there is no store at {root}; make one by building, or give another place")
    store.check()
    return store


def _make_folder(root: pathlib.Path) -> None:
    try:
        root.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise InvalidArgumentError(f"{root} cannot be made ({error.strerror}); give another place") from error
