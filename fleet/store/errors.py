"""What a store refuses, beside the kinds of runtime/errors.py."""

from __future__ import annotations

from ...runtime.errors import EngineFileError, Error


class DamagedError(EngineFileError):
    """An object of a store is missing, cut short or altered. `name` is its name in the store."""

    def __init__(self, url: str, name: str, what: str, fix: str) -> None:
        super().__init__(f"{url}: {name} {what}; {fix}")
        self.url = url
        self.name = name
        self.what = what
        self.fix = fix


class SignatureError(EngineFileError):
    """A record has no signature of a trusted key, or was altered after it was signed."""


class RemoteError(Error):
    """A remote store cannot be reached, or refused a request."""
