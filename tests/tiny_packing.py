"""The published packing rules of AWQ and GPTQ as plain loops over integers, and checkpoints written by them."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from tiny_models import make_tiny
from tiny_quantized import linear_names, rewrite

Array = np.ndarray


@dataclasses.dataclass(frozen=True)
class Grouped:
    """A weight as integers: codes (N, K) and zeros (N, G) from 0, scales (N, G) float16."""

    codes: Array
    scales: Array
    zeros: Array

    @property
    def plain(self) -> Array:
        """(N, K) float32, element by element."""
        n, k = self.codes.shape
        group = k // self.scales.shape[1]
        out = np.zeros((n, k), np.float32)
        for row in range(n):
            for column in range(k):
                g = column // group
                difference = int(self.codes[row, column]) - int(self.zeros[row, g])
                out[row, column] = np.float32(difference) * np.float32(self.scales[row, g])
        return out


def make_grouped(
    n: int, k: int, group: int, seed: int, *, bits: int = 4, zero: int | None = None, low_zero: int = 0
) -> Grouped:
    """Return random integers; `zero`: of all groups, else each its own from low_zero up."""
    random = np.random.default_rng(seed)
    top = 1 << bits
    groups = k // group
    zeros = random.integers(low_zero, top, (n, groups)) if zero is None else np.full((n, groups), zero)
    scales = random.uniform(0.001, 0.02, (n, groups)).astype(np.float16)
    return Grouped(random.integers(0, top, (n, k)), scales, zeros)


def word(values: list[int], bits: int) -> int:
    """Return a signed 32-bit word with the first value in its lowest bits."""
    total = 0
    for place, value in enumerate(values):
        total |= value << (place * bits)
    return total - (1 << 32) if total >= 1 << 31 else total


def along_columns(values: Array, bits: int, order: tuple[int, ...] | None = None) -> Array:
    """Pack (R, C) into (R, C * bits / 32): in each run of columns, place i takes column order[i]."""
    per_word = 32 // bits
    places = order or tuple(range(per_word))
    rows, columns = values.shape
    out = np.zeros((rows, columns // per_word), np.int32)
    for row in range(rows):
        for n in range(columns // per_word):
            run = [int(values[row, n * per_word + column]) for column in places]
            out[row, n] = word(run, bits)
    return out


def along_rows(values: Array, bits: int) -> Array:
    """Pack (R, C) into (R * bits / 32, C)."""
    return along_columns(values.T, bits).T


def make_packed(
    path: Path,
    pack: Callable[[str, Grouped], dict[str, Array]],
    config: dict[str, Any],
    group: int,
    family: str = "llama",
    **options: Any,
) -> tuple[Path, dict[str, Grouped]]:
    """Write a tiny checkpoint whose blocks are packed; return it and the integers by module name.

    pack : (module, integers) -> its tensors by last name
    group : inputs of a group, -1 = all of them
    options : of make_grouped
    """
    make_tiny(family, path, num_hidden_layers=1)
    weights: dict[str, Grouped] = {}

    def change(tensors: dict[str, Any]) -> None:
        for seed, name in enumerate(linear_names(tensors)):
            n, k = tensors.pop(f"{name}.weight").shape
            weights[name] = make_grouped(n, k, k if group == -1 else group, seed, **options)
            for leaf, value in pack(name, weights[name]).items():
                tensors[f"{name}.{leaf}"] = value

    rewrite(path, change, {"quantization_config": config})
    return path, weights
