"""A store behind a URL: what builders push to and pull from."""

from __future__ import annotations

import pathlib
from collections.abc import Mapping, Sequence
from typing import Any

from ..places import is_url
from .folder import Folder
from .objects import Objects
from .remote_objects import RemoteObjects
from .signing import PrivateKey, PublicKey
from .store import Store


class RemoteStore(Store):
    """A store behind any URL that fsspec has a driver for: s3://, gs://, abfs://, sftp://, file://, memory://.

    url     : a folder's path is taken for the file:// URL of it
    options : for the driver, such as {"endpoint_url": ...} or {"anon": True} of s3
    raises  : UnsupportedError when the driver is not installed, InvalidArgumentError when this is nearly a URL, or
              one that no driver knows
    """

    def __init__(
        self,
        url: str,
        *,
        trust: Sequence[PublicKey] = (),
        key: PrivateKey | None = None,
        options: Mapping[str, Any] | None = None,
    ) -> None:
        super().__init__(_objects(url, dict(options or {})), trust, key)


def _objects(url: str, options: dict[str, Any]) -> Objects:
    """Return what reaches a URL. Folders of this machine are flushed and locked, which fsspec's driver does not."""
    if not is_url(url, "the remote store"):
        return Folder(pathlib.Path(url).expanduser().absolute())
    for prefix in ("file://", "local://"):
        if url.startswith(prefix):
            folder = Folder(pathlib.Path(url.removeprefix(prefix)).absolute())
            folder.url = url
            return folder
    return RemoteObjects(url, options)
