"""What makes a profile's shares of the roofline doubtful: the machine's peaks were not what it can do at most."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from ..runtime.profile import ARITHMETICS, CpuPeaks

if TYPE_CHECKING:
    from ._profile import StepProfile

UNITS = {"f32": "GFLOP/s", "int8": "GOP/s", "bf16": "GFLOP/s"}
# A peak is the best of 100 tries, which on a machine with no other work comes back within some 5 %.
_MOST_DIFFERENCE = 1.25
# Of an op's time, and only of ops with this share of a step: a short one's clock is too coarse.
_MOST_SHARE = 1.05
_LEAST_OF_STEP = 0.01
_QUIET = "run again on a quiet machine"


@dataclasses.dataclass(frozen=True)
class ProfileWarning:
    """One of them.

    kind : "peaks_differ" or "above_peaks"
    text : what, got, next step; a sentence for people
    """

    kind: str
    text: str


def differing_peaks(measured: Sequence[CpuPeaks]) -> Iterator[ProfileWarning]:
    """Yield a warning where the peaks were not the same each time."""
    rates = {"read": ([one.read_bytes_per_s / 1e9 for one in measured], "GB/s")}
    for name in ARITHMETICS:
        rates[name] = ([one.ops_per_s(name) / 1e9 for one in measured], UNITS[name])
    texts = [
        f"{name} {' and '.join(f'{value:.0f}' for value in values)} {unit}"
        for name, (values, unit) in rates.items()
        if values and max(values) > _MOST_DIFFERENCE * min(values)
    ]
    if texts:
        yield ProfileWarning(
            "peaks_differ",
            f"the machine's peaks before and after the run differ: {', '.join(texts)}; other work takes its share, and "
            f"what the roofline says is as uncertain: {_QUIET}",
        )


def impossible_times(steps: Sequence[StepProfile]) -> Iterator[ProfileWarning]:
    """Yield a warning where ops took less time than their operations, or the bytes of their weights, can take."""
    found = [
        (group.certain_ns / group.time_ns, f"{group.label} of {step.kind} steps")
        for step in steps
        for group in step.groups
        if group.time_ns >= max(1, _LEAST_OF_STEP * step.time_ns)
        and group.certain_ns > _MOST_SHARE * group.time_ns
    ]
    if found:
        share, name = max(found)
        ops = "an op was" if len(found) == 1 else f"{len(found)} ops were"
        yield ProfileWarning(
            "above_peaks",
            f"{ops} faster than the machine's peaks allow, {name} with {share:.0%} of the roofline the most: the "
            f"machine was slower when they were measured, or weights stayed in its caches; {_QUIET}",
        )
