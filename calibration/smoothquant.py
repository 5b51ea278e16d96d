"""Finds SmoothQuant's alpha: how much of an input's outliers is moved into the weights."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any

import torch

from .calibrate import batches, logits, mean_kl
from .dataset import Samples
from .progress import Progress

# Of a layer's largest weight: what a column of zeros gets. It rounds to 0 where it stands beside that weight.
LEAST_SHARE = 1e-6
LEAST = 1e-8

ALPHAS = (0.5, 0.6, 0.7, 0.8, 0.9)
SEARCH_WINDOWS = 16  # of the calibration samples; the maxima that decide show up in few


def lift_zero_columns(model: Any, layers: Sequence[str]) -> None:
    """Give columns of zeros, as pruned weights have, one weight that is next to nothing.

    ModelOpt's factors of such columns are 0, at which it fails, or 0 / 0 where the input is 0 as well.
    """
    for name in layers:
        weight = model.get_submodule(name).weight
        with torch.no_grad():
            sizes = weight.abs()
            least = max(float(sizes.amax()) * LEAST_SHARE, LEAST)
            row = int(sizes.amax(dim=1).argmax())
            weight[row, sizes.amax(dim=0) < least] = least


def search_alpha(
    model: Any,
    samples: Samples,
    quantize: Callable[[Any, float, Sequence[torch.Tensor]], Any],
    batch_size: int,
    progress: Progress,
) -> tuple[float, dict[str, float]]:
    """Return the alpha whose model is nearest to the unquantized one, and every alpha's divergence in nats.

    model : unquantized; stays as it is, each candidate is made of a copy
    quantize : (copy, alpha, batches) -> the quantized copy
    Judged by the held-out windows, or by the last calibration window where there are none.
    """
    device = next(model.parameters()).device
    held_out = samples.held_out if len(samples.held_out) else samples.ids[-1:]
    data = batches(samples.ids[:SEARCH_WINDOWS], batch_size, device)
    judged = batches(held_out, batch_size, device)
    reference = [logits(model, one) for one in judged]
    found: dict[float, float] = {}
    for alpha in ALPHAS:
        progress.stage(f"smoothing with alpha {alpha:g}")
        candidate = quantize(copy.deepcopy(model), alpha, data)
        kls = [mean_kl(one, logits(candidate, ids)) for one, ids in zip(reference, judged, strict=True)]
        sizes = [ids.numel() for ids in judged]
        found[alpha] = sum(kl * size for kl, size in zip(kls, sizes, strict=True)) / sum(sizes)
        del candidate
    best = min(found, key=lambda alpha: found[alpha])
    return best, {f"{alpha:g}": kl for alpha, kl in found.items()}
