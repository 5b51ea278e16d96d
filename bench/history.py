"""Results over time: a line of JSON a run in bench/history/<name>.jsonl, and how two runs compare.

A line is {"date", "commit", "changed", "machine", "threads", "rounds", "peaks": {name: median}, "others_cores",
"medians": {engine: {"<test>.<number>": {"median", "low", "high", "count"}}}}. Runs compare only on machines of the same
description (processor and cores). As the memory of a shared host is not equally fast every day, a ratio comes twice: as
it is, and divided by the ratio of the peak that bounds the number, which both runs measured.
"""

from __future__ import annotations

import dataclasses
import json
import statistics
import subprocess
import time
from pathlib import Path
from typing import Any

import common
from peer.results import Results, better
from peer.roofline import RATES, bits_of
from peer.statistic import Spread

FOLDER = common.ROOT / "bench" / "history"
# The numbers that are kept, of each test.
NUMBERS = {
    "single": ("decode_tokens_per_s", "ttft_s"),
    "prefill": ("prefill_tokens_per_s",),
    "conc16": ("generated_tokens_per_s", "ttft_mean_s"),
    "shared16": ("generated_tokens_per_s",),
    "start": ("start_to_first_token_s",),
    "memory": ("peak_rss_mb",),
}
_PEAKS = ("read_gb_s", "read_sustained_gb_s", "fma_gflop_s", "bf16_gflop_s", "int8_gop_s")


@dataclasses.dataclass(frozen=True)
class Change:
    """One number of one engine beside an earlier run.

    ratio      : above 1 is better, also for times and bytes
    normalised : what remains once the peaks of the two runs are accounted for
    noise      : half of the span of the samples as a share of the median, of the run where that is larger
    """

    engine: str
    number: str
    now: float
    ratio: float
    normalised: float
    noise: float


def commit(root: Path) -> tuple[str, bool]:
    """Return the short name of the commit and whether tracked files differ from it; ("", True) without git."""
    git = ["git", "-C", str(root)]
    try:
        name = subprocess.check_output([*git, "rev-parse", "--short=12", "HEAD"], text=True).strip()
        changed = subprocess.check_output([*git, "status", "--porcelain", "--untracked-files=no"], text=True)
    except (OSError, subprocess.CalledProcessError):
        return "", True
    return name, bool(changed.strip())


def same_machine(left: dict[str, Any], right: dict[str, Any]) -> bool:
    """Return whether two descriptions are of one kind of machine."""
    return all(left.get(key) == right.get(key) for key in ("processor", "cores"))


def entry(results: Results, threads: int) -> dict[str, Any]:
    """Return the line of a run."""
    name, changed = commit(common.ROOT)
    peaks = [sample["peaks"] for sample in results.samples]
    timed = [sample for sample in results.samples if "wall_s" in sample]
    medians: dict[str, dict[str, Any]] = {}
    for engine in results.engines():
        for test, numbers in NUMBERS.items():
            for number in numbers:
                values = list(results.values(engine, test, number).values())
                once = results.memory_of_all_tests_once(engine) if test == "memory" else None
                if once is not None:
                    values = [once]  # it only grows: a span would be no noise
                if values:
                    spread = dataclasses.asdict(Spread.of(values))
                    medians.setdefault(engine, {})[f"{test}.{number}"] = spread
    return {
        "date": time.strftime("%Y-%m-%dT%H:%M:%S"),
        "commit": name,
        "changed": changed,
        "machine": common.machine(),
        "threads": threads,
        "rounds": len({sample["round"] for sample in results.samples}),
        "peaks": {key: statistics.median(p[key] for p in peaks) for key in _PEAKS},
        "others_cores": statistics.median(s["others_cpu_s"] / s["wall_s"] for s in timed) if timed else 0.0,
        "medians": medians,
    }


def read(path: Path) -> list[dict[str, Any]]:
    """Return the runs of a file, oldest first; none where there is no file."""
    if not path.exists():
        return []
    return [json.loads(line) for line in path.read_text().splitlines() if line.strip()]


def append(path: Path, run: dict[str, Any]) -> None:
    """Add a run to a file."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a") as file:
        file.write(json.dumps(run) + "\n")


def last_like(runs: list[dict[str, Any]], run: dict[str, Any]) -> dict[str, Any] | None:
    """Return the newest run of the same kind of machine and as many threads; None where there is none."""
    like = [r for r in runs if same_machine(r["machine"], run["machine"]) and r["threads"] == run["threads"]]
    return like[-1] if like else None


def _bounding_peak(engine: str, number: str) -> str | None:
    """Return the name of the peak that bounds a number; None for what no peak bounds."""
    if number == "single.decode_tokens_per_s":
        return "read_sustained_gb_s"
    if number.startswith(("prefill.", "conc16.", "shared16.", "single.ttft")):
        return RATES[bits_of(engine.rpartition(" ")[2])]
    return None


def changes(now: dict[str, Any], then: dict[str, Any]) -> list[Change]:
    """Return what both runs measured, in the order of `now`."""
    found = []
    for engine, numbers in now["medians"].items():
        for number, value in numbers.items():
            earlier = then["medians"].get(engine, {}).get(number)
            if earlier is None or not earlier["median"] or not value["median"]:
                continue
            more = better(number) > 0
            ratio = value["median"] / earlier["median"] if more else earlier["median"] / value["median"]
            peak = _bounding_peak(engine, number)
            faster = now["peaks"][peak] / then["peaks"][peak] if peak and then["peaks"].get(peak) else 1.0
            noise = max(Spread(**value).noise, Spread(**earlier).noise)
            found.append(Change(engine, number, value["median"], ratio, ratio / (faster or 1.0), noise))
    return found


def change_table(found: list[Change]) -> str:
    """Return the changes as markdown; those beyond the noise are marked."""
    rows = []
    for c in found:
        gap = c.normalised - 1
        mark = "" if abs(gap) <= c.noise else "better" if gap > 0 else "worse"
        row = [c.engine, c.number, f"{c.now:.4g}", f"{c.ratio:.2f} x", f"{c.normalised:.2f} x"]
        rows.append([*row, f"+-{c.noise:.0%}", mark])
    header = ["engine", "number", "now", "to the last", "with the peaks accounted for", "noise", ""]
    return common.table(header, rows)
