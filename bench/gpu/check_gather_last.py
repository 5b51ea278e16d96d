"""gather_last: rows of hidden states, copied bit for bit; zeros for rows that are none."""

from __future__ import annotations

import torch
from attention_problem import TORCH
from bench_device import Device
from finding import Findings
from plansmith.plugins.gather_last.run import gather_last


def run(device: Device, findings: Findings) -> None:
    """Gather at odd sizes in every type."""
    if device.shard:
        return
    for dtype in (*(TORCH[name] for name in device.dtypes()), torch.float32):
        for tokens, hidden in device.pick(((4096, 4096), (77, 1000), (3, 5)), ((7, 50),)):
            with findings.guarded(f"gather_last: {dtype}, {tokens} x {hidden}"):
                held = device.normal(tokens, hidden, dtype=dtype)
                rows = device.integers(-2, tokens + 2, 40)
                inside = (rows >= 0) & (rows < tokens)
                want = held[rows.clamp(0, tokens - 1).long()] * inside[:, None]
                findings.equal(f"gather_last: {dtype}, {tokens} x {hidden}", gather_last(held, rows), want)
