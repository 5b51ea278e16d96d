"""Medians with their spread, and ratios of two engines round by round."""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Mapping, Sequence


@dataclasses.dataclass(frozen=True)
class Spread:
    """The samples of one number: their median, least, greatest and how many there are."""

    median: float
    low: float
    high: float
    count: int

    @classmethod
    def of(cls, values: Sequence[float]) -> Spread:
        """Return that of at least one sample."""
        return cls(statistics.median(values), min(values), max(values), len(values))

    @property
    def noise(self) -> float:
        """Return half of the span from least to greatest as a share of the median."""
        return (self.high - self.low) / 2 / self.median if self.median else 0.0

    def text(self) -> str:
        """Return `median (low-high, n=count)` with three digits that count."""
        if self.count == 1:
            return f"{number(self.median)} (n=1)"
        return f"{number(self.median)} ({number(self.low)}-{number(self.high)}, n={self.count})"


def number(value: float) -> str:
    """Return a number with about three digits that count: 1234, 234, 23.4, 2.34, 0.234."""
    size = abs(value)
    digits = 0 if size >= 100 else 1 if size >= 10 else 2 if size >= 1 else 3
    return f"{value:.{digits}f}"


def round_ratios(ours: Mapping[int, float], theirs: Mapping[int, float]) -> list[float]:
    """Return ours / theirs in each round that has both: what drifts over minutes has little part in it."""
    return [ours[r] / theirs[r] for r in sorted(ours) if r in theirs and theirs[r] > 0]
