"""Makes what bench/gpu/pack.sh carries to a GPU: `carry.py cubins DIR`, `carry.py plan DIR`."""

from __future__ import annotations

import importlib
import shutil
import sys
from pathlib import Path

SM = 90


def cubins(directory: Path) -> None:
    """Write directory/kernels: every kernel of the catalog for SM 90, with its kernels.json."""
    from cubin_launch import source_key
    from plansmith.plugins import aot, bundle, catalog

    kernels = catalog.catalog(SM)
    key = source_key(
        kernels
    )  # of the sources before they are compiled: who changes one meanwhile makes it stale
    compiled = aot.compile_kernels(kernels, [SM], cache_dir=directory.parent / "gpu-kernel-cache")
    target = directory / "kernels"
    shutil.rmtree(target, ignore_errors=True)
    files = bundle.write_bundle(target, compiled, aot.triton_version(), key)
    print(f"{len(kernels)} kernels, {sum(file.stat().st_size for file in files)} bytes", file=sys.stderr)


def plan(directory: Path) -> None:
    """Write directory/tiny.rtx.plan, or nothing where tensorrt_rtx is not installed."""
    import stage_rtx

    try:
        trt = importlib.import_module("tensorrt_rtx")
    except ImportError as error:
        print(f"no plan is carried: {error}", file=sys.stderr)
        return
    (directory / stage_rtx.PLAN).write_bytes(stage_rtx.compile_plan(trt, stage_rtx.make_logger(trt)))


if __name__ == "__main__":
    {"cubins": cubins, "plan": plan}[sys.argv[1]](Path(sys.argv[2]))
