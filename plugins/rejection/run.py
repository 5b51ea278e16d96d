"""Rejection on torch tensors: by the interpreter or a GPU."""

from __future__ import annotations

from typing import Any

import torch

from ..torch_launch import launch
from . import spec


def compare(
    drawn: torch.Tensor, draft_tokens: torch.Tensor, cu_draft_lens: torch.Tensor, max_draft_len: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return (num_accepted (B,), tokens (B, max_draft_len + 1)) int32, without waiting for a GPU.

    drawn : (R,) or (R, 44) int32: tokens, or samples; draft_tokens : (D,) int32; cu_draft_lens : (B+1,) int32
    max_draft_len : of the step, at most spec.MAX_DRAFT_LEN
    """
    num_seqs = len(cu_draft_lens) - 1
    outputs = _outputs(drawn, num_seqs, max_draft_len)
    arguments: dict[str, Any] = {"drawn": drawn, "drawn_stride": drawn.stride(0), **outputs}
    arguments |= {"draft_tokens": draft_tokens, "cu_draft_lens": cu_draft_lens}
    launch(spec.COMPARE, spec.grid(num_seqs), arguments)
    return outputs["num_accepted"], outputs["tokens"]


def reject(
    target: torch.Tensor,
    draft: torch.Tensor,
    rows: torch.Tensor,
    draft_tokens: torch.Tensor,
    cu_draft_lens: torch.Tensor,
    max_draft_len: int,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return (num_accepted, tokens) as compare does, of drafts that were drawn from known distributions.

    target, draft : (R, V), (D, V) float32 weights >= 0, contiguous, each row of a positive sum
    rows : (R, 12) int32, the words of psm_sampling_row
    """
    num_seqs, vocab_size = len(cu_draft_lens) - 1, target.shape[1]
    outputs = _outputs(rows, num_seqs, max_draft_len)
    arguments: dict[str, Any] = {"target": target, "draft": draft, "rows": rows, "vocab_size": vocab_size}
    arguments |= {"draft_tokens": draft_tokens, "cu_draft_lens": cu_draft_lens, **outputs}
    for name in ("target", "draft"):
        weights = arguments[name]
        sums = torch.empty(len(weights), dtype=torch.float64, device=weights.device)
        arguments[f"{name}_totals"] = sums
        launch(
            spec.TOTALS,
            spec.grid(len(weights)),
            {"weights": weights, "totals_of": sums, "vocab_size": vocab_size},
        )
    for kernel in (spec.ACCEPT, spec.RESIDUAL):
        launch(kernel, spec.grid(num_seqs), {name: arguments[name] for name in kernel.signature})
    return outputs["num_accepted"], outputs["tokens"]


def _outputs(like: torch.Tensor, num_seqs: int, max_draft_len: int) -> dict[str, Any]:
    if max_draft_len > spec.MAX_DRAFT_LEN:
        raise ValueError(
            f"max_draft_len is {max_draft_len}, at most {spec.MAX_DRAFT_LEN} can be verified at once"
        )
    return {
        "num_accepted": like.new_empty(num_seqs, dtype=torch.int32),
        "tokens": like.new_empty((num_seqs, max_draft_len + 1), dtype=torch.int32),
        "max_draft_len": max_draft_len,
    }
