"""NVFP4 rounding in plain torch, for ModelOpt's quantizers: its own is a CUDA kernel."""

from __future__ import annotations

from typing import Any

import torch

from .recipes import FP4_BLOCK, FP4_INPUT, FP4_WEIGHT

E2M1_MAX, E4M3_MAX = 6.0, 448.0
E4M3_MIN = 2.0**-9  # the smallest positive value


def round_weight(weight: torch.Tensor, amax: torch.Tensor) -> torch.Tensor:
    """Return a weight [..., K] as its exported NVFP4 form means it.

    amax : float32 (), largest magnitude of the tensors that share the outer scale
    No block's scale is below the smallest positive E4M3 number, as ModelOpt's export has it.
    """
    return _round(weight, amax, E4M3_MIN)


def round_input(x: torch.Tensor, amax: torch.Tensor) -> torch.Tensor:
    """Return an input [..., K] rounded as the graph's RoundInput does: a block whose scale rounds to 0 becomes 0.

    amax : float32 (), calibrated
    """
    return _round(x, amax, 0.0)


def _round(x: torch.Tensor, amax: torch.Tensor, least: float) -> torch.Tensor:
    outer = amax.float() / (E2M1_MAX * E4M3_MAX)
    blocks = x.float().unflatten(-1, (-1, FP4_BLOCK))
    scale = blocks.abs().amax(-1, keepdim=True) / (E2M1_MAX * outer)
    scale = scale.clamp(least, E4M3_MAX).to(torch.float8_e4m3fn).float() * outer
    scaled = torch.where(scale > 0, blocks / scale, torch.zeros_like(blocks))
    return (to_e2m1(scaled) * scale).flatten(-2).to(x.dtype)


def to_e2m1(x: torch.Tensor) -> torch.Tensor:
    """Return the nearest of 0, 0.5, 1, 1.5, 2, 3, 4, 6 and their negatives; of two the one with an even code."""
    magnitude = x.abs()
    step = torch.where(magnitude < 2, 0.5, torch.where(magnitude < 4, 1.0, 2.0))
    return (torch.round(x / step) * step).clamp(-E2M1_MAX, E2M1_MAX)


def register() -> None:
    """Make both known to ModelOpt under the names that recipes.py gives."""
    from modelopt.torch.quantization.nn import is_registered_quant_backend, register_quant_backend

    for name, function in ((FP4_WEIGHT, round_weight), (FP4_INPUT, round_input)):
        if not is_registered_quant_backend(name):
            register_quant_backend(name, _entry(function))


def _entry(function: Any) -> Any:
    def call(x: torch.Tensor, quantizer: Any) -> torch.Tensor:
        rounded: torch.Tensor = function(x, quantizer._amax)
        return rounded

    return call
