"""Two quick rounds of plansmith's own variants, and their ratios to the last recorded run on such a machine.

    python bench/smoke.py [--rounds 2] [--record]

A minute or two on two idle cores. --record appends the run to bench/history/smoke.jsonl.
"""

from __future__ import annotations

import argparse
import functools
import os
import signal
import sys

import common
import history
from peer import cases, driver, report, roofline, variants
from peer.results import Results

FILE = history.FOLDER / "smoke.jsonl"


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    """Return the command line; `variants` are those chosen."""
    cores = len(os.sched_getaffinity(0))
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--threads", type=int, default=cores)
    parser.add_argument("--variants", default="plansmith:int8,plansmith:int4,plansmith:fp32")
    parser.add_argument("--record", action="store_true", help=f"append to {FILE.relative_to(common.ROOT)}")
    args = parser.parse_args(argv)
    if args.rounds < 1:
        parser.error(f"--rounds {args.rounds}: at least 1")
    if not 1 <= args.threads <= cores:
        parser.error(f"--threads {args.threads}: from 1 to the {cores} cores that this process may use")
    try:
        args.variants = variants.chosen(variants.all_variants(["plansmith"]), args.variants)
    except ValueError as error:
        parser.error(f"--variants: {error}")
    return args


def measure(rounds: int, threads: int, wanted: list[variants.Variant]) -> Results:
    """Return the samples of the rounds; SystemExit where an engine fails."""
    work = common.ROOT / "build" / "peers"
    workload = cases.read_workload(common.WORKLOAD)
    settings = driver.Settings(work, common.demo_checkpoint(), workload, cases.TESTS, threads)
    peaks = functools.partial(roofline.measure_peaks, threads)
    with driver.Driver(settings, driver.say) as run:
        run.prepare(wanted)
        run.fresh_starts(rounds, peaks)
        run.start_all()
        for round_idx in range(rounds):
            run.round(round_idx, peaks)
    if run.failures:
        sys.exit(f"failed: {run.failures}")
    return Results(run.samples, run.facts, roofline.ModelCost.of(settings.checkpoint), workload)


def main() -> None:
    """Measure, compare, and record where that is asked for."""
    args = parse()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    results = measure(args.rounds, args.threads, args.variants)
    now = history.entry(results, args.threads)
    then = history.last_like(history.read(FILE), now)
    print(report.conditions(results) + "\n")
    if then is None:
        print("no earlier run on a machine of this description; these are the numbers\n")
        then = now
    else:
        print(f"beside the run of {then['date']} at {then['commit']}\n")
    print(history.change_table(history.changes(now, then)))
    if now["others_cores"] > 0.1:
        print(f"\nother processes took {now['others_cores']:.2f} cores: read the ratios with care")
    if args.record:
        history.append(FILE, now)


if __name__ == "__main__":
    main()
