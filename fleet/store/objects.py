"""What a store asks of the place it lies in: whole objects by name."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Protocol

from .fields import MAX_JSON_BYTES


class Objects(Protocol):
    """A place with named objects. An object is there whole or not at all, whatever is killed meanwhile.

    url  : how errors call the place
    jobs : how many calls may run side by side, from threads of their own
    All raise OutOfMemoryError when the place is full, InvalidArgumentError when it cannot be written to, RemoteError
    when it cannot be reached.
    """

    url: str
    jobs: int

    def read(self, name: str, limit: int = MAX_JSON_BYTES) -> bytes | None:
        """Return an object, at most the first limit + 1 bytes of it; None when there is none."""

    def write(self, name: str, data: bytes, replace: bool = True) -> bool:
        """Write an object; False when there was one and replace is False, which stays as it is."""

    def has(self, name: str) -> bool:
        """Return whether there is such an object."""

    def keep(self, name: str) -> bool:
        """Return whether there is such an object; what is there stays for a collection's grace period."""

    def names(self, folder: str) -> Iterator[str]:
        """Return the names of all objects below a folder, sorted."""

    def age_s(self, name: str) -> float | None:
        """Return how long ago an object was written or kept; None when there is none."""

    def size(self, name: str) -> int:
        """Return an object's bytes, 0 when there is none."""

    def remove(self, name: str) -> None:
        """Remove an object, if there is one."""

    def others(self) -> list[str]:
        """Return some of the names directly below the place: empty when there is nothing."""

    def sharing(self) -> contextlib.AbstractContextManager[None]:
        """Keep collections out meanwhile, where a place can."""
