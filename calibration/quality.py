"""How close two models are, as numbers over the tokens that both scored."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from .scoring import kl_divergence, log_softmax, row_slices


@dataclasses.dataclass(frozen=True)
class Quality:
    """How close two models are over `tokens` scored tokens; KL in nats.

    context : tokens of a window; 0 = windows of every length together
    kl_error : standard error of the mean KL, tokens taken as independent
    """

    context: int
    windows: int
    tokens: int
    ppl: float
    ppl_reference: float
    kl: float
    kl_error: float
    kl_p99: float
    kl_max: float
    top1: float


class Tally:
    """Differences of two models, a number a scored token."""

    def __init__(self) -> None:
        self.nll: list[npt.NDArray[np.float64]] = []
        self.nll_reference: list[npt.NDArray[np.float64]] = []
        self.kl: list[npt.NDArray[np.float64]] = []
        self.agree: list[npt.NDArray[np.bool_]] = []

    def add(self, logits: npt.NDArray[Any], reference: npt.NDArray[Any], targets: npt.NDArray[Any]) -> None:
        """Compare (n, V) logits; targets (n,) are the tokens that really came next."""
        for part in row_slices(logits):
            q, p = log_softmax(logits[part]), log_softmax(reference[part])
            rows = np.arange(len(q))
            self.nll.append(-q[rows, targets[part]])
            self.nll_reference.append(-p[rows, targets[part]])
            self.kl.append(kl_divergence(p, q))
            self.agree.append(q.argmax(axis=1) == p.argmax(axis=1))

    def quality(self, context: int, num_windows: int) -> Quality:
        """Return what was gathered."""
        kl = np.concatenate(self.kl)
        return Quality(
            context=context,
            windows=num_windows,
            tokens=kl.size,
            ppl=_exp(float(np.concatenate(self.nll).mean())),
            ppl_reference=_exp(float(np.concatenate(self.nll_reference).mean())),
            kl=float(kl.mean()),
            kl_error=float(kl.std() / math.sqrt(kl.size)),
            kl_p99=float(np.quantile(kl, 0.99)),
            kl_max=float(kl.max()),
            top1=float(np.concatenate(self.agree).mean()),
        )


def _exp(mean_nll: float) -> float:
    return math.exp(min(mean_nll, 700.0))


def joined(tallies: Sequence[Tally]) -> Tally:
    """Return the numbers of several tallies as one."""
    together = Tally()
    for one in tallies:
        together.nll += one.nll
        together.nll_reference += one.nll_reference
        together.kl += one.kl
        together.agree += one.agree
    return together
