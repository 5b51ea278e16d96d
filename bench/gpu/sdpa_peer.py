"""torch's scaled_dot_product_attention, each backend that takes a problem: what prefill stands beside."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.bias import causal_lower_right

BACKENDS = {
    "flash": SDPBackend.FLASH_ATTENTION,
    "cudnn": SDPBackend.CUDNN_ATTENTION,
    "efficient": SDPBackend.EFFICIENT_ATTENTION,
}
CPU_BACKENDS = {"math": SDPBackend.MATH}


def functions(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, dry_run: bool
) -> dict[str, Callable[[], torch.Tensor]]:
    """Return the backends that take this problem, as functions that attend causally, the last rows at the end.

    q : (H, S, D); k, v : (KVH, KV, D) contiguous, in whatever form suits the peer best; KV >= S
    """
    heads, rows, _ = q.shape
    group = heads // k.shape[0]
    taken: dict[str, Callable[[], torch.Tensor]] = {}
    for name, backend in (CPU_BACKENDS if dry_run else BACKENDS).items():
        # Some backends take grouped heads as they are, others want K and V repeated; that is not in their time.
        for grouped in (True, False):
            keys = k if grouped else k.repeat_interleave(group, dim=0)
            values = v if grouped else v.repeat_interleave(group, dim=0)
            function = _attend(backend, q[None], keys[None], values[None], rows, grouped)
            if _works(function):
                taken[f"torch {name}"] = function
                break
    return taken


def _attend(
    backend: SDPBackend, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, rows: int, grouped: bool
) -> Callable[[], torch.Tensor]:
    """Return a call of one backend."""
    whole = rows == k.shape[2]
    mask = None if whole else causal_lower_right(rows, k.shape[2])

    def attend() -> torch.Tensor:
        with sdpa_kernel(backend):
            return torch.nn.functional.scaled_dot_product_attention(
                q, k, v, attn_mask=mask, is_causal=whole, enable_gqa=grouped
            )[0]

    return attend


def _works(function: Callable[[], torch.Tensor]) -> bool:
    """Return whether the backend takes the problem; torch says by an error."""
    try:
        function()
    except RuntimeError:
        return False
    return True
