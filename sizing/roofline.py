"""How fast a model can be on a GPU at most: bytes over bandwidth, or operations over peak, whichever takes longer.

An upper bound: it counts what has to be read and multiplied, nothing else, and takes the datasheet's numbers as
reached. What a GPU really reaches of it is a factor that has to be measured (`efficiency`). Standard library only.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Literal

from ..runtime.errors import InvalidArgumentError
from .memory import ModelShape
from .skus import Sku

Bound = Literal["memory", "compute"]


@dataclasses.dataclass(frozen=True)
class Work:
    """What a plan reads and multiplies.

    weight_bytes : read in every step, whatever its size
    products : type of the factors ("float16", "int8", "fp8", "fp4") -> weights of the blocks that each token meets
    head : the same of the logits product, which only rows with logits meet
    kv_value_bytes : of a value in the KV pools
    windows : a layer's sliding window, 0 = none; () = no layer has one
    """

    weight_bytes: int
    products: Mapping[str, int]
    head: Mapping[str, int]
    kv_value_bytes: int
    windows: tuple[int, ...] = ()


@dataclasses.dataclass(frozen=True)
class Step:
    """What one step takes at the least.

    seconds : the longer of the two
    """

    num_bytes: float
    bytes_seconds: float
    operations_seconds: float

    @property
    def seconds(self) -> float:
        """The longer of the two."""
        return max(self.bytes_seconds, self.operations_seconds)

    @property
    def bound(self) -> Bound:
        """Which of the two it is."""
        return "memory" if self.bytes_seconds >= self.operations_seconds else "compute"


def decode_step(
    shape: ModelShape, work: Work, sku: Sku, *, batch: int, context: int, efficiency: float = 1.0
) -> Step:
    """Return a step in which each of `batch` sequences of `context` tokens gets one more."""
    seen = _positions(shape, work, context)
    row = 2 * shape.num_kv_heads * shape.head_dim * work.kv_value_bytes  # K and V of a position in a layer
    num_bytes = work.weight_bytes + batch * seen * row
    seconds = batch * (_product_seconds(sku, work.products) + _product_seconds(sku, work.head))
    seconds += batch * _attention_seconds(shape, sku, seen)
    return _step(sku, num_bytes, seconds, efficiency)


def prefill_seconds(
    shape: ModelShape, work: Work, sku: Sku, *, tokens: int, max_num_tokens: int, efficiency: float = 1.0
) -> float:
    """Return the seconds from a prompt of so many tokens to its first logits, in steps of at most max_num_tokens."""
    total, done = 0.0, 0
    row = 2 * shape.num_kv_heads * shape.head_dim * work.kv_value_bytes
    while done < tokens:
        chunk = min(max_num_tokens, tokens - done)
        seen = _mean_positions(shape, work, done, chunk)
        seconds = chunk * (_product_seconds(sku, work.products) + _attention_seconds(shape, sku, seen))
        if done + chunk == tokens:
            seconds += _product_seconds(sku, work.head)
        read = work.weight_bytes + row * (_positions(shape, work, done) + shape.num_layers * chunk)
        total += _step(sku, read, seconds, efficiency).seconds
        done += chunk
    return total


def check_efficiency(efficiency: float) -> None:
    """Raise InvalidArgumentError for a factor outside of 0 to 1."""
    if not 0.0 < efficiency <= 1.0:
        raise InvalidArgumentError(
            f"efficiency is {efficiency:g}, it must be above 0 and at most 1: the share of the datasheet's "
            "numbers that was measured, e.g. 0.7"
        )


def _step(sku: Sku, num_bytes: float, operations_seconds: float, efficiency: float) -> Step:
    return Step(num_bytes, num_bytes / sku.bandwidth_bytes_s / efficiency, operations_seconds / efficiency)


def _positions(shape: ModelShape, work: Work, context: int) -> int:
    """Return the positions that a token sees of so many, over all layers."""
    return sum(min(context, window or context) for window in work.windows or shape.num_layers * (0,))


def _mean_positions(shape: ModelShape, work: Work, done: int, chunk: int) -> float:
    """Return the positions that a token of a chunk sees on average, over all layers; `done` tokens come before it."""
    total = 0.0
    for window in work.windows or shape.num_layers * (0,):
        # Those up to the window's end see themselves and all before them, the others as many as it holds.
        growing = max(0, min(chunk, window - done)) if window else chunk
        total += growing * (2 * done + growing + 1) / 2 + (chunk - growing) * window
    return total / chunk


def _product_seconds(sku: Sku, products: Mapping[str, int]) -> float:
    """Return the time of one token's products: a multiplication and an addition a weight."""
    return sum(2.0 * count / _peak(sku, kind) for kind, count in products.items())


def _attention_seconds(shape: ModelShape, sku: Sku, seen: float) -> float:
    """Return the time of one token's scores and weighted sums over the positions that it sees in all layers."""
    return 4.0 * shape.num_heads * shape.head_dim * seen / sku.flops["float16"]


def _peak(sku: Sku, kind: str) -> float:
    """Return the operations a second of a type; those that a GPU lacks are computed as float16."""
    return sku.flops.get(kind, sku.flops["float16"])
