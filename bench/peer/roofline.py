"""The machine's peaks, what a model's tokens cost by arithmetic, and which share of the peaks a result is."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from .session import Request

_BITS = {
    "int4": 4,
    "q4_0": 4,
    "int8": 8,
    "q8_0": 8,
    "bf16": 16,
    "bfloat16": 16,
    "fp32": 32,
    "float32": 32,
    "f32": 32,
}
RATES = {4: "int8_gop_s", 8: "int8_gop_s", 16: "bf16_gflop_s", 32: "fma_gflop_s"}


def bits_of(variant: str) -> int:
    """Return the bits of a variant's weights; ValueError for a name without them."""
    for part in variant.split("-"):
        if part in _BITS:
            return _BITS[part]
    raise ValueError(f"no bits are known of variant {variant!r}; wanted one of {', '.join(_BITS)} in it")


def measure_peaks(threads: int) -> dict[str, Any]:
    """Return what so many cores can do at most, with the instructions of plansmith's kernels. Takes a second.

    {"read_gb_s", "read_sustained_gb_s", "fma_gflop_s", "bf16_gflop_s", "int8_gop_s", "threads"}; what the processor has
    no instructions for is 0
    """
    from plansmith.runtime import profile  # peers' own environments, which import this module too, have none

    peaks = profile.measure_peaks(threads)
    return {
        "read_gb_s": peaks.read_bytes_per_s / 1e9,
        "read_sustained_gb_s": peaks.read_sustained_bytes_per_s / 1e9,
        "fma_gflop_s": peaks.f32_ops_per_s / 1e9,
        "bf16_gflop_s": peaks.bf16_ops_per_s / 1e9,
        "int8_gop_s": peaks.int8_ops_per_s / 1e9,
        "threads": peaks.num_threads,
    }


@dataclasses.dataclass(frozen=True)
class ModelCost:
    """Operations of a decoder's matrix products: 2 a weight and token. Attention's own are not counted."""

    layer_weights: int
    logits_weights: int

    @classmethod
    def of(cls, checkpoint: Path) -> ModelCost:
        """Return those of a checkpoint of the Llama family."""
        config = json.loads((checkpoint / "config.json").read_text())
        hidden, heads = config["hidden_size"], config["num_attention_heads"]
        head = config.get("head_dim") or hidden // heads
        attention = 2 * hidden * head * (heads + config["num_key_value_heads"])
        mlp = 3 * hidden * config["intermediate_size"]
        return cls(config["num_hidden_layers"] * (attention + mlp), hidden * config["vocab_size"])

    def operations(self, requests: Sequence[Request]) -> int:
        """Return what the requests take; the last token that is generated is not read."""
        outputs = sum(request["output_len"] for request in requests)
        read = sum(len(request["prompt_ids"]) - 1 for request in requests) + outputs
        return 2 * (self.layer_weights * read + self.logits_weights * outputs)


def bandwidth_share(
    tokens_per_s: float, weight_bytes: int, peaks: dict[str, Any], sustained: bool = False
) -> float:
    """Return the share of the memory bandwidth that reading all weights once a token takes."""
    gb_s = peaks["read_sustained_gb_s" if sustained else "read_gb_s"]
    return float(tokens_per_s * weight_bytes / (gb_s * 1e9))


def arithmetic_share(operations: int, seconds: float, variant: str, peaks: dict[str, Any]) -> float | None:
    """Return the share of the rate that the variant's products could run at; None where that is not measured here."""
    rate = peaks[RATES[bits_of(variant)]]
    return operations / seconds / (rate * 1e9) if rate > 0 else None
