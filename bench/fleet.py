"""What a fleet's build costs beside its compilers: time, an unchanged fleet, memory, the same bytes twice.

    python bench/fleet.py --output docs/results/fleet.json

- overhead: `plansmith fleet build` of one model for four GPUs, beside TensorRT-RTX alone over the same graph, which is
  there lowered already, as many compiles side by side. Both are wall time, process start included, one after another,
  several rounds.
- overhead_two: the same of two models for four GPUs.
- unchanged: a fleet of two models and four targets built again, cold and warm in the file cache's eyes alike.
- memory: the most that the build held, beside what was predicted and the budget it was given.
- gates: the same of measuring a gate alone.
- bytes: two builds into two stores, compared file by file, with PLANSMITH_REPRODUCIBLE=1.

Run it on a quiet machine: the compilers keep every core busy.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import common
import random_checkpoint

GPUS = ("a100-80g", "a10", "l4", "rtx5090")
TARGETS = ("sm80", "sm86", "sm89", "sm120")


def write_fleet(folder: Path, models: dict[str, Path], skus: tuple[str, ...], precision: str) -> None:
    """Write a fleet file, its store and its engines below folder."""
    folder.mkdir(parents=True)
    value = {
        "version": 1,
        "name": "bench",
        "models": {name: {"checkpoint": str(path)} for name, path in models.items()},
        "recipes": {precision: {"precision": precision}},
        "skus": list(skus),
    }
    (folder / "plansmith.yaml").write_text(json.dumps(value, indent=1))  # JSON is YAML


def fleet_build(folder: Path, *flags: str) -> tuple[float, dict[str, Any]]:
    """Run `plansmith fleet build`; return its wall time in seconds, and its report."""
    command = [*common.PLANSMITH, "fleet", "build", "--json", "-f", str(folder), *flags]
    start = time.perf_counter()
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    seconds = time.perf_counter() - start
    return seconds, json.loads(done.stdout)


def compilers_alone(folder: Path, checkpoints: Sequence[Path], precision: str) -> tuple[float, list[float]]:
    """Return the wall time of the same compiles without a fleet, lowered graphs to plans, and each compile's."""
    words = [sys.executable, __file__, "--compilers", str(folder), precision, *map(str, checkpoints)]
    subprocess.run([*words, "--prepare"], check=True)
    start = time.perf_counter()
    done = subprocess.run(words, check=True, stdout=subprocess.PIPE, text=True)
    return time.perf_counter() - start, json.loads(done.stdout)


def run_compilers(folder: Path, checkpoints: Sequence[Path], precision: str, prepare: bool) -> None:
    """Lower the checkpoints' graphs into folder, or compile them for all GPUs and print what each compile took."""
    from plansmith.builder.targets.rtx.schedule import CompileJob, compile_many

    jobs: list[CompileJob] = []
    for checkpoint in checkpoints:
        jobs += compile_jobs(folder / checkpoint.name, checkpoint, precision, prepare)
    if not prepare:
        print(json.dumps([round(one.seconds, 3) for one in compile_many(jobs)]))


def compile_jobs(folder: Path, checkpoint: Path, precision: str, prepare: bool) -> list[Any]:
    """Return the compiles of a checkpoint's graph, which lies lowered in folder; `prepare` writes it there."""
    from plansmith.builder.build import plan_build
    from plansmith.builder.compile import CompileRequest
    from plansmith.builder.targets.rtx.compile import save_lowered
    from plansmith.builder.targets.rtx.schedule import CompileJob

    plan = plan_build(checkpoint, list(TARGETS), precision=precision)
    request = CompileRequest(plan.checkpoint, plan.recipe, plan.limits, None, folder)
    graph, lowered = request.graph(plan.targets[0]), folder / "graph.onnx"
    if prepare:
        folder.mkdir(parents=True)
        save_lowered(graph, lowered)
    return [
        CompileJob(
            graph,
            plan.limits,
            plan.checkpoint.spec,
            one.name,
            folder / f"{one.name}.plan",
            folder / f"{one.name}.log",
            lowered=lowered,
        )
        for one in plan.targets
    ]


