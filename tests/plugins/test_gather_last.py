"""Rows of hidden states, gathered bit for bit."""

from __future__ import annotations

import fast_interpreter  # noqa: F401
import numpy as np
import pytest
import torch
from plansmith.plugins.gather_last import reference, run


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
@pytest.mark.parametrize("hidden_size", [1, 576, 1025])
def test_rows_are_copied_bit_for_bit(dtype: torch.dtype, hidden_size: int) -> None:
    bits = torch.int32 if dtype == torch.float32 else torch.int16
    size = {torch.int32: 2**31 - 1, torch.int16: 2**15 - 1}[bits]
    codes = torch.randint(-size, size, (7, hidden_size), generator=torch.Generator().manual_seed(1)).to(bits)
    rows = np.array([6, 0, 0, 3, -1, 7], np.int32)
    out = run.gather_last(codes.view(dtype), torch.from_numpy(rows))
    assert out.dtype == dtype
    assert (out.view(bits).numpy() == reference.gather_last(codes.numpy(), rows)).all()


def test_no_rows_are_no_work() -> None:
    assert run.gather_last(torch.zeros(3, 8), torch.zeros(0, dtype=torch.int32)).shape == (0, 8)
