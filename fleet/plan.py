"""What a build of the fleet would do: of every unit whether, where and why."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any, Literal

from ..builder.build_key import inputs_key
from ..builder.targets.registry import CPU
from .changes import Change
from .compare import Records, UnitState, compare, gate_state
from .fleet_file import Fleet
from .runners import runner_labels
from .units import Unit

Action = Literal["keep", "gate", "build", "none"]
Where = Literal["here", "runner", "nowhere"]


@dataclasses.dataclass(frozen=True)
class Step:
    """What would be done about a unit.

    action : "keep" = the store has it; "gate" = it has, and the engine's gate is to be measured, which of an engine's
        units one does; "build"; "none" = it has to be built and cannot be, see needs
    where : it can be built: here, on a runner that the fleet names, or nowhere
    runner : that runner's labels; () = none is named
    why : in words: new, or which inputs changed, or what is missing
    needs : what is missing to build it here; "" = nothing
    """

    state: UnitState
    action: Action
    where: Where
    runner: tuple[str, ...]
    why: tuple[str, ...]
    needs: str

    @property
    def unit(self) -> Unit:
        """The unit."""
        return self.state.unit

    @property
    def peak_bytes(self) -> int:
        """About the memory that the step takes here at its peak, besides this process; 0 where nothing is done here."""
        if self.action == "gate":
            return self.unit.gate_bytes
        return self.unit.peak_bytes if (self.action, self.where) == ("build", "here") else 0

    def to_json(self) -> dict[str, Any]:
        """Return the step as JSON values."""
        unit = self.unit
        return {
            "unit": unit.name,
            "engine": unit.engine.name,
            "members": list(unit.members),
            "target": unit.target.name,
            "key": unit.key,
            "checkpoint": {
                "path": str(unit.checkpoint.path),
                "fingerprint": unit.fingerprint,
                "missing_weights": unit.missing_weights,
            },
            "action": self.action,
            "where": self.where,
            "runner": list(self.runner),
            "why": list(self.why),
            "changes": [dataclasses.asdict(one) for one in _changes(self.state)],
            "needs": self.needs,
            "refused": unit.buildable.why if unit.buildable.state == "refused" else "",
            "unknown_inputs": sorted(unit.unknown),
            "weight_bytes": unit.weight_bytes,
            "peak_bytes": self.peak_bytes,
        }


def plan_fleet(fleet: Fleet, units: Sequence[Unit], store: Records) -> list[Step]:
    """Return what would be done about every unit, in their order."""
    steps = [_step(fleet, state) for state in compare(units, store, fleet.name)]
    judges = _judges(units)
    return [_with_gate(step, store) if step.unit.name in judges else step for step in steps]


def summary(steps: Sequence[Step]) -> dict[str, int]:
    """Return how many units are kept, built here, on a runner, or nowhere that is known; and gates to be measured."""
    counts = {"kept": 0, "here": 0, "runner": 0, "nowhere": 0}
    for step in steps:
        counts["kept" if step.action in ("keep", "gate") else step.where] += 1
    return {**counts, "gates": sum(step.action == "gate" for step in steps)}


def _step(fleet: Fleet, state: UnitState) -> Step:
    unit = state.unit
    labels = runner_labels(fleet, unit)
    buildable = unit.buildable
    where: Where = "runner" if labels else "nowhere"
    if buildable.state in ("here", "refused"):
        where = "here" if buildable.state == "here" else "nowhere"
    if state.key is not None:
        return Step(state, "keep", where, labels, _kept(state), buildable.needs)
    action: Action = "none" if where == "nowhere" else "build"
    return Step(state, action, where, labels, _reasons(state), buildable.needs)


def _judges(units: Sequence[Unit]) -> set[str]:
    """Return the units with which gates are measured: of those that ask the same, that of cpu, else the first."""
    names: dict[str, str] = {}
    for unit in sorted(units, key=lambda unit: unit.target.name != CPU):
        if unit.gate_inputs:
            names.setdefault(inputs_key(unit.gate_inputs), unit.name)
    return set(names.values())


def _with_gate(step: Step, store: Records) -> Step:
    """Return a step that measures its engine's gate, where it has one that is not measured yet."""
    gate = gate_state(step.unit, store)
    if step.action != "keep" or gate is None or gate.passed is not None:
        return step
    return dataclasses.replace(step, action="gate", why=(*step.why, "the gate is not measured"))


def _kept(state: UnitState) -> tuple[str, ...]:
    """Say that the store has a unit, and what is still to be noted there."""
    behind = [member.name for member in state.members if member.status != "current"]
    return (f"in the store; {', '.join(behind)} gets it",) if behind else ("in the store",)


def _reasons(state: UnitState) -> tuple[str, ...]:
    """Return why a unit has to be built: the reasons of its members, each once; that one is new, where all are."""
    reasons = [why for member in state.members for why in member.why]
    if not reasons:  # the members' record was read, and is gone since
        return ("missing from the store",)
    others = [why for why in reasons if why != "new"]
    return tuple(dict.fromkeys(others or reasons))


def _changes(state: UnitState) -> list[Change]:
    return list(dict.fromkeys(one for member in state.members for one in member.changes))
