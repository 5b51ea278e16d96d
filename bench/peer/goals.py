"""What plansmith's cpu target is to reach, as data, and whether it does."""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Sequence
from typing import Any

from .cases import TESTS
from .results import Results, better
from .statistic import Spread, round_ratios


@dataclasses.dataclass(frozen=True)
class Goal:
    """One wanted number of one of our variants, or of the best of them.

    ours  : our variant; "" = the one with the best median, as a peer is compared at the best of its precisions
    bits  : compare with the peers of these bits a weight; 0 = with all
    ratio : ours over the best peer's: at least this where more is better, at most where less is
    limit : of the number itself, beside or instead of a ratio
    """

    name: str
    test: str
    metric: str
    ours: str = ""
    bits: int = 0
    ratio: float | None = None
    limit: float | None = None
    unit: str = ""


GOALS = (
    Goal("16 at once: generated tokens/s", "conc16", "generated_tokens_per_s", ratio=3.0),
    Goal("16 at once: mean TTFT", "conc16", "ttft_mean_s", ratio=0.5),
    Goal("prompt of 512: tokens/s", "prefill", "prefill_tokens_per_s", ratio=1.6),
    Goal("prompt of 512: share of the int8 rate", "prefill", "arithmetic_share", "int8", limit=0.6),
    Goal("one request, 4 bits: tokens/s", "single", "decode_tokens_per_s", "int4", 4, ratio=1.6),
    Goal("one request, 8 bits: tokens/s", "single", "decode_tokens_per_s", "int8", 8, ratio=1.7),
    Goal("one request, float32: tokens/s", "single", "decode_tokens_per_s", "fp32", 32, ratio=1.25),
    Goal("one request, 4 bits: share of the bandwidth", "single", "bandwidth_share", "int4", limit=0.65),
    Goal("one request, 8 bits: share of the bandwidth", "single", "bandwidth_share", "int8", limit=0.65),
    Goal("one request, float32: share of the bandwidth", "single", "bandwidth_share", "fp32", limit=0.65),
    Goal("16 with a shared prefix: tokens/s", "shared16", "generated_tokens_per_s", ratio=4.0),
    Goal("peak memory of all tests once", "memory", "peak_rss_mb", "int8", limit=641.0, unit=" MB"),
    Goal("start to first token", "start", "start_to_first_token_s", "int8", limit=0.5, unit=" s"),
)
# Of a model of random weights: nowhere behind.
EVEN_GOALS = tuple(
    dataclasses.replace(goal, ratio=1.0, limit=None) for goal in GOALS if goal.ratio is not None
)


def judge(goal: Goal, results: Results) -> dict[str, Any] | None:
    """Return a goal's verdict; None where a run has not what the goal needs.

    {"goal", "ours", "value", "got", "wanted", "at_least", "unit", "met"}, and beside a peer {"peer", "peer_value",
    "low", "high"}: `value` and `peer_value` are medians of the number, `got` the median of the rounds' ratios.
    """
    name = f"plansmith {goal.ours}" if goal.ours else best_ours(results, goal.test, goal.metric)
    ours = results.values(name, goal.test, goal.metric) if name else {}
    if name is None or not ours:
        return None
    value = statistics.median(ours.values())
    if goal.test == "memory":
        if not {sample["test"] for sample in results.samples}.issuperset(TESTS):
            return None
        value = results.memory_of_all_tests_once(name) or value
    verdict: dict[str, Any] = {"goal": goal.name, "ours": name, "value": value}
    if goal.limit is not None:
        more = better(goal.metric) > 0
        met = value >= goal.limit if more else value <= goal.limit
        return verdict | {
            "got": value,
            "wanted": goal.limit,
            "at_least": more,
            "unit": goal.unit,
            "met": met,
        }
    assert goal.ratio is not None
    peer = best_peer(results, goal.test, goal.metric, goal.bits)
    if peer is None:
        return None
    theirs = results.values(peer, goal.test, goal.metric)
    ratios = round_ratios(ours, theirs)
    if not ratios:
        return None
    got = Spread.of(ratios)
    more = better(goal.metric) > 0
    return verdict | {
        "peer": peer,
        "peer_value": statistics.median(theirs.values()),
        "got": got.median,
        "low": got.low,
        "high": got.high,
        "wanted": goal.ratio,
        "at_least": more,
        "unit": " x",
        "met": got.median >= goal.ratio if more else got.median <= goal.ratio,
    }


def best_peer(results: Results, test: str, metric: str, bits: int = 0) -> str | None:
    """Return the peer with the best median; None where none ran."""
    names = [name for name in results.peers() if bits == 0 or results.bits(name) == bits]
    return _best(results, names, test, metric)


def best_ours(results: Results, test: str, metric: str) -> str | None:
    """Return our variant with the best median, of those with all the machine's kernels; None where none ran."""
    return _best(results, results.ours(), test, metric)


def _best(results: Results, names: Sequence[str], test: str, metric: str) -> str | None:
    medians = {
        name: statistics.median(values.values())
        for name in names
        if (values := results.values(name, test, metric))
    }
    return max(medians, key=lambda name: better(metric) * medians[name], default=None)


def judge_all(goals: Sequence[Goal], results: Results) -> list[dict[str, Any]]:
    """Return the verdicts of the goals that the run can judge."""
    return [verdict for goal in goals if (verdict := judge(goal, results)) is not None]
