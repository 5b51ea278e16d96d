"""What the driver asks Linux about the machine: memory that is left, and CPU time that other processes took."""

from __future__ import annotations

import os
from pathlib import Path


def available_memory() -> int:
    """Return the bytes that processes can still take without swapping, as Linux estimates it."""
    fields = dict(line.split(":") for line in Path("/proc/meminfo").read_text().splitlines())
    return int(fields["MemAvailable"].split()[0]) * 1024


class Others:
    """CPU time of the machine from here on, to tell what processes besides the measured one took."""

    def __init__(self) -> None:
        """Begin now."""
        self.begin = _busy_s()

    def seconds(self, own_s: float) -> float:
        """Return what all but the measured process took until now; `own_s` is its own."""
        return max(0.0, _busy_s() - self.begin - own_s)


def _busy_s() -> float:
    """Return the seconds in which the machine's cores worked, since it started."""
    fields = Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:]
    ticks = [int(field) for field in fields]
    return (sum(ticks[:8]) - ticks[3] - ticks[4]) / os.sysconf("SC_CLK_TCK")
