"""What the benchmarks share: the demo checkpoint, engines of it, the machine's description, and result files."""

from __future__ import annotations

import json
import os
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
WORK = ROOT / "build" / "bench-engines"
RESULTS = ROOT / "docs" / "results"
CHECKPOINT = ROOT / "demo" / "smollm2"
WORKLOAD = ROOT / "bench" / "workloads" / "workload16.json"
PLANSMITH = [sys.executable, "-m", "plansmith.cli"]


def demo_checkpoint() -> Path:
    """Return the directory of SmolLM2-135M-Instruct, fetched if it is not there."""
    subprocess.run([*PLANSMITH, "checkpoint", "demo", "-o", str(CHECKPOINT)], check=True, stdout=sys.stderr)
    return CHECKPOINT


def engine(precision: str, *flags: str, name: str | None = None) -> Path:
    """Return an engine directory with the cpu target of the demo checkpoint at `precision`, built if it is stale.

    One that `plansmith build` cannot add to, of another model or with files it cannot read, is replaced.
    """
    out = WORK / (name or precision)
    out.parent.mkdir(parents=True, exist_ok=True)
    command = [*PLANSMITH, "build", str(demo_checkpoint()), "-o", str(out), "--target", "cpu"]
    command += ["--precision", precision, *flags]
    there = out.exists()
    failed = subprocess.run(command, check=not there, stdout=sys.stderr).returncode
    if failed:
        subprocess.run([*command, "--force"], check=True, stdout=sys.stderr)
    return out


def workload() -> dict[str, Any]:
    """Return the fixed workload: `single`, `prefill`, `requests16`, `shared_prefix16`, as token ids of SmolLM2."""
    loaded: dict[str, Any] = json.loads(WORKLOAD.read_text())
    return loaded


def machine() -> dict[str, Any]:
    """Return what a reader needs to place a number: processor, cores, instruction sets, memory, versions, date."""
    cpuinfo = Path("/proc/cpuinfo").read_text() if Path("/proc/cpuinfo").exists() else ""
    fields = dict(
        line.split(":", 1) for line in cpuinfo.split("\n\n")[0].replace("\t", "").splitlines() if ":" in line
    )
    wanted = ("avx2", "fma", "f16c", "avx512f", "avx512_vnni", "avx512_bf16", "amx_int8")
    flags = fields.get("flags", "").split()
    return {
        "processor": f"{fields.get('model name', platform.processor()).strip()}, family "
        f"{fields.get('cpu family', '?').strip()} model {fields.get('model', '?').strip()}",
        "cores": os.cpu_count(),
        "instruction_sets": [flag for flag in wanted if flag in flags],
        "memory_gib": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30),
        "python": platform.python_version(),
        "system": platform.platform(),
        "date": time.strftime("%Y-%m-%d"),
    }


def spread(values: Sequence[float], digits: int = 1) -> str:
    """Return `median (min-max, n)` of the samples."""
    low, high = min(values), max(values)
    return f"{statistics.median(values):.{digits}f} ({low:.{digits}f}-{high:.{digits}f}, n={len(values)})"


def table(header: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    """Return a markdown table."""
    lines = ["| " + " | ".join(header) + " |", "|" + "---|" * len(header)]
    lines += ["| " + " | ".join(str(cell) for cell in row) + " |" for row in rows]
    return "\n".join(lines)


def store(name: str, results: dict[str, Any]) -> None:
    """Write docs/results/<name>.json, the machine beside the results; paths are relative to the repository."""
    RESULTS.mkdir(parents=True, exist_ok=True)
    path = RESULTS / f"{name}.json"
    text = json.dumps({"machine": machine(), **results}, indent=1) + "\n"
    path.write_text(text.replace(f"{ROOT}/", ""))
    print(f"\nstored in {path.relative_to(ROOT)}")
