"""Differences of logits are counted as their formulas say, and what is not finite never passes."""

from __future__ import annotations

import numpy as np
from plansmith.builder import compare


def test_tally_is_the_formula() -> None:
    rng = np.random.default_rng(0)
    a = rng.normal(size=(50, 30)).astype(np.float32)
    b = (a + 0.3 * rng.normal(size=a.shape)).astype(np.float32)
    tally = compare.Tally()
    tally.add(a[:20], b[:20])
    tally.add(a[20:], b[20:])
    p, q = (np.exp(x.astype(np.float64)) for x in (a, b))
    p, q = p / p.sum(1, keepdims=True), q / q.sum(1, keepdims=True)
    kl = (p * np.log(p / q)).sum(1)
    one = tally.result("b", "a", compare.Threshold())
    assert one.rows == 50 and one.passed
    np.testing.assert_allclose([one.mean_kl, one.max_kl], [kl.mean(), kl.max()], rtol=1e-9)
    np.testing.assert_allclose(one.max_diff, np.abs(a - b).max(), rtol=1e-6)
    assert one.top1 == (a.argmax(1) == b.argmax(1)).mean()


def test_nan_never_passes() -> None:
    tally = compare.Tally()
    bad = np.zeros((2, 4), np.float32)
    bad[1, 2] = np.nan
    tally.add(np.zeros((2, 4), np.float32), bad)
    assert not tally.result("b", "a", compare.Threshold(max_diff=1e9)).passed
    tally.add(np.zeros((2, 4), np.float32), np.zeros((2, 4), np.float32))
    assert not tally.result("b", "a", compare.Threshold(mean_kl=1e9)).passed
