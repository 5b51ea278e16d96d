"""Sampling on torch tensors: by the interpreter or a GPU."""

from __future__ import annotations

from typing import Any

import torch

from ..torch_launch import launch
from . import spec

_TYPES = {"*fp32": torch.float32, "*i32": torch.int32, "*fp64": torch.float64, "*i64": torch.int64}


def make_workspace(num_rows: int, vocab_size: int, device: Any) -> torch.Tensor:
    """Return an uninitialized workspace, (bytes,) uint8."""
    return torch.empty(spec.workspace_bytes(num_rows, vocab_size), dtype=torch.uint8, device=device)


def sample(
    logits: torch.Tensor,
    rows: torch.Tensor,
    edits: torch.Tensor,
    masks: torch.Tensor,
    samples: torch.Tensor,
    workspace: torch.Tensor | None = None,
    **needs: bool,
) -> None:
    """Draw a token from each row, without waiting for a GPU.

    logits : (R, V) float32, contiguous
    rows, edits, masks : (R, 12), (any, 4), (any, (V+31)//32) int32: the words of psm_sampling_row,
    psm_logit_edit and masks
    samples : (R, 44) int32, written: the words of psm_row_sample; top ids and log-probabilities behind num_top are left
    workspace : of make_workspace; None = a new one
    needs : what of spec.steps' sampled, filtered, logprobs is not needed
    """
    num_rows, vocab_size = logits.shape
    if workspace is None:
        workspace = make_workspace(num_rows, vocab_size, logits.device)
    given: dict[str, Any] = {
        "logits": logits,
        "rows": rows,
        "edits": edits,
        "masks": masks,
        "samples": samples,
    }
    given |= spec.scalars(vocab_size)
    for name, region in spec.regions(num_rows, vocab_size).items():
        dtype = _TYPES[region.pointer]
        num_bytes = torch.Size(region.shape).numel() * dtype.itemsize
        given[name] = workspace[region.offset : region.offset + num_bytes].view(dtype)
    for step in spec.steps(num_rows, vocab_size, **needs):
        launch(step.kernel, step.grid, {name: given[name] for name in step.kernel.signature})
