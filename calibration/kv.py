"""Calibrates the KV cache of a model whose layers are quantized already."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from .recipes import kv_entries


def calibrate_kv(model: Any, kv_cache: str, loop: Callable[[Any], None]) -> None:
    """Give the quantizers of K and V their scales, and leave all others as they are.

    loop : runs the samples through the model
    """
    from modelopt.torch.quantization.conversion import set_quantizer_by_cfg
    from modelopt.torch.quantization.model_calib import enable_stats_collection, finish_stats_collection

    set_quantizer_by_cfg(model, kv_entries(kv_cache))
    quantizers = [
        module
        for name, module in model.named_modules()
        if name.endswith(("k_bmm_quantizer", "v_bmm_quantizer"))
    ]
    for one in quantizers:
        enable_stats_collection(one)
    loop(model)
    for one in quantizers:
        finish_stats_collection(one)
