"""Whether the engines of a fleet are true: which members are stale and what made them so, orphans, gates."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

from .compare import GateState, MemberState, Records, compare, gate_state, orphans
from .fleet_file import Fleet
from .units import Unit, member_names


@dataclasses.dataclass(frozen=True)
class FleetStatus:
    """How a fleet is.

    members : in the order of the file
    orphans : members that the store still has a ref of; a collection takes what they alone hold
    gates : of the engines that have one
    """

    fleet: str
    members: tuple[MemberState, ...]
    orphans: tuple[str, ...]
    gates: tuple[GateState, ...]

    @property
    def is_true(self) -> bool:
        """Whether every member has what the file describes, and every gate was measured and has passed."""
        return all(one.status == "current" for one in self.members) and all(one.passed for one in self.gates)

    def to_json(self) -> dict[str, Any]:
        """Return the status as JSON values."""
        return {
            "fleet": self.fleet,
            "is_true": self.is_true,
            "members": [dataclasses.asdict(one) for one in self.members],
            "orphans": list(self.orphans),
            "gates": [dataclasses.asdict(one) for one in self.gates],
        }


def status_of(fleet: Fleet, units: Sequence[Unit], store: Records) -> FleetStatus:
    """Return how the units' members are; orphans are looked for in the whole fleet."""
    states = compare(units, store, fleet.name)
    members = {member.name: member for state in states for member in state.members}
    gates = {unit.engine.name: gate_state(unit, store) for unit in units}
    order = [name for name in member_names(fleet) if name in members]
    return FleetStatus(
        fleet=fleet.name,
        members=tuple(members[name] for name in order),
        orphans=tuple(orphans(member_names(fleet), store, fleet.name)),
        gates=tuple(one for one in gates.values() if one is not None),
    )
