"""Units beside what a store has of them: which are there, which members have them, and what changed since."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, Literal, Protocol

from ..builder.build_key import inputs_key
from ..runtime.errors import EngineFileError, Error
from .changes import Change, explain
from .units import Unit

MemberStatus = Literal["current", "stale", "missing", "lost"]


class RecordLike(Protocol):
    """What is asked of a record."""

    @property
    def key(self) -> str:
        """The key."""

    @property
    def inputs(self) -> Mapping[str, str]:
        """What went into it."""

    @property
    def content(self) -> Mapping[str, Any]:
        """What it says."""


class RefLike(Protocol):
    """What is asked of a ref."""

    @property
    def key(self) -> str:
        """The key that the member had when it was last built."""

    @property
    def time(self) -> str:
        """When that was."""


class Records(Protocol):
    """What is asked of a store; nothing is written, and no plan is read."""

    def record(self, key: str) -> RecordLike | None:
        """Return a record, checked; None = there is none."""

    def refs(self, fleet: str, damaged: dict[str, Error] | None = None) -> Mapping[str, RefLike]:
        """Return the refs of a fleet's members; damaged takes the errors of those that cannot be read, by member."""


@dataclasses.dataclass(frozen=True)
class MemberState:
    """How a member of the fleet is.

    status : "current"; "stale" = built of other inputs; "missing" = never built; "lost" = its record is not in the
        store, or cannot be trusted
    time : when it was last built; "" = never
    changes : of a stale one: the inputs that differ
    why : in words; "" = it is current
    """

    name: str
    status: MemberStatus
    time: str = ""
    changes: tuple[Change, ...] = ()
    why: tuple[str, ...] = ()


@dataclasses.dataclass(frozen=True)
class GateState:
    """The verdict on an engine.

    passed : None = it was not measured, or of other inputs
    bounds : each with what was measured, as an evaluation's report has them
    """

    engine: str
    passed: bool | None
    bounds: Sequence[Mapping[str, Any]] = ()


@dataclasses.dataclass(frozen=True)
class UnitState:
    """A unit beside the store. key : of the record that serves it; None = it has to be built."""

    unit: Unit
    key: str | None
    members: tuple[MemberState, ...]


def compare(units: Sequence[Unit], store: Records, fleet: str) -> list[UnitState]:
    """Return every unit beside what the store has for the fleet."""
    view = _View(store, fleet)
    return [view.unit(unit) for unit in units]


def orphans(members: Sequence[str], store: Records, fleet: str) -> list[str]:
    """Return the members that the store has a ref of and the fleet no more."""
    damaged: dict[str, Error] = {}
    return sorted((store.refs(fleet, damaged).keys() | damaged.keys()) - set(members))


def gate_state(unit: Unit, store: Records) -> GateState | None:
    """Return the verdict on a unit's engine; None where it has no gate."""
    if not unit.gate_inputs:
        return None
    try:
        record = store.record(inputs_key(unit.gate_inputs))
    except EngineFileError:
        record = None
    verdict = {} if record is None else record.content.get("gate") or {}
    if not isinstance(verdict, Mapping) or not isinstance(verdict.get("passed"), bool):
        return GateState(unit.engine.name, None)
    return GateState(unit.engine.name, verdict["passed"], tuple(verdict.get("bounds") or ()))


class _View:
    """A store as one comparison sees it: every record is read once."""

    def __init__(self, store: Records, fleet: str) -> None:
        self._store = store
        self._damaged: dict[str, Error] = {}
        self._refs = store.refs(fleet, self._damaged)
        self._records: dict[str, RecordLike | EngineFileError | None] = {}

    def unit(self, unit: Unit) -> UnitState:
        key = self._serving(unit)
        return UnitState(unit, key, tuple(self._member(name, unit, key) for name in unit.members))

    def _serving(self, unit: Unit) -> str | None:
        """Return the key of the record that is this unit's; where its compiler is not here, as far as can be told."""
        keys = [unit.key]
        if unit.unknown:
            keys += [self._refs[name].key for name in unit.members if name in self._refs]
        for key in keys:
            record = self._record(key)
            if record is None or isinstance(record, EngineFileError):
                continue
            if unit.agrees_with(record.inputs):
                return key
        return None

    def _member(self, name: str, unit: Unit, key: str | None) -> MemberState:
        ref = self._refs.get(name)
        if ref is None and name in self._damaged:
            return MemberState(name, "lost", why=(str(self._damaged[name]),))
        if ref is None:
            why = "new" if key is None else "new here, its plan is in the store"
            return MemberState(name, "missing", why=(why,))
        record = self._record(ref.key)
        if isinstance(record, EngineFileError):
            return MemberState(name, "lost", ref.time, why=(str(record),))
        if record is None:
            return MemberState(name, "lost", ref.time, why=("its record is missing from the store",))
        changes = explain(unit.changes(record.inputs))
        if not changes:
            return MemberState(name, "current", ref.time)
        return MemberState(name, "stale", ref.time, changes, tuple(map(str, changes)))

    def _record(self, key: str) -> RecordLike | EngineFileError | None:
        if key not in self._records:
            try:
                self._records[key] = self._store.record(key)
            except EngineFileError as error:  # altered, or signed by nobody who is trusted
                self._records[key] = error
        return self._records[key]
