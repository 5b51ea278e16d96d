"""The size of GPU plans and what their weights take of a device, beside what `plansmith size` predicts.

    python bench/plan_size.py --checkpoint demo/smollm2 --shape wide --output docs/results/plan_size.json

The compiler tells the weights in its log; what else a plan file holds is the source of its kernels. Nothing is timed,
and no GPU is needed.
"""

from __future__ import annotations

import argparse
import json
import re
import tempfile
from pathlib import Path
from typing import Any

import common
import random_checkpoint

PRECISIONS, TARGETS = ("fp16", "int8", "int4"), ("sm80", "sm89", "sm120", "rtx")


def measure(checkpoint: Path, precision: str, target: str) -> dict[str, Any]:
    """Compile one plan; return what it holds, beside what was predicted."""
    from plansmith.builder.build import build_engine, plan_build
    from plansmith.builder.weight_sizes import plan_sizes

    plan = plan_build(checkpoint, [target], precision=precision)
    sizes = plan_sizes(plan.checkpoint.spec, plan.recipe, plan.limits, plan.targets[0])
    with tempfile.TemporaryDirectory(prefix="plansmith-bench-") as folder:
        out = Path(folder) / "engine"
        build_engine(plan, out)
        made = out / "targets" / target
        log = (made / "build.log").read_text(encoding="utf-8")
        (weights,) = map(int, re.findall(r"Total Weights Memory: (\d+)", log))
        size = (made / "model.plan").stat().st_size
    return {
        "checkpoint": checkpoint.name,
        "precision": precision,
        "target": target,
        "layers": plan.checkpoint.spec.num_layers,
        "plan_file_bytes": size,
        "predicted_plan_file_bytes": sizes.file_bytes,
        "weight_bytes": weights,
        "predicted_weight_bytes": sizes.weight_bytes,
        "kernel_source_bytes": size - weights,
        "predicted_kernel_source_bytes": sizes.source_bytes,
    }


def line(one: dict[str, Any]) -> str:
    """Return a result for people."""
    parts = []
    for name in ("plan_file", "weight", "kernel_source"):
        held, said = one[f"{name}_bytes"], one[f"predicted_{name}_bytes"]
        parts.append(
            f"{name.replace('_', ' ')} {held / 1e6:.2f} MB, predicted {said / 1e6:.2f} ({said / held - 1:+.1%})"
        )
    return f"{one['checkpoint']:>10} {one['precision']:>5} {one['target']:>6}: {'; '.join(parts)}"


def main() -> None:
    """Parse the command line and measure."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    random_checkpoint.add_arguments(parser)
    parser.add_argument("--precision", action="append", choices=PRECISIONS)
    parser.add_argument("--target", action="append", choices=TARGETS)
    parser.add_argument("--output", type=Path)
    args = parser.parse_args()
    results = []
    for checkpoint in random_checkpoint.chosen(args) or [common.demo_checkpoint()]:
        for target in args.target or ("sm89",):
            for precision in args.precision or PRECISIONS:
                results.append(measure(checkpoint, precision, target))
                print(line(results[-1]), flush=True)
                if args.output:
                    text = json.dumps({"machine": common.machine(), "results": results}, indent=1)
                    args.output.write_text(text + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
