"""The memory that compiles take at their peak, beside what builder/build_memory.py predicts.

    python bench/build_memory.py --checkpoint demo/smollm2 --shape wide --shape deep --shape llama1b \
        --output docs/results/build_memory.json

Each compile runs in a process of its own, whose memory and whose children's is looked at a hundred times a second: what
they hold without pages of files, which the kernel can drop. Nothing is timed, so other work may go on beside it.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import common
import random_checkpoint

PRECISIONS, TARGETS = ("fp16", "int8", "int4"), ("cpu", "sm80", "sm89", "sm120", "rtx")


def measure(checkpoint: str, precision: str, target: str, out: str) -> dict[str, Any]:
    """Compile one plan in this process; return what it took at its peak, beside what was predicted."""
    from plansmith.builder.build import build_engine, plan_build
    from plansmith.builder.build_memory import predicted_peak_bytes
    from plansmith.fleet import memory_watch

    plan = plan_build(checkpoint, [target], precision=precision)
    plan.checkpoint.fingerprint()
    base = memory_watch.tree_bytes(os.getpid())
    with memory_watch.MemoryWatch(interval_s=0.01) as watch:
        report = build_engine(plan, out, force=True)
    spec = plan.checkpoint.spec
    return {
        "checkpoint": Path(checkpoint).name,
        "precision": precision,
        "target": target,
        "layers": spec.num_layers,
        "table_values": spec.vocab_size * spec.hidden_size,
        "weight_bytes": sum(report.targets[target].weight_bytes.values()),
        "base_bytes": base,
        "measured_bytes": watch.peak_bytes - base,
        "predicted_bytes": predicted_peak_bytes(plan.targets[0], spec, plan.recipe, plan.limits),
        "compiler_max_rss_bytes": report.targets[target].peak_rss_bytes,
    }


def measured_apart(checkpoint: Path, precision: str, target: str) -> dict[str, Any]:
    """Return what `measure` says in a process of its own."""
    with tempfile.TemporaryDirectory(prefix="plansmith-bench-") as folder:
        words = [sys.executable, __file__, "--one", str(checkpoint), precision, target, f"{folder}/engine"]
        done = subprocess.run(words, capture_output=True, text=True, check=True)
    result: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return result


def line(one: dict[str, Any]) -> str:
    """Return a result for people."""
    off = one["predicted_bytes"] / one["measured_bytes"] - 1
    weights, held, said = (one[f"{name}_bytes"] / 1e6 for name in ("weight", "measured", "predicted"))
    return (
        f"{one['checkpoint']:>10} {one['precision']:>5} {one['target']:>6}: weights {weights:7.0f} MB, "
        f"measured {held:7.0f} MB, predicted {said:7.0f} MB ({off:+.0%})"
    )


def main() -> None:
    """Parse the command line and measure."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--one", nargs=4, metavar=("CHECKPOINT", "PRECISION", "TARGET", "OUT"), help=argparse.SUPPRESS
    )
    random_checkpoint.add_arguments(parser)
    parser.add_argument("--precision", action="append", choices=PRECISIONS)
    parser.add_argument("--target", action="append", choices=TARGETS)
    parser.add_argument("--output", type=Path)
    args = parser.parse_args()
    if args.one:
        print(json.dumps(measure(*args.one)))
        return
    results = []
    for checkpoint in random_checkpoint.chosen(args):
        for target in args.target or ("cpu", "sm89"):
            for precision in args.precision or PRECISIONS:
                results.append(measured_apart(checkpoint, precision, target))
                print(line(results[-1]), flush=True)
    if args.output:
        args.output.write_text(json.dumps({"machine": common.machine(), "results": results}, indent=1) + "\n")


if __name__ == "__main__":
    main()