def overhead(work: Path, models: dict[str, Path], precision: str, rounds: int) -> dict[str, Any]:
    """Return the wall times of both, round by round, and the ratio of their medians."""
    fleet_s, alone_s, reports, compiles = [], [], [], []
    for n in range(rounds):
        folder = work / f"overhead{n}"
        write_fleet(folder, models, GPUS, precision)
        seconds, report = fleet_build(folder)
        fleet_s.append(round(seconds, 2))
        reports.append(report)
        shutil.rmtree(folder)
        seconds, each = compilers_alone(work / f"alone{n}", list(models.values()), precision)
        alone_s.append(round(seconds, 2))
        compiles.append(each)
        shutil.rmtree(work / f"alone{n}")
        print(f"round {n}: fleet {fleet_s[-1]} s, TensorRT-RTX alone {alone_s[-1]} s", flush=True)
    ratio = statistics.median(fleet_s) / statistics.median(alone_s)
    return {
        "fleet_s": fleet_s,
        "compilers_alone_s": alone_s,
        "overhead": round(ratio - 1, 4),
        "compile_s": [[unit["compile_seconds"] for unit in one["units"]] for one in reports],
        "compile_alone_s": compiles,
    }


def unchanged(work: Path, models: dict[str, Path], rounds: int) -> dict[str, Any]:
    """Build two models for four targets, then again and again."""
    folder = work / "unchanged"
    write_fleet(folder, models, ("cpu", *GPUS[:1], *GPUS[2:]), "int8")
    first_s, first = fleet_build(folder)
    print(f"first build of {len(first['units'])} units: {first_s:.1f} s", flush=True)
    again = [fleet_build(folder) for _ in range(rounds)]
    assert all(unit["status"] == "kept" for _, report in again for unit in report["units"])
    seconds = [round(one, 2) for one, _ in again]
    print(f"again: {seconds} s", flush=True)
    stored = sum(
        path.stat().st_size for path in (folder / ".plansmith" / "store").rglob("*") if path.is_file()
    )
    plans = sum(path.stat().st_size for path in (folder / "engines").rglob("*") if path.is_file())
    return {
        "units": len(first["units"]),
        "first_s": round(first_s, 2),
        "again_s": seconds,
        "store_bytes": stored,
        "engine_bytes": plans,
        "peak_bytes": first["peak_bytes"],
    }


def memory(work: Path, checkpoint: Path, budgets: tuple[str, ...], precision: str) -> list[dict[str, Any]]:
    """Build four GPUs' plans within budgets; return what was held, beside what was said."""
    results = []
    for budget in budgets:
        folder = work / f"memory{budget}"
        write_fleet(folder, {"model": checkpoint}, GPUS, precision)
        seconds, report = fleet_build(folder, "--memory", budget, "--workers", "4")
        predicted = [unit["predicted_bytes"] for unit in report["units"]]
        results.append(
            {
                "budget": budget,
                "seconds": round(seconds, 1),
                "peak_bytes": report["peak_bytes"],
                "predicted_unit_bytes": predicted,
            }
        )
        print(
            f"budget {budget}: held {report['peak_bytes'] / 1e9:.2f} GB, a unit was said to take "
            f"{max(predicted) / 1e9:.2f} GB",
            flush=True,
        )
        shutil.rmtree(folder)
    return results


