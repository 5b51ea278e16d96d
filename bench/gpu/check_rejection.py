"""Draft tokens verified on the device, by comparing and by rejection sampling: the reference's tokens, all of them."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import torch
from bench_device import Device
from finding import Findings
from plansmith.plugins.rejection import reference
from plansmith.plugins.rejection import run as rejection
from sampling_problem import ROW


def run(device: Device, findings: Findings) -> None:
    """Verify sequences with and without drafts, good ones and bad ones."""
    if device.shard:
        return
    chance = np.random.default_rng(device.seed)
    for vocab_size in device.pick((128256, 1000), (300,)):
        lens = chance.integers(0, 6, device.pick(20, 4))
        cu = np.concatenate([[0], lens.cumsum()]).astype(np.int32)
        with findings.guarded(f"rejection, {vocab_size} tokens, by comparing"):
            compare(device, findings, chance, cu, vocab_size)
        with findings.guarded(f"rejection, {vocab_size} tokens, by distributions"):
            reject(device, findings, chance, cu, vocab_size)


def compare(
    device: Device, findings: Findings, chance: np.random.Generator, cu: Any, vocab_size: int
) -> None:
    """Compare draft tokens with drawn ones, of which a third differ and one row has none."""
    drawn = chance.integers(0, vocab_size, cu[-1] + len(cu) - 1).astype(np.int32)
    first_rows = [cu[b] + b for b in range(len(cu) - 1)]
    draft = np.delete(drawn, [row + n for row, n in zip(first_rows, np.diff(cu), strict=True)])
    wrong = chance.random(len(draft)) < 0.3
    draft[wrong] = (draft[wrong] + 1) % vocab_size
    got = rejection.compare(*_on(device, drawn, draft, cu), int(np.diff(cu).max()))
    judge(findings, f"rejection, {vocab_size} tokens, by comparing", got, reference.compare(drawn, draft, cu))


def reject(device: Device, findings: Findings, chance: np.random.Generator, cu: Any, vocab_size: int) -> None:
    """Verify tokens that were drawn from a distribution near the target's."""
    num_rows, num_drafts = cu[-1] + len(cu) - 1, cu[-1]
    target = chance.exponential(size=(num_rows, vocab_size)).astype(np.float32) ** 6
    rows = np.zeros(num_rows, ROW)
    rows["seed"] = chance.integers(0, 2**63, num_rows)
    draft = np.empty((num_drafts, vocab_size), np.float32)
    tokens = np.empty(num_drafts, np.int32)
    for b, (first, end) in enumerate(itertools.pairwise(cu)):
        for i in range(first, end):
            # Twice the target's distribution is right, so about half are taken.
            near = target[i + b] * (1 + chance.random(vocab_size, dtype=np.float32))
            draft[i] = near if chance.random() < 0.7 else chance.permutation(near)
            wide = draft[i].astype(np.float64)
            tokens[i] = chance.choice(vocab_size, p=wide / wide.sum())
        rows["output_idx"][first + b : end + b + 1] = np.arange(end - first + 1) + 10 * b
    want = []
    for b, (first, end) in enumerate(itertools.pairwise(cu)):
        seeds = rows["seed"][first + b : end + b + 1].tolist()
        parts = (target[first + b : end + b + 1], draft[first:end], seeds, 10 * b, tokens[first:end].tolist())
        want.append(reference.reject(*parts))
    words = rows.view(np.int32).reshape(num_rows, -1).copy()
    got = rejection.reject(*_on(device, target, draft, words, tokens, cu), int(np.diff(cu).max()))
    judge(findings, f"rejection, {vocab_size} tokens, by distributions", got, want)


def judge(findings: Findings, case: str, got: Any, want: list[tuple[int, list[int]]]) -> None:
    """Compare accepted counts and tokens, -1 behind the last."""
    accepted, tokens = got
    width = tokens.shape[1]
    padded = [(list(emitted) + [-1] * width)[:width] for _, emitted in want]
    findings.equal(
        f"{case}: accepted", accepted, torch.tensor([count for count, _ in want], dtype=torch.int32)
    )
    findings.equal(f"{case}: tokens", tokens, torch.tensor(padded, dtype=torch.int32))


def _on(device: Device, *arrays: Any) -> list[torch.Tensor]:
    """Return the arrays on the device."""
    return [torch.from_numpy(array).to(device.name) for array in arrays]
