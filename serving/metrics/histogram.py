"""A histogram that many threads add to."""

from __future__ import annotations

import bisect
import dataclasses
import math
import threading

from .families import Family, bound_text


@dataclasses.dataclass(frozen=True)
class HistogramState:
    """A histogram at one moment.

    counts : observations up to each bound, as Prometheus' `le` counts them; the last is all of them
    total : the observations' sum
    """

    family: Family
    counts: tuple[int, ...]
    total: float

    @property
    def buckets(self) -> list[tuple[str, int]]:
        """The label `le` of each bucket, and its count."""
        bounds = [*map(bound_text, self.family.bounds), "+Inf"]
        return list(zip(bounds, self.counts, strict=True))


class Histogram:
    """Counts observations by a family's bounds. Any thread."""

    def __init__(self, family: Family) -> None:
        self._family = family
        self._lock = threading.Lock()
        self._counts = [0] * (len(family.bounds) + 1)
        self._total = 0.0

    def observe(self, value: float) -> None:
        """Count a value; what is no number is left out, since it would spoil the sum for ever."""
        if not math.isfinite(value):
            return
        place = bisect.bisect_left(self._family.bounds, value)  # a bound's own value is inside its bucket
        with self._lock:
            self._counts[place] += 1
            self._total += value

    def state(self) -> HistogramState:
        """Return the counts now."""
        with self._lock:
            counts, total = list(self._counts), self._total
        for i in range(1, len(counts)):
            counts[i] += counts[i - 1]
        return HistogramState(self._family, tuple(counts), total)
