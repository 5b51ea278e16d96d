"""Records and refs in a store, as a build of a fleet's units leaves them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from plansmith.fleet.store.local import LocalStore
from plansmith.fleet.store.record import Record, Ref
from plansmith.fleet.units import Unit


def put(
    store: LocalStore,
    unit: Unit,
    *,
    members: Iterable[str] | None = None,
    inputs: Mapping[str, str] | None = None,
    key: str | None = None,
    fleet: str = "chat",
) -> str:
    """Put a record as a build of the unit leaves it, name it by refs, and return its key."""
    key = unit.key if key is None else key
    store.put_record(Record(key, "unit", dict(unit.inputs if inputs is None else inputs), (), {}, {}))
    for member in unit.members if members is None else members:
        store.set_ref(fleet, member, Ref(key, "2026-01-31T12:00:00Z"))
    return key
