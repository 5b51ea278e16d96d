"""What came of an older repository: its settings one by one, and what the new one takes."""

from __future__ import annotations

import dataclasses
from typing import Any, Literal

from .plan import Overrides

State = Literal["carried", "changed", "not carried"]


@dataclasses.dataclass(frozen=True)
class Row:
    """What became of one setting.

    model : as it is called here
    key : of the setting
    old, new : what it was and is; new is empty when it was not carried
    why : it is not as it was
    """

    model: str
    key: str
    old: str
    new: str
    state: State
    why: str = ""

    def to_json(self) -> dict[str, str]:
        """Return the row as a JSON object."""
        return dataclasses.asdict(self)


@dataclasses.dataclass
class Carried:
    """What came of an older repository.

    overrides : what the new one takes from it
    rows : one a setting
    unfilled : settings whose variable in a template was never filled, as MODEL.KEY
    """

    overrides: Overrides = dataclasses.field(default_factory=Overrides)
    rows: list[Row] = dataclasses.field(default_factory=list)
    unfilled: list[str] = dataclasses.field(default_factory=list)

    def add(self, model: str, key: str, old: Any, new: Any, state: State, why: str = "") -> None:
        """Note what became of a setting."""
        self.rows.append(Row(model, key, str(old), str(new), state, why))
