"""GatherLast on torch tensors: by the interpreter or a GPU."""

from __future__ import annotations

import torch

from ..torch_launch import launch
from . import spec

_ELEMENTS = {torch.float16: "fp16", torch.bfloat16: "bf16", torch.float32: "fp32"}


def gather_last(hidden: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
    """Return hidden[rows], zeros where a row is not in 0..T-1, without waiting for a GPU.

    hidden : (T, E) float16, bfloat16 or float32, contiguous; rows : (R,) int32
    """
    out = hidden.new_empty((len(rows), hidden.shape[1]))
    arguments = {"hidden": hidden, "rows": rows, "out": out}
    sizes = {"num_tokens": hidden.shape[0], "hidden_size": hidden.shape[1]}
    launch(
        spec.kernel(_ELEMENTS[hidden.dtype]), spec.grid(len(rows), hidden.shape[1]), {**arguments, **sizes}
    )
    return out
