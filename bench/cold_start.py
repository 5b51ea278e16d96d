"""From the start of a process to its first tokens: cold and warm page cache, mapped weights and huge pages.

    python bench/cold_start.py [--engine DIR] [--target cpu] [--rounds 5] [--threads 0] [--warm-up]

Each start is a process of its own, the cases of a round one after another, so that whatever else the machine does
falls on all of them. Before a start the engine's files, and no others, are put into one of three states:

    cold    out of the page cache
    small   in it, read by calls, which leaves what copies and downloads leave: small pages, on many systems
    warm    in it after `plansmith warm`: huge pages where the file system has them

Beside them stands the floor: the plan's bytes over the speed at which this machine reads that file from the disk, and
at which it copies it out of the page cache. Linux; a disk that another machine caches is as fast as that.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import common
from plansmith.runtime.manifest import load_manifest

STATES = ("cold", "small", "warm")
WEIGHTS = ("mapped", "auto", "huge_pages")
NUM_TOKENS = 16
START = """
import json, sys, time
begin = float(sys.argv[1])
from plansmith.runtime.engine import Engine
from plansmith.runtime.sampling import SamplingParams
marks = {"imported_s": time.monotonic() - begin}
options = json.loads(sys.argv[3])
warms = options.pop("warms")
engine = Engine.open(sys.argv[2], **options)
marks["opened_s"] = time.monotonic() - begin
if warms:
    from plansmith.runtime.warm_up import warm_up
    warm_up(engine, 1)
    marks["warmed_s"] = time.monotonic() - begin
ids = [(31 * i + 1) % engine.model_info.vocab_size for i in range(16)]
def tokens(count):
    times = []
    params = SamplingParams(max_tokens=count, temperature=0.0, ignore_eos=True, detokenize=False)
    engine.submit(ids, params, on_delta=lambda _: times.append(time.monotonic() - begin)).result()
    return times
times = tokens(int(sys.argv[4]))
marks["first_token_s"], marks["last_token_s"] = times[0], times[int(sys.argv[4]) - 1]
from plansmith.runtime.page_cache import is_prefetching
while is_prefetching():
    time.sleep(0.01)
marks["settled_s"] = time.monotonic() - begin
times = tokens(32)
steps = sorted(b - a for a, b in zip(times[8:31], times[9:32]))
marks["steady_step_s"] = steps[len(steps) // 2]
kib = dict.fromkeys(("AnonHugePages", "FilePmdMapped"), 0)
for line in open("/proc/self/smaps_rollup"):
    name, _, rest = line.partition(":")
    if name in kib:
        kib[name] = int(rest.split()[0])
marks["own_huge_bytes"], marks["file_huge_bytes"] = kib["AnonHugePages"] << 10, kib["FilePmdMapped"] << 10
engine.close()
print(json.dumps(marks))
"""


def files_of(engine_dir: Path, target: str) -> list[Path]:
    """Return the files that an engine of a target opens, the plan first."""
    manifest = load_manifest(engine_dir)
    listed = [*manifest.target(target).files, *manifest.draft_files(target), *manifest.tokenizer.files]
    return [manifest.path(one) for one in listed]


def evict(path: Path) -> None:
    """Have a file leave the page cache."""
    with path.open("rb") as file:
        os.fsync(file.fileno())
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def read_speed(path: Path) -> float:
    """Return bytes a second at which one thread reads a file from start to end."""
    buffer, begin = bytearray(8 << 20), time.perf_counter()
    with path.open("rb", buffering=0) as file:
        while file.readinto(buffer):
            pass
    return path.stat().st_size / (time.perf_counter() - begin)


def fill_with_small_pages(path: Path) -> None:
    """Read a file in by advice, which gives no huge pages, and wait for it."""
    size = path.stat().st_size
    with path.open("rb", buffering=0) as file:
        for at in range(0, size, 128 << 10):
            os.posix_fadvise(file.fileno(), at, 128 << 10, os.POSIX_FADV_WILLNEED)
    read_speed(path)


def prepare(state: str, engine_dir: Path, target: str) -> None:
    """Put the engine's files into a state of the page cache."""
    paths = files_of(engine_dir, target)
    for path in paths:
        evict(path)
    if state == "small":
        for path in paths:
            fill_with_small_pages(path)
    if state == "warm":
        command = [*common.PLANSMITH, "warm", str(engine_dir), "--target", target]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)


