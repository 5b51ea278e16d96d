"""Runs made up of round numbers, for the tests of what is computed from runs."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "bench"))

from peer import cases
from peer.results import Results
from peer.roofline import ModelCost

WORKLOAD = cases.read_workload(
    Path(__file__).resolve().parents[2] / "bench" / "workloads" / "workload16.json"
)
PEAKS = {
    "read_gb_s": 40.0,
    "read_sustained_gb_s": 20.0,
    "fma_gflop_s": 200.0,
    "bf16_gflop_s": 0.0,
    "int8_gop_s": 1000.0,
}
# 1000 weights in the layers, 100 in the logits product.
COST = ModelCost(1000, 100)


def sample(engine: str, round_idx: int, test: str, metrics: dict[str, float], **more: Any) -> dict[str, Any]:
    """Return a sample as the driver notes it."""
    own = {"wall_s": 2.0, "cpu_s": 4.0, "peak_rss_bytes": 300e6, "load_average": 1.0, "others_cpu_s": 0.5}
    return {
        "engine": engine,
        "round": round_idx,
        "test": test,
        "metrics": metrics,
        "peaks": PEAKS,
        **own,
        **more,
    }


def results(speeds: dict[str, list[float]], peak_rss_bytes: float = 300e6) -> Results:
    """Return a run in which each engine has these speeds in the rounds, at each test."""
    samples = []
    for engine, values in speeds.items():
        for round_idx, speed in enumerate(values):
            more = {"peak_rss_bytes": peak_rss_bytes}
            for test, metrics in (
                ("single", {"decode_tokens_per_s": speed, "ttft_s": 1 / speed}),
                ("prefill", {"prefill_tokens_per_s": 10 * speed}),
                (
                    "conc16",
                    {"generated_tokens_per_s": speed, "ttft_mean_s": 1 / speed, "ttft_p95_s": 2 / speed},
                ),
                ("shared16", {"generated_tokens_per_s": speed, "wall_s": 512 / speed}),
            ):
                samples.append(sample(engine, round_idx, test, metrics, **more))
            start = sample(engine, round_idx, "start", {"start_to_first_token_s": 10 / speed})
            del start["wall_s"], start["peak_rss_bytes"]
            samples.append(start)
    facts = {engine: {"weight_bytes": 100_000_000, "version": "1", "load_s": 0.5} for engine in speeds}
    return Results(samples, facts, COST, WORKLOAD)
