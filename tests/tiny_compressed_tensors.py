"""Tiny compressed-tensors checkpoints of every format, written from known codes."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
from plansmith.builder.scheme import ROW, WHOLE, Scheme
from tiny_fp8 import fp8_tensor
from tiny_models import make_tiny
from tiny_packing import along_columns, along_rows
from tiny_quantized import linear_names, rewrite

E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)

FP8 = {"num_bits": 8, "type": "float", "symmetric": True, "dynamic": False}
INT8 = {"num_bits": 8, "type": "int", "symmetric": True, "dynamic": False}
INT4 = {"num_bits": 4, "type": "int", "symmetric": True, "dynamic": False}
FP4 = {"num_bits": 4, "type": "float", "strategy": "tensor_group", "group_size": 16}
TOKEN = {"strategy": "token", "dynamic": True, "observer": None}
TENSOR, CHANNEL, GROUP = (
    {"strategy": "tensor"},
    {"strategy": "channel"},
    {"strategy": "group", "group_size": 32},
)
BLOCK = {"strategy": "block", "block_structure": [32, 32]}


@dataclasses.dataclass(frozen=True)
class Case:
    """A format: what its config group says, the scheme that is wanted, and its name."""

    format: str
    weights: dict[str, Any]
    inputs: dict[str, Any] | None
    scheme: Scheme
    name: str


CASES = {
    "fp8": Case(
        "float-quantized", {**FP8, **TENSOR}, {**FP8, **TENSOR}, Scheme("fp8", WHOLE, input="fp8"), "fp8"
    ),
    "fp8_channel": Case(
        "float-quantized",
        {**FP8, **CHANNEL},
        {**FP8, **TOKEN},
        Scheme("fp8", ROW, input="fp8", input_group=ROW),
        "fp8_per_channel",
    ),
    "fp8_naive": Case(
        "naive-quantized",
        {**FP8, **TENSOR},
        {**FP8, **TOKEN},
        Scheme("fp8", WHOLE, input="fp8", input_group=ROW),
        "fp8_dynamic",
    ),
    "fp8_block": Case(
        "float-quantized",
        {**FP8, **BLOCK},
        {**FP8, "strategy": "group", "group_size": 32, "dynamic": True},
        Scheme("fp8", 32, input="fp8", input_group=32),
        "fp8_blocks",
    ),
    "int8_dynamic": Case(
        "int-quantized",
        {**INT8, **CHANNEL},
        {**INT8, **TOKEN},
        Scheme("int8", ROW, input="int8", input_group=ROW),
        "int8_w8a8",
    ),
    "int8_static": Case(
        "int-quantized",
        {**INT8, **TENSOR},
        {**INT8, **TENSOR},
        Scheme("int8", ROW, input="int8"),
        "int8_w8a8",
    ),
    "w8a16": Case("pack-quantized", {**INT8, **CHANNEL}, None, Scheme("int8", ROW), "int8_wo"),
    "w8a16_group": Case("pack-quantized", {**INT8, **GROUP}, None, Scheme("int8", 32), "int8_wo"),
    "w4a16": Case(
        "pack-quantized", {**INT4, **GROUP, "actorder": "weight"}, None, Scheme("int4", 32), "int4_wo"
    ),
    "w4a16_channel": Case("pack-quantized", {**INT4, **CHANNEL}, None, Scheme("int4", 64), "int4_wo"),
    "w4a16_zeros": Case(
        "pack-quantized",
        {**INT4, **GROUP, "symmetric": False},
        None,
        Scheme("int4", 32, zero_points=True),
        "int4_wo",
    ),
    "w4a16_channel_zeros": Case(
        "pack-quantized",
        {**INT4, **CHANNEL, "symmetric": False},
        None,
        Scheme("int4", 64, zero_points=True),
        "int4_wo",
    ),
    "nvfp4": Case(
        "nvfp4-pack-quantized", FP4, {**FP4, "dynamic": "local"}, Scheme("fp4", 16, input="fp4"), "nvfp4"
    ),
    "nvfp4a16": Case("nvfp4-pack-quantized", FP4, None, Scheme("fp4", 16), "nvfp4_wo"),
}


def compressed_config(case: Case, **change: Any) -> dict[str, Any]:
    group = {
        "targets": ["Linear"],
        "weights": case.weights,
        "input_activations": case.inputs,
        "output_activations": None,
    }
    return {
        "quant_method": "compressed-tensors",
        "format": case.format,
        "quantization_status": "compressed",
        "global_compression_ratio": 1.5,
        "config_groups": {"group_0": group},
        "ignore": ["lm_head"],
        "kv_cache_scheme": None,
        "sparsity_config": {},
        "transform_config": {},
        "version": "0.12.2",
        **change,
    }


def make_compressed(
    name: str, path: Path, family: str = "llama", only: str = "", **change: Any
) -> tuple[Path, dict[str, np.ndarray]]:
    """Write a tiny checkpoint of a case; return it and its plain weights. `only`: modules with that in their name."""
    case = CASES[name]
    make_tiny(family, path, num_hidden_layers=1)
    plain: dict[str, np.ndarray] = {}

    def quantize(tensors: dict[str, Any]) -> None:
        for seed, module in enumerate(linear_names(tensors)):
            if only in module:
                n, k = tensors.pop(f"{module}.weight").shape
                leaves, plain[module] = write(case, n, k, np.random.default_rng(seed))
                tensors.update({f"{module}.{leaf}": value for leaf, value in leaves.items()})

    rewrite(path, quantize, {"quantization_config": compressed_config(case, **change)})
    return path, plain


def write(case: Case, n: int, k: int, random: np.random.Generator) -> tuple[dict[str, Any], np.ndarray]:
    """Return the tensors of a random layer and the weight that they stand for."""
    args = case.weights
    if case.format.startswith("nvfp4"):
        return _write_fp4(case, n, k, random)
    groups = {"tensor": 1, "channel": 1, "group": k // 32, "block": k // 32}[args["strategy"]]
    rows = {"tensor": 1, "channel": n, "group": n, "block": -(-n // 32)}[args["strategy"]]
    scale = random.uniform(0.001, 0.02, (rows, groups)).astype(ml_dtypes.bfloat16)
    per_row = scale.repeat(32, axis=0)[:n] if args["strategy"] == "block" else scale
    wide = np.broadcast_to(per_row.repeat(k // groups, axis=1), (n, k)).astype(np.float32)
    leaves: dict[str, Any] = {
        "weight_scale": bfloat16_tensor(scale[:, 0] if args["strategy"] == "tensor" else scale)
    }
    if case.inputs is not None and not case.inputs["dynamic"]:
        leaves["input_scale"] = np.array([0.5], np.float32)
    if args["type"] == "float":
        codes = random.normal(0, 100, (n, k)).astype(ml_dtypes.float8_e4m3fn)
        leaves["weight"] = fp8_tensor(codes)
        return leaves, codes.astype(np.float32) * wide
    bits = args["num_bits"]
    half = 1 << (bits - 1)
    codes = random.integers(-half, half, (n, k))
    zeros = np.zeros((n, groups), int) if args["symmetric"] else random.integers(-half, half, (n, groups))
    if case.format != "pack-quantized":
        leaves["weight"] = codes.astype(np.int8)
    else:
        leaves["weight_packed"] = along_columns(codes + half, bits)
        leaves["weight_shape"] = np.array([n, k], np.int64)
    if not args["symmetric"]:
        leaves["weight_zero_point"] = along_rows(zeros + half, bits)
    difference = codes - zeros.repeat(k // groups, axis=1)
    return leaves, difference.astype(np.float32) * wide


def _write_fp4(case: Case, n: int, k: int, random: np.random.Generator) -> tuple[dict[str, Any], np.ndarray]:
    codes = random.integers(0, 16, (n, k))
    packed = np.zeros((n, k // 2), np.uint8)
    plain = np.zeros((n, k), np.float32)
    scale = random.uniform(1, 400, (n, k // 16)).astype(ml_dtypes.float8_e4m3fn)
    outer = np.float32(2048.0)
    for row in range(n):
        for column in range(k):
            code = int(codes[row, column])
            packed[row, column // 2] |= code << (4 * (column % 2))
            value = E2M1[code & 7] * (-1 if code & 8 else 1)
            plain[row, column] = np.float32(value) * (np.float32(scale[row, column // 16]) / outer)
    leaves = {
        "weight_packed": packed,
        "weight_scale": fp8_tensor(scale),
        "weight_global_scale": np.array([outer], np.float32),
    }
    if case.inputs is not None:
        leaves["input_global_scale"] = np.array([4.0], np.float32)
    return leaves, plain


def bfloat16_tensor(values: np.ndarray) -> Any:
    import torch

    return torch.from_numpy(np.ascontiguousarray(values).view(np.uint16).copy()).view(torch.bfloat16)
