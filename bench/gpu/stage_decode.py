"""Decode attention: GB/s beside the device's own copy, for Llama-3-8B's heads; then other tiles, stages and splits."""

from __future__ import annotations

import itertools

import torch
from attention_problem import Case, Problem
from bench_device import Device
from finding import Findings
from plansmith.plugins.paged_attention import spec
from stages import GOALS
from tile_sweep import sweep

KINDS = (("fp16", "same"), ("bf16", "same"), ("fp16", "fp8"), ("fp16", "int8"))
GOAL_BATCH, GOAL_CONTEXT = 64, 4096
MOST_BYTES = 36 * 2**30
SPLITS = (256, 512, 1024, 2048, 4096)


def run(device: Device, findings: Findings) -> None:
    """Time every batch, context and kind of pool, the goal's first; then sweep where the goal is."""
    contexts, batches = device.pick((4096, 1024, 32768), (200,)), device.pick((64, 1, 8, 256), (2,))
    kinds = [kind for kind in KINDS if kind[0] in device.dtypes()]
    for context, kind in itertools.product(contexts, kinds):
        for batch in batches:
            if findings.seconds_left() < 35 and context != contexts[0]:
                findings.skip(f"batch {batch}, context {context}, {words(kind)}", "no time left")
                continue
            with findings.guarded(f"batch {batch}, context {context}, {words(kind)}"):
                measure(device, findings, kind, batch, context)
    for kind in device.pick((("fp16", "same"), ("fp16", "fp8")), (("fp16", "same"),)):
        found = problem(device, kind, batches[0], contexts[0])
        sweep(
            device,
            findings,
            words(kind),
            found,
            tiles(spec.decode_tile(found.case.attention), device.dry_run),
            function="decode_tile",
            kernel_of=spec.decode_kernel,
            unit="GB/s",
            amount=found.cost().num_bytes / 1e9,
        )
    sweep_splits(device, findings, device.pick((1, 8, 64), (2,)), device.pick((4096, 32768), (200,)))


def words(kind: tuple[str, str]) -> str:
    """Return a kind of pool in words."""
    return f"{kind[0] if kind[1] == 'same' else kind[1]} KV"


def problem(
    device: Device, kind: tuple[str, str], batch: int, context: int, split_len: int | None = None
) -> Problem:
    """Return a step of one token for each of `batch` sequences that hold `context` positions."""
    heads = device.pick((32, 8, 128), (8, 2, 32))
    attention = spec.Attention(kind[0], kind[1], *heads, sm=device.sm())  # type: ignore[arg-type]
    chosen = split_len or device.pick(spec.split_len(attention, batch, context), 128)
    case = Case(attention, (1,) * batch, (context,) * batch, block_size=device.pick(64, 16), split_len=chosen)
    return Problem(device, case)


def measure(device: Device, findings: Findings, kind: tuple[str, str], batch: int, context: int) -> None:
    """Time one problem as spec would have it run."""
    case = f"batch {batch}, context {context}, {words(kind)}"
    size = batch * context * 8 * 128 * 2 * (2 if kind[1] == "same" else 1)
    if size > MOST_BYTES:
        findings.skip(case, f"pools of {size / 2**30:.0f} GiB")
        return
    found = problem(device, kind, batch, context)
    rate = gb_per_s(device, found)
    is_goal = (batch, context) == (GOAL_BATCH, GOAL_CONTEXT)
    findings.rate(
        case,
        rate,
        "GB/s",
        "copy",
        device.copy_rate() / 1e9,
        GOALS["decode"] if is_goal else None,
        minor=context != device.pick(GOAL_CONTEXT, context),
    )


def gb_per_s(device: Device, found: Problem) -> float:
    """Return the least bytes over the time."""
    seconds = device.times({"attend": found.attend}, rounds=9)["attend"]
    return found.cost().num_bytes / seconds / 1e9


def tiles(now: spec.Tile, dry_run: bool) -> list[spec.Tile]:
    """Return what is shipped, and others by how near they are to it: one constant changed, then two."""
    found = [
        spec.Tile(now.m, n, warps, stages)
        for n, warps, stages in itertools.product((32, 64, 128, 256), (2, 4, 8), (2, 3, 4, 5))
    ]

    def changes(other: spec.Tile) -> int:
        pairs = ((other.n, now.n), (other.num_warps, now.num_warps), (other.num_stages, now.num_stages))
        return sum(a != b for a, b in pairs)

    found = sorted(
        {*found, now}, key=lambda other: (changes(other), other.n, other.num_warps, other.num_stages)
    )
    return found[: 2 if dry_run else 24]


def sweep_splits(
    device: Device, findings: Findings, batches: tuple[int, ...], contexts: tuple[int, ...]
) -> None:
    """Time other lengths of a split; they are an argument, so nothing is compiled again."""
    for batch, context in itertools.product(batches, contexts):
        rates: dict[int, float] = {}
        for split_len in device.pick(SPLITS, (128, 256)):
            if findings.seconds_left() < 5:
                return
            found = problem(device, ("fp16", "same"), batch, context, split_len)
            rates[split_len] = gb_per_s(device, found)
            del found
        text = ", ".join(f"{length}: {rate:.0f}" for length, rate in rates.items())
        best = max(rates, key=lambda key: rates[key])
        findings.rate(
            f"sweep splits, batch {batch}, context {context}: {best}", rates[best], "GB/s", detail=text
        )
        if not device.dry_run:
            torch.cuda.empty_cache()
