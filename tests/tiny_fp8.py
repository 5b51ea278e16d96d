"""Tiny checkpoints of FP8 weights with a scale for each block of 128 x 128."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
from tiny_models import make_tiny
from tiny_quantized import linear_names, rewrite

BLOCKS = {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [128, 128]}
SIZES = {
    "hidden_size": 256,
    "intermediate_size": 384,
    "head_dim": 48,
    "num_attention_heads": 8,
    "num_hidden_layers": 1,
}


def to_fp8(w: np.ndarray, scale: np.ndarray) -> np.ndarray:
    return (w / scale).astype(ml_dtypes.float8_e4m3fn)


def make_blocks(path: Path, family: str = "qwen3", **change: Any) -> dict[str, np.ndarray]:
    """Write a model of 128 x 128 blocks; return its plain weights, block by block."""
    make_tiny(family, path, **{**SIZES, **change})
    plain = {}

    def quantize(tensors: dict[str, Any]) -> None:
        for name in linear_names(tensors):
            w = tensors[f"{name}.weight"].numpy()
            rows, columns = -(-w.shape[0] // 128), w.shape[1] // 128
            scales = np.empty((rows, columns), np.float32)
            codes, plain[name] = np.empty(w.shape, ml_dtypes.float8_e4m3fn), np.empty(w.shape, np.float32)
            for i in range(rows):
                for j in range(columns):
                    block = slice(i * 128, i * 128 + 128), slice(j * 128, j * 128 + 128)
                    scales[i, j] = np.abs(w[block]).max() / 448 * (1 + i + j)
                    codes[block] = to_fp8(w[block], scales[i, j])
                    plain[name][block] = codes[block].astype(np.float32) * scales[i, j]
            tensors[f"{name}.weight"] = fp8_tensor(codes)
            tensors[f"{name}.weight_scale_inv"] = scales

    rewrite(path, quantize, {"quantization_config": BLOCKS})
    return plain


def fp8_tensor(codes: np.ndarray) -> Any:
    import torch

    return torch.from_numpy(codes.view(np.uint8).copy()).view(torch.float8_e4m3fn)
