"""Prefill attention: TFLOP/s beside torch's, whole prompts and a chunk; then other tiles."""

from __future__ import annotations

import itertools

from attention_problem import TORCH, Case, Problem, bound, relative_errors
from bench_device import Device
from finding import Findings
from plansmith.plugins.paged_attention import spec
from sdpa_peer import functions
from stages import GOALS
from tile_sweep import sweep


def run(device: Device, findings: Findings) -> None:
    """Time whole prompts and a chunk of 2048 rows behind 14336, then sweep at 4096."""
    shapes = device.pick(
        ((4096, 4096), (1024, 1024), (16384, 16384), (2048, 16384), (2048, 2048), (8192, 8192)),
        ((24, 24), (8, 24)),
    )
    for dtype, (rows, length) in itertools.product(device.dtypes(), shapes):
        case = f"{rows} rows of {length}, {dtype}"
        if findings.seconds_left() < 25:
            findings.skip(case, "no time left")
            continue
        with findings.guarded(case):
            measure(device, findings, case, dtype, rows, length)
    found = problem(device, device.dtypes()[-1], *shapes[0])
    sweep(
        device,
        findings,
        device.dtypes()[-1],
        found,
        tiles(spec.prefill_tile(found.case.attention), device.dry_run),
        function="prefill_tile",
        kernel_of=spec.prefill_kernel,
        unit="TFLOP/s",
        amount=found.cost().num_operations / 1e12,
    )


def problem(device: Device, dtype: str, rows: int, length: int) -> Problem:
    """Return one sequence's prefill over a paged pool."""
    heads = device.pick((32, 8, 128), (8, 2, 32))
    attention = spec.Attention(dtype, "same", *heads, sm=device.sm())  # type: ignore[arg-type]
    case = Case(attention, (rows,), (length,), block_size=device.pick(64, 16), query_rows=0)
    return Problem(device, case)


def measure(device: Device, findings: Findings, case: str, dtype: str, rows: int, length: int) -> None:
    """Compare ours with each backend's result, then time them in turn; torch reads K and V as one piece."""
    found = problem(device, dtype, rows, length)
    a = found.case.attention
    q = found.q.view(rows, a.num_heads, a.head_dim).transpose(0, 1).contiguous()
    keys, values = (x.to(TORCH[dtype]).contiguous() for x in found.held(0, length))
    peers = functions(q, keys, values, device.dry_run)
    ours = found.attend().clone()
    for peer, function in list(peers.items()):
        theirs = function().transpose(0, 1).reshape(rows, -1)
        worst = float(relative_errors(ours, theirs.double(), a.head_dim).max())
        # Both round, so two bounds; a NaN is no match either.
        if not worst <= 2 * bound(dtype):
            findings.note(f"{case}: {peer}", f"differs by {worst:.2e}, so it is not compared in time")
            del peers[peer]
    findings.note(f"{case}: backends that take it", ", ".join(peers) or "none", minor=True)
    times = device.times({"ours": found.attend, **peers}, rounds=9)
    operations = found.cost().num_operations
    rates = {who: operations / seconds / 1e12 for who, seconds in times.items()}
    fastest = max(peers, key=lambda who: rates[who]) if peers else ""
    detail = ", ".join(f"{who} {rate:.0f}" for who, rate in rates.items())
    findings.rate(case, rates["ours"], "TFLOP/s", fastest, rates.get(fastest), GOALS["prefill"], detail)


def tiles(now: spec.Tile, dry_run: bool) -> list[spec.Tile]:
    """Return what is shipped, then others: wgmma takes 64 rows a warp group of 4, so 64 rows go with 4 warps."""
    found = [now]
    for n, stages in itertools.product((128, 64, 32), (2, 3, 4)):
        found += [spec.Tile(128, n, 8, stages), spec.Tile(64, n, 4, stages), spec.Tile(128, n, 4, stages)]
    return list(dict.fromkeys(found))[: 2 if dry_run else 20]