def gates(work: Path, checkpoint: Path) -> list[dict[str, Any]]:
    """Measure gates of plans that are built; return what was held, beside what was said."""
    results = []
    for precision in ("int8", "fp16"):
        folder = work / f"gate-{precision}"
        write_fleet(folder, {"model": checkpoint}, ("cpu",), precision)
        fleet_build(folder)
        file = folder / "plansmith.yaml"
        value = json.loads(file.read_text())
        value["recipes"][precision]["gate"] = "kl<=1"
        file.write_text(json.dumps(value))
        plan = [*common.PLANSMITH, "fleet", "plan", "--json", "-f", str(folder)]
        steps = json.loads(subprocess.run(plan, check=True, capture_output=True, text=True).stdout)["units"]
        predicted = [step["peak_bytes"] for step in steps if step["action"] == "gate"]
        seconds, report = fleet_build(folder)
        held = report["peak_bytes"]
        results.append(
            {
                "precision": precision,
                "seconds": round(seconds, 1),
                "peak_bytes": held,
                "predicted_bytes": predicted,
            }
        )
        print(f"gate of {precision}: held {held / 1e9:.2f} GB, said {predicted[0] / 1e9:.2f} GB", flush=True)
        shutil.rmtree(folder)
    return results


def same_bytes(work: Path, checkpoint: Path) -> dict[str, Any]:
    """Build the same fleet into two stores with PLANSMITH_REPRODUCIBLE=1; return which plans differ."""
    os.environ["PLANSMITH_REPRODUCIBLE"] = "1"
    found: list[dict[str, str]] = []
    for name in ("one", "another_place_with_a_longer_name"):
        folder = work / name
        write_fleet(folder, {"model": checkpoint}, ("cpu", "l4", "rtx5090"), "int4")
        fleet_build(folder)
        plans = sorted((folder / "engines").rglob("*.plan"))
        sums = {str(path.relative_to(folder / "engines")): _sha256(path) for path in plans}
        found.append(sums)
        shutil.rmtree(folder)
    del os.environ["PLANSMITH_REPRODUCIBLE"]
    return {
        "plans": found[0],
        "differing": sorted(dict(found[0].items() ^ found[1].items())),
    }


def _sha256(path: Path) -> str:
    done = subprocess.run(["sha256sum", str(path)], check=True, capture_output=True, text=True)
    return done.stdout.split()[0]


def main() -> None:
    """Parse the command line and measure."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--compilers", nargs="+", help=argparse.SUPPRESS)
    parser.add_argument("--prepare", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--work", type=Path, default=common.ROOT / "build" / "bench-fleet")
    parser.add_argument(
        "--stage",
        action="append",
        choices=("overhead", "overhead_two", "unchanged", "memory", "gates", "bytes"),
    )
    parser.add_argument("--output", type=Path)
    args = parser.parse_args()
    if args.compilers:
        folder, precision, *checkpoints = args.compilers
        run_compilers(Path(folder), [Path(one) for one in checkpoints], precision, args.prepare)
        return
    smol = common.demo_checkpoint()
    shutil.rmtree(args.work, ignore_errors=True)
    args.work.mkdir(parents=True)
    deep = args.work / "deep"
    two = {"smollm2": smol, "deep": deep}
    stages: dict[str, Callable[[], Any]] = {
        "overhead": lambda: overhead(args.work, {"smollm2": smol}, "fp16", args.rounds),
        "overhead_two": lambda: overhead(args.work, two, "fp16", args.rounds),
        "unchanged": lambda: unchanged(args.work, two, args.rounds),
        "memory": lambda: memory(args.work, smol, ("2GB", "3GB", "6GB"), "fp16"),
        "gates": lambda: gates(args.work, smol),
        "bytes": lambda: same_bytes(args.work, smol),
    }
    chosen = args.stage or list(stages)
    if {"unchanged", "overhead_two"} & set(chosen):
        random_checkpoint.write_checkpoint(deep, "deep", smol)
    results = {name: stages[name]() for name in chosen}
    text = json.dumps(
        {"machine": common.machine(), "cores": len(os.sched_getaffinity(0)), **results}, indent=1
    )
    if args.output:
        args.output.write_text(text + "\n")
    else:
        print(text)


if __name__ == "__main__":
    main()
