"""The samples of a run by engine, test and number, with the shares of the machine's peaks worked out."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

from .cases import Workload
from .roofline import ModelCost, arithmetic_share, bandwidth_share, bits_of


def better(metric: str) -> int:
    """Return 1 for a number of which more is better, -1 for one of which less is."""
    return 1 if metric.endswith(("_per_s", "_share")) else -1


@dataclasses.dataclass(frozen=True)
class Results:
    """What a run measured.

    samples : as the driver notes them
    facts   : of each engine, {"weight_bytes", "version", "load_s"}, {"warm_up_peak_rss_bytes"} if it ran every test
    """

    samples: Sequence[dict[str, Any]]
    facts: dict[str, dict[str, Any]]
    cost: ModelCost
    workload: Workload

    def engines(self) -> list[str]:
        """Return the engines that have samples, in the order they came first."""
        return list(dict.fromkeys(sample["engine"] for sample in self.samples))

    def peers(self) -> list[str]:
        """Return those that are not ours."""
        return [name for name in self.engines() if not name.startswith("plansmith ")]

    def ours(self) -> list[str]:
        """Return our variants with all the kernels of the machine: not those like `int8-avx2`."""
        return [name for name in self.engines() if name.startswith("plansmith ") and "-" not in name]

    def bits(self, engine: str) -> int:
        """Return the bits of an engine's weights."""
        return bits_of(engine.rpartition(" ")[2])

    def values(self, engine: str, test: str, metric: str) -> dict[int, float]:
        """Return a number of an engine in each round; `memory` is one too: the peak until then."""
        found: dict[int, float] = {}
        for sample in self.samples:
            if sample["engine"] != engine:
                continue
            value = self._value(sample, test, metric)
            if value is not None:
                found[sample["round"]] = max(value, found.get(sample["round"], value))
        return found

    def memory_of_all_tests_once(self, engine: str) -> float | None:
        """Return the peak in MB when an engine had run every test once; None where it did not.

        That is behind its warm-up, or, where that was short, behind the first round. Later rounds only fill prefix
        caches, up to what each engine is given for them.
        """
        warm = self.facts[engine].get("warm_up_peak_rss_bytes")
        if warm is not None:
            return float(warm) / 1e6
        peaks = self.values(engine, "memory", "peak_rss_mb")
        return peaks[min(peaks)] if peaks else None

    def _value(self, sample: dict[str, Any], test: str, metric: str) -> float | None:
        if test == "memory":
            peak = sample.get("peak_rss_bytes")
            return None if peak is None else peak / 1e6
        if sample["test"] != test:
            return None
        if metric == "arithmetic_share":
            requests = self.workload.tests[test]
            seconds = (
                len(requests[0]["prompt_ids"]) / sample["metrics"]["prefill_tokens_per_s"]
                if test == "prefill"
                else sample["wall_s"]
            )
            variant = sample["engine"].rpartition(" ")[2]
            return arithmetic_share(self.cost.operations(requests), seconds, variant, sample["peaks"])
        if metric in ("bandwidth_share", "sustained_bandwidth_share"):
            speed = sample["metrics"]["decode_tokens_per_s"]
            size = self.facts[sample["engine"]]["weight_bytes"]
            return bandwidth_share(speed, size, sample["peaks"], metric.startswith("sustained"))
        value: float | None = sample["metrics"].get(metric)
        return value