def start(engine_dir: Path, options: dict[str, Any]) -> dict[str, float]:
    """Return the marks of a fresh process, seconds from before it was made."""
    words = [str(engine_dir), json.dumps(options), str(NUM_TOKENS)]
    command = [sys.executable, "-c", START, str(time.monotonic()), *words]
    marks: dict[str, float] = json.loads(subprocess.check_output(command))
    return marks


def floor(plan: Path) -> dict[str, float]:
    """Return how fast the plan comes from the disk, and how fast from the page cache, in bytes a second."""
    evict(plan)
    return {"disk_bytes_per_s": read_speed(plan), "cache_bytes_per_s": read_speed(plan)}


def measure(
    engine_dir: Path, target: str, rounds: int, threads: int, warms: bool
) -> tuple[dict[str, list[dict[str, float]]], list[dict[str, float]]]:
    """Return the marks of each case, and the floors, one of each a round."""
    plan = files_of(engine_dir, target)[0]
    weights = WEIGHTS if target == "cpu" else ("auto",)
    cases: dict[str, list[dict[str, float]]] = {
        f"{state} {where}": [] for state in STATES for where in weights
    }
    floors = []
    for i in range(rounds):
        floors.append(floor(plan))
        for case, marks in cases.items():
            state, where = case.split()
            prepare(state, engine_dir, target)
            marks.append(
                start(
                    engine_dir,
                    {"target": target, "weights": where, "num_threads": threads, "warms": warms},
                )
            )
        print(f"round {i + 1} of {rounds}", file=sys.stderr, flush=True)
    return cases, floors


def median(samples: list[dict[str, float]], name: str) -> float:
    """Return the median of a mark."""
    return statistics.median(one[name] for one in samples)


def rows_of(cases: dict[str, list[dict[str, float]]]) -> list[list[str]]:
    """Return the table's rows: times from the start of the process, and the ratio to all weights being read first."""
    rows = []
    for case, samples in cases.items():
        state, where = case.split()
        base = cases.get(f"{state} huge_pages", samples)
        first = [one["first_token_s"] for one in samples]
        huge = median(samples, "own_huge_bytes"), median(samples, "file_huge_bytes")
        rows.append(
            [
                state,
                where,
                f"{median(samples, 'opened_s'):.2f}",
                common.spread(first, 2),
                f"{median(base, 'first_token_s') / median(samples, 'first_token_s'):.2f}",
                f"{median(samples, 'last_token_s'):.2f}",
                f"{median(samples, 'settled_s'):.2f}",
                f"{1e3 * median(samples, 'steady_step_s'):.1f}",
                f"{huge[0] / 1e6:.0f} + {huge[1] / 1e6:.0f}",
            ]
        )
    return rows


def main() -> None:
    """Measure, print the table, store the results."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--engine", type=Path, help="An engine directory; default: the demo model's, bf16.")
    parser.add_argument("--target", default="cpu")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=0)
    parser.add_argument("--warm-up", action="store_true", help="Run a warm-up before the first token.")
    parser.add_argument("--name", default="cold_start", help="Of the file of results; - stores none.")
    given = parser.parse_args()
    engine_dir = given.engine or common.engine("bf16")
    plan = files_of(engine_dir, given.target)[0]
    cases, floors = measure(engine_dir, given.target, given.rounds, given.threads, given.warm_up)
    header = [
        "cache",
        "weights",
        "opened s",
        "first token s",
        "against huge_pages",
        "token 16 s",
        "settled s",
    ]
    print(common.table([*header, "steady step ms", "MB in huge pages: own + file"], rows_of(cases)))
    size = plan.stat().st_size
    disk, cache = (median(floors, f"{name}_bytes_per_s") for name in ("disk", "cache"))
    print(
        f"\nfloor: {size / 1e6:.0f} MB at {disk / 1e9:.2f} GB/s from the disk = {size / disk:.2f} s, at "
        f"{cache / 1e9:.2f} GB/s out of the page cache = {size / cache:.2f} s"
    )
    if given.name != "-":
        common.store(
            given.name, {"plan_bytes": size, "target": given.target, "floors": floors, "cases": cases}
        )


if __name__ == "__main__":
    main()
