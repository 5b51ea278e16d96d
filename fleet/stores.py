"""Several stores looked at as one: the folder that a machine builds into, and behind it the one that machines share."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from ..runtime.errors import EngineFileError, Error
from .compare import RecordLike, Records, RefLike


class FirstOf:
    """The records and refs of several stores; what an earlier one has goes first."""

    def __init__(self, stores: Sequence[Records]) -> None:
        self._stores = tuple(stores)

    def record(self, key: str) -> RecordLike | None:
        """Return the first good record of a key; raises the first store's error where none has a good one."""
        first: EngineFileError | None = None
        for store in self._stores:
            try:
                if (found := store.record(key)) is not None:
                    return found
            except EngineFileError as error:
                first = first or error
        if first is not None:
            raise first
        return None

    def refs(self, fleet: str, damaged: dict[str, Error] | None = None) -> Mapping[str, RefLike]:
        """Return the refs of a fleet's members; damaged takes the errors of those that no store has a good one of."""
        merged: dict[str, RefLike] = {}
        wrong: dict[str, Error] | None = None if damaged is None else {}
        for store in reversed(self._stores):
            merged |= store.refs(fleet, wrong)
        if damaged is not None:
            damaged |= {name: error for name, error in (wrong or {}).items() if name not in merged}
        return merged
