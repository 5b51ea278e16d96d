"""Other constants for a kernel than its spec chooses, to see which should be shipped.

Every variant is compiled ahead of time, many at once in processes of their own, and launched through the driver: the
JIT would compile them one after another, which is most of a sweep's time.
"""

from __future__ import annotations

import contextlib
import os
import tempfile
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from attention_problem import Problem
from bench_device import Device
from cubin_launch import CubinLauncher, source_key
from finding import Findings
from plansmith.plugins import aot, bundle
from plansmith.plugins.kernel import Kernel
from plansmith.plugins.paged_attention import run, spec
from plansmith.runtime.errors import Error
from plansmith.runtime.executors import kernel_bundle

TileKernel = Callable[[spec.Attention], Kernel]


@contextlib.contextmanager
def tile(function: str, chosen: spec.Tile) -> Iterator[None]:
    """Let spec's `decode_tile` or `prefill_tile` return `chosen` within the block."""
    before = getattr(spec, function)
    setattr(spec, function, lambda *_: chosen)
    try:
        yield
    finally:
        setattr(spec, function, before)


def name(tile: spec.Tile) -> str:
    """Return a tile in words."""
    return f"m{tile.m} n{tile.n} warps {tile.num_warps} stages {tile.num_stages}"


def sweep(
    device: Device,
    findings: Findings,
    what: str,
    problem: Problem,
    tiles: Sequence[spec.Tile],
    *,
    function: str,
    kernel_of: TileKernel,
    unit: str,
    amount: float,
) -> None:
    """Time the problem with each tile, the shipped one first, and name the best.

    function, kernel_of : spec's "decode_tile" and decode_kernel, or "prefill_tile" and prefill_kernel
    amount : what a launch does, in `unit` times seconds
    """
    kernels = {}
    for chosen in tiles:
        with tile(function, chosen):
            kernels[chosen] = kernel_of(problem.case.attention)
    always = [] if function == "prefill_tile" else [spec.combine_kernel(problem.case.attention)]
    rates: dict[spec.Tile, float] = {}
    with tempfile.TemporaryDirectory() as scratch:
        launcher = _launcher(device, findings, what, [*kernels.values(), *always], Path(scratch))
        for chosen, kernel in kernels.items():
            if kernel.name not in launcher.bundle.kernels or findings.seconds_left() < 8:
                continue
            try:
                with tile(function, chosen), launcher.instead_of_jit(run):
                    seconds = device.times({"attend": problem.attend}, rounds=7)["attend"]
            except Exception as error:  # more shared memory than a block can have, most likely
                findings.skip(
                    f"sweep {what} {name(chosen)}", f"{type(error).__name__}: {error}"[:160], minor=True
                )
                continue
            rates[chosen] = amount / seconds
            findings.rate(f"sweep {what} {name(chosen)}", rates[chosen], unit, minor=True)
    if rates:
        best = max(rates, key=lambda key: rates[key])
        peer = f"shipped {name(tiles[0])}" if tiles[0] in rates else ""
        findings.rate(f"sweep best, {what}: {name(best)}", rates[best], unit, peer, rates.get(tiles[0]))


def _launcher(
    device: Device, findings: Findings, what: str, kernels: Sequence[Kernel], scratch: Path
) -> CubinLauncher:
    """Return a launcher of those kernels that compile."""

    def compiled(kernel: Kernel) -> aot.CompiledKernel | Error:
        try:
            return aot.compile_kernels([kernel], [device.sm()], 1)[0]
        except Error as error:
            return error

    with ThreadPoolExecutor(min(12, os.cpu_count() or 1)) as pool:
        made = list(pool.map(compiled, kernels))
    for kernel, one in zip(kernels, made, strict=True):
        if isinstance(one, Error):
            findings.skip(f"sweep {what} {kernel.name}", str(one)[:160], minor=True)
    folder = scratch / "kernels"
    good = [one for one in made if isinstance(one, aot.CompiledKernel)]
    bundle.write_bundle(folder, good, aot.triton_version(), source_key(kernels))
    return CubinLauncher(kernel_bundle.load(folder, device.sm()), device.dry_run)
