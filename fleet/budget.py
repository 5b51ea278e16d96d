"""How much memory and how many cores a fleet's build may take."""

from __future__ import annotations

import dataclasses
import re

from ..builder.machine import available_memory_bytes
from ..runtime.control_groups import usable_cores
from ..runtime.errors import InvalidArgumentError

# Of what is available without --memory: the rest is for whoever else is on the machine.
DEFAULT_SHARE = 0.9
_UNITS = {
    "": 1,
    **{
        f"{prefix}{kind}": base**n
        for kind, base in (("B", 1000), ("iB", 1024))
        for n, prefix in enumerate("KMGT", 1)
    },
}


@dataclasses.dataclass(frozen=True)
class Budget:
    """What may be taken at the same time.

    memory_bytes : of all processes of the build together
    workers : units side by side; each keeps about one core busy
    """

    memory_bytes: int
    workers: int


def make_budget(memory: str | None = None, workers: int | None = None) -> Budget:
    """Return the budget of --memory and --workers; None = a share of what is available, and one worker a core.

    raises InvalidArgumentError for a text that is no size
    """
    available = int(available_memory_bytes() * DEFAULT_SHARE)
    return Budget(available if memory is None else parse_bytes(memory), workers or max(1, usable_cores()))


def parse_bytes(text: str) -> int:
    """Return the bytes of a size such as 8GiB, 500 MB, 2.5GB or 1000000; InvalidArgumentError for anything else."""
    found = re.fullmatch(r"\s*([0-9]{1,18}(?:\.[0-9]{1,18})?)\s*([KMGT]?i?B)?\s*", text, re.IGNORECASE)
    units = {name.lower(): size for name, size in {**_UNITS, "B": 1}.items()}
    size = 0 if found is None else int(float(found[1]) * units.get((found[2] or "").lower(), 0))
    if size < 1:
        raise InvalidArgumentError(
            f"--memory is {text!r}, it must be a size above 0 such as 8GiB, 500MB or a number of bytes; give another"
        )
    return size
