"""What became of a fleet's build: of its units, its engines, and of the memory and time that it took."""

from __future__ import annotations

import dataclasses
from typing import Any, Literal

UnitStatus = Literal["built", "kept", "remote", "elsewhere", "refused", "failed"]
EngineStatus = Literal["assembled", "kept", "waiting", "failed"]


@dataclasses.dataclass(frozen=True)
class UnitResult:
    """What became of a unit.

    status : built here now; kept, as the store has it; remote, as only the remote store has it; elsewhere, where this
        machine cannot compile it; refused, as no machine can; failed
    why : of the last three
    compile_seconds : of its compilers' processes; 0 unless built
    predicted_bytes : memory that it was expected to take, 0 where it was not compiled
    """

    name: str
    key: str
    status: UnitStatus
    why: str = ""
    compile_seconds: float = 0.0
    predicted_bytes: int = 0


@dataclasses.dataclass(frozen=True)
class EngineResult:
    """What became of an engine's directory.

    status : assembled now; kept, as it was there already; waiting, where units of it are still to be built, and left as
        it was; failed
    why : of the last two, and which targets are left out of the first two because this machine has no plan of them
    """

    name: str
    path: str
    status: EngineStatus
    why: str = ""


@dataclasses.dataclass(frozen=True)
class FleetReport:
    """How a build of a fleet went. peak_bytes : of this process and those it started, without pages of files."""

    fleet: str
    units: tuple[UnitResult, ...]
    engines: tuple[EngineResult, ...]
    seconds: float
    peak_bytes: int

    @property
    def failures(self) -> dict[str, str]:
        """The units and engines that failed or are refused, and why."""
        units = {one.name: one.why for one in self.units if one.status in ("failed", "refused")}
        return {**units, **{one.name: one.why for one in self.engines if one.status == "failed"}}

    def to_json(self) -> dict[str, Any]:
        """Return the report as JSON values."""
        return dataclasses.asdict(self)
