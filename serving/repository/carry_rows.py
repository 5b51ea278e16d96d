"""One line of the report on an older repository."""

from __future__ import annotations

import dataclasses
from typing import Literal

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
