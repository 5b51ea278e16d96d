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

AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)
AWQ_CONFIG = {
    "quant_method": "awq",
    "bits": 4,
    "group_size": 32,
    "zero_point": True,
    "version": "gemm",
    "modules_to_not_convert": None,
}
GPTQ_CONFIG = {
    "quant_method": "gptq",
    "bits": 4,
    "group_size": 32,
    "desc_act": False,
    "sym": True,
    "damp_percent": 0.01,
    "true_sequential": True,
    "static_groups": False,
    "model_name_or_path": None,
    "checkpoint_format": "gptq",
    "meta": {"quantizer": ["gptqmodel:4.2.0"]},
}


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


def _awq(name: str, weight: Grouped) -> dict[str, np.ndarray]:
    return {
        "qweight": along_columns(weight.codes.T, 4, AWQ_ORDER),
        "qzeros": along_columns(weight.zeros.T, 4, AWQ_ORDER),
        "scales": weight.scales.T,
    }


def make_awq(
    path: Path, family: str = "llama", config: dict[str, Any] = AWQ_CONFIG, **options: Any
) -> tuple[Path, dict[str, Grouped]]:
    """Write an AWQ checkpoint; see make_packed."""
    return make_packed(path, _awq, config, config["group_size"], family, **options)


def make_gptq(
    path: Path, family: str = "llama", change: dict[str, Any] | None = None, **options: Any
) -> tuple[Path, dict[str, Grouped]]:
    """Write a GPTQ checkpoint; `change`: fields of its config; see make_packed."""
    config = {**GPTQ_CONFIG, **(change or {})}
    bits, group = config["bits"], config["group_size"]
    less = 1 if config["checkpoint_format"] == "gptq" else 0

    def pack(name: str, weight: Grouped) -> dict[str, np.ndarray]:
        k = weight.codes.shape[1]
        order = [column // (k if group == -1 else group) for column in range(k)]
        return {
            "qweight": along_rows(weight.codes.T, bits),
            "qzeros": along_columns(weight.zeros.T - less, bits),
            "scales": weight.scales.T,
            "g_idx": np.array(order, np.int32),
        }

    return make_packed(path, pack, config, group, family, bits=bits, **options)
