"""Memory of a build against the plan's size, and the time from opening an engine to its first token.

    python bench/footprint.py

Each build and each start runs in a process of its own; peak memory is the kernel's high-water mark of resident pages,
which counts the mapped pages of the checkpoint too.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import common

START = """
import json, sys, time
begin = time.perf_counter()
from plansmith.runtime.engine import Engine
from plansmith.runtime.sampling import SamplingParams
imported = time.perf_counter()
engine = Engine.open(sys.argv[1], num_threads=2)
opened = time.perf_counter()
ids = json.load(open(sys.argv[2]))["single"]["prompt_ids"]
engine.generate([ids], SamplingParams(max_tokens=1, temperature=0.0))
first = time.perf_counter()
engine.close()
times = {"import_s": imported - begin, "open_s": opened - imported, "open_to_first_token_s": first - imported}
print(json.dumps(times))
"""


def peak_rss_of(command: list[str]) -> int:
    """Run `command` and return its own peak resident bytes; its children are not counted."""
    process = subprocess.Popen(command, stdout=sys.stderr)
    _, status, usage = os.wait4(process.pid, 0)
    if status != 0:
        raise SystemExit(f"{' '.join(command)} ended with status {status}")
    return usage.ru_maxrss * 1024


def measure_build(precision: str) -> dict[str, Any]:
    """Return the peak memory of a cpu build from scratch and the size of its plan."""
    out = common.WORK / f"footprint-{precision}"
    shutil.rmtree(out, ignore_errors=True)
    common.WORK.mkdir(parents=True, exist_ok=True)
    command = [*common.PLANSMITH, "build", str(common.CHECKPOINT), "-o", str(out)]
    peak = peak_rss_of([*command, "--target", "cpu", "--precision", precision])
    plan = sum(f.stat().st_size for f in (out / "targets" / "cpu").glob("*.plan"))
    report = json.loads((out / "build_report.json").read_text())
    shutil.rmtree(out)
    return {"peak_rss_bytes": peak, "plan_bytes": plan, "ratio": peak / plan, "report": report}


def measure_start(engine_dir: Path, samples: int = 5) -> list[dict[str, float]]:
    """Return the start times of `samples` fresh processes over a plan that lies in the file cache."""
    command = [sys.executable, "-c", START, str(engine_dir), str(common.WORKLOAD)]
    runs = [json.loads(subprocess.check_output(command)) for _ in range(samples + 1)]
    return runs[1:]


def main() -> None:
    """Measure, print the table, store the results."""
    common.demo_checkpoint()
    rows, results = [], {}
    for precision in ("fp32", "bf16", "int8", "int4"):
        build = measure_build(precision)
        starts = measure_start(common.engine(precision))
        first = [run["open_to_first_token_s"] for run in starts]
        imports = [run["import_s"] for run in starts]
        rows.append(
            [
                precision,
                f"{build['plan_bytes'] / 1e6:.0f}",
                f"{build['peak_rss_bytes'] / 1e6:.0f}",
                f"{build['ratio']:.2f}",
                common.spread(first, 3),
                common.spread(imports, 3),
            ]
        )
        results[precision] = {**build, "starts": starts}
    header = ["precision", "plan MB", "build peak MB", "peak / plan", "open to first token s", "import s"]
    print(common.table(header, rows))
    common.store("footprint", results)


if __name__ == "__main__":
    main()
