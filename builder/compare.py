"""Logits against logits: the differences, and how large they may be."""

from __future__ import annotations

import dataclasses
import math

import numpy as np
import numpy.typing as npt

from .precision import Precision

Logits = npt.NDArray[np.float32]


@dataclasses.dataclass(frozen=True)
class Threshold:
    """What a comparison must keep: the largest difference of a logit, the mean KL, the share of equal best tokens."""

    max_diff: float = math.inf
    mean_kl: float = math.inf
    top1: float = 0.0


# With the reference only the order of additions differs. With transformers the precision shows; what that does to a
# model is the model's matter, so of int8 and int4 these bounds find only what is broken.
_SAME = Threshold(max_diff=2e-3, mean_kl=1e-5)
# K and V rounded to float16: where the order of additions puts one on the other side of a half, it moves by 2^-10.
_SAME_BUT_FLOAT16_KV = Threshold(max_diff=2e-2, mean_kl=1e-5)
_TRANSFORMERS = {
    "fp32": _SAME,
    "fp16": Threshold(mean_kl=1e-3, top1=0.97),
    "bf16": Threshold(mean_kl=5e-3, top1=0.93),
    "int8": Threshold(mean_kl=0.1, top1=0.7),
    "int4": Threshold(mean_kl=2.0),
}


@dataclasses.dataclass(frozen=True)
class Comparison:
    """One engine against one referee over `rows` tokens."""

    subject: str
    referee: str
    rows: int
    max_diff: float
    mean_kl: float
    max_kl: float
    top1: float
    threshold: Threshold
    passed: bool


class Tally:
    """Differences of two runs, gathered row by row."""

    def __init__(self) -> None:
        self.rows = self.agreeing = 0
        self.max_diff = self.sum_kl = self.max_kl = 0.0

    def add(self, referee: Logits, subject: Logits) -> None:
        """Compare (R, V) logits."""
        if not np.isfinite(subject).all():
            self.max_diff = self.sum_kl = self.max_kl = math.inf
        with np.errstate(invalid="ignore"):
            p, q = _log_softmax(referee), _log_softmax(subject)
            kl = np.maximum((np.exp(p) * (p - q)).sum(axis=1), 0.0)
            self.max_diff = max(self.max_diff, float(np.abs(referee - subject).max()))
        self.rows += len(referee)
        self.agreeing += int((referee.argmax(axis=1) == subject.argmax(axis=1)).sum())
        self.sum_kl += float(kl.sum())
        self.max_kl = max(self.max_kl, float(kl.max()))

    @property
    def mean_kl(self) -> float:
        """Mean KL(referee || subject) of a row, in nats."""
        return self.sum_kl / self.rows

    @property
    def top1(self) -> float:
        """Share of rows with the same best token, 0..1."""
        return self.agreeing / self.rows

    def result(self, subject: str, referee: str, threshold: Threshold) -> Comparison:
        """Return the comparison under the two names, passed where every bound of the threshold is kept."""
        passed = (
            self.max_diff <= threshold.max_diff
            and self.mean_kl <= threshold.mean_kl
            and self.top1 >= threshold.top1
        )
        return Comparison(
            subject,
            referee,
            self.rows,
            self.max_diff,
            self.mean_kl,
            self.max_kl,
            self.top1,
            threshold,
            passed,
        )


def _log_softmax(logits: Logits) -> npt.NDArray[np.float64]:
    shifted = logits.astype(np.float64) - logits.max(axis=1, keepdims=True)
    result: npt.NDArray[np.float64] = shifted - np.log(np.exp(shifted).sum(axis=1, keepdims=True))
    return result


def threshold_of(subject: str, referee: str, recipe: Precision, noise: Tally | None) -> Threshold:
    """Return what a comparison must keep; of ("reference", "unrounded"), which measures the noise, nothing.

    noise : of reference against unrounded; None where the recipe rounds nothing that a step computes

    Rounding is chaotic: a value between two steps that goes the other way moves others, and after some layers two
    correct runs round independently. So where activations are rounded the bound is the size of that noise, measured
    on the reference itself; on a few layers the two still agree a hundred times closer.
    """
    if referee == "reference":
        if recipe == recipe.without_rounding():
            return _SAME_BUT_FLOAT16_KV if recipe.kv == "float16" else _SAME
        if noise is not None:
            return Threshold(mean_kl=1e-3 + 2 * noise.mean_kl, top1=max(0.0, 0.98 - 2 * (1 - noise.top1)))
    return _TRANSFORMERS.get(recipe.name, Threshold()) if referee == "transformers" else Threshold()
