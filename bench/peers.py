"""plansmith's cpu target beside its peers: the same checkpoint, token ids, threads and machine, in turns.

    python bench/peers.py [--rounds 5] [--variants plansmith,llama_cpp:q8_0] [--tests single,prefill] [--model llama1b]

Every engine is installed in an environment of its own under build/peers, converts the checkpoint, is started once and
stays; but one alone runs at a time, the others are stopped (SIGSTOP). A round runs every test with every engine, one
after another, and measures the machine's peaks before each test. The first token id of all prompts changes with each
round, so no cache of an earlier one helps. What an engine answers is checked; one that fails is named and left out.
With --reload (the default for larger models) an engine is started in each round and ended after its tests.

The report goes to stdout and build/peers/report[-model].md; --store keeps samples and report in docs/results. A run
that is interrupted (Ctrl-C: exit code 130) leaves what it measured in build/peers/partial[-model].md and .json, and
stores nothing else.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import common
import history
from peer import cases, driver, goals, report, roofline, variants
from peer.results import Results

WORK = common.ROOT / "build" / "peers"
REFERENCE = "transformers:fp32"
# Of the larger model: one engine of each kind of weights but float32, which takes 5 GB of disk and memory each.
LARGE_VARIANTS = (
    "plansmith:int8,plansmith:int4,plansmith:bf16,llama_cpp:bf16,llama_cpp:q8_0,llama_cpp:q4_0,openvino:bf16,"
    "openvino:int8,openvino:int4,ort_genai:int8,ort_genai:int4,ctranslate2:int8,vllm_cpu:bfloat16"
)
_BUILD = (
    "run `make bench-peers BENCH_FLAGS=..`, which builds plansmith and runs this; or `make build` once, and this "
    "script with .venv/bin/python"
)


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    """Return the command line; `variants` are those chosen."""
    cores = len(os.sched_getaffinity(0))
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, help="5, or with --quick 1")
    parser.add_argument("--quick", action="store_true", help="one round, without fresh starts")
    parser.add_argument("--threads", type=int, default=cores)
    parser.add_argument("--model", choices=["smollm2", "llama1b"], default="smollm2")
    parser.add_argument("--variants", help="modules or module:variant, with commas; all where not given")
    parser.add_argument("--tests", default=",".join(cases.TESTS), help="with commas; all where not given")
    parser.add_argument("--install", action="store_true", help="install and convert, run nothing")
    parser.add_argument(
        "--reload",
        action=argparse.BooleanOptionalAction,
        help="start each engine in every round, so that one alone is in memory; default: for larger models",
    )
    parser.add_argument(
        "--start-timeout", type=float, default=900.0, help="seconds an engine may take to load"
    )
    parser.add_argument("--run-timeout", type=float, default=300.0, help="seconds a run may take")
    parser.add_argument("--store", action="store_true", help="write docs/results/peers.json and peers.md")
    args = parser.parse_args(argv)
    args.tests = list(dict.fromkeys(test.strip() for test in args.tests.split(",") if test.strip()))
    if not args.tests:
        parser.error(f"--tests names no test; there are {', '.join(cases.TESTS)}, leave it out for all")
    for test in args.tests:
        if test not in cases.TESTS:
            parser.error(f"no test {test!r}; there are {', '.join(cases.TESTS)}")
    if args.rounds is None:
        args.rounds = 1 if args.quick else 5
    if args.rounds < 1:
        parser.error(f"--rounds {args.rounds}: at least 1")
    if not 1 <= args.threads <= cores:
        parser.error(f"--threads {args.threads}: from 1 to the {cores} cores that this process may use")
    for name in ("start_timeout", "run_timeout"):
        if not getattr(args, name) > 0:
            parser.error(f"--{name.replace('_', '-')} {getattr(args, name)}: more than 0 seconds")
    large = args.model != "smollm2"
    args.reload = large if args.reload is None else args.reload
    wanted = LARGE_VARIANTS if large and args.variants is None else args.variants
    args.variants = variants.chosen(variants.all_variants(), wanted)
    return args


def check_plansmith() -> None:
    """Exit with what to run where plansmith, whose checkpoint and engines this needs, cannot be imported or loaded."""
    code = "from plansmith.runtime._native import native; native()"
    tried = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    if tried.returncode:
        why = (tried.stderr.strip().splitlines() or ["it ended without a word"])[-1]
        sys.exit(f"plansmith does not run with {sys.executable}: {why}\n{_BUILD}")


def checkpoint(model: str) -> Path:
    """Return the folder of the checkpoint, made or fetched if it is not there."""
    if model == "smollm2":
        return common.demo_checkpoint()
    path = WORK / "checkpoints" / model
    if not (path / "config.json").exists():
        tokenizer = ["--tokenizer", str(common.demo_checkpoint())]
        maker = [sys.executable, str(common.ROOT / "bench" / "random_checkpoint.py"), "--shape", model]
        subprocess.run([*maker, "--output", str(path), *tokenizer], check=True, stdout=sys.stderr)
    return path


def reference_tokens(settings: driver.Settings, outputs: dict[str, list[int]]) -> list[int]:
    """Return transformers' greedy float32 tokens of `single`: of this run, or of an earlier one, or made now."""
    cached = settings.work / "models" / settings.checkpoint.name / "reference-single.json"
    tokens = outputs.get("transformers fp32")
    if tokens is None and cached.exists():
        loaded: list[int] = json.loads(cached.read_text())
        return loaded
    if tokens is None:
        with driver.Driver(dataclasses.replace(settings, reload=False), driver.say) as alone:
            alone.prepare(variants.chosen(variants.all_variants(), REFERENCE))
            alone.start_all()
            alone.compare_outputs()
            tokens = alone.outputs.get("transformers fp32", [])
    if tokens:
        cached.parent.mkdir(parents=True, exist_ok=True)
        cached.write_text(json.dumps(tokens))
    return tokens


def equal_tokens(settings: driver.Settings, outputs: dict[str, list[int]]) -> dict[str, int]:
    """Return how many leading tokens of each engine are those of transformers in float32."""
    reference = reference_tokens(settings, outputs)
    return (
        {name: cases.equal_leading(tokens, reference) for name, tokens in outputs.items()}
        if reference
        else {}
    )


def results_of(run: driver.Driver) -> Results:
    """Return the samples of a run, with what it takes to compare them with the machine's peaks."""
    settings = run.settings
    cost = roofline.ModelCost.of(settings.checkpoint)
    return Results(run.samples, run.facts, cost, settings.workload)


def suffix(model: str) -> str:
    """Return what the names of a model's results end with."""
    return "" if model == "smollm2" else f"-{model}"


def report_of(args: argparse.Namespace, run: driver.Driver, whole: bool) -> tuple[str, dict[str, Any]]:
    """Return the report of a run, and the same with its samples as JSON."""
    equal = equal_tokens(run.settings, run.outputs) if whole and args.model == "smollm2" else {}
    results = results_of(run)
    verdicts = goals.judge_all(goals.GOALS if args.model == "smollm2" else goals.EVEN_GOALS, results)
    head = {"commit": history.commit(common.ROOT), "threads": args.threads, "model": args.model}
    head |= {"rounds": args.rounds, "whole": whole}
    rest = {"facts": run.facts, "failures": run.failures, "goals": verdicts, "samples": run.samples}
    return report.markdown(results, verdicts, run.failures, equal), head | rest


def keep_partial(args: argparse.Namespace, run: driver.Driver) -> None:
    """Write what an interrupted run measured beside the reports of whole ones."""
    text, values = report_of(args, run, whole=False)
    path = WORK / f"partial{suffix(args.model)}.md"
    rounds = [sample["round"] for sample in run.samples if sample["test"] != "start"]
    when = f"in round {max(rounds) + 1} of {args.rounds}" if rounds else "at the starts"
    title = f"Interrupted {when}: not a whole run; numbers of samples differ."
    path.write_text(f"{title}\n\n{text}")
    path.with_suffix(".json").write_text(json.dumps(values) + "\n")
    driver.say(
        f"interrupted; {len(run.samples)} samples so far are in {path} and {path.with_suffix('.json').name}"
    )


def store(args: argparse.Namespace, text: str, values: dict[str, Any]) -> None:
    """Write docs/results/peers[-model].json and the report beside it."""
    name = f"peers{suffix(args.model)}"
    common.store(name, values)
    (common.RESULTS / f"{name}.md").write_text(text)


def settings_of(args: argparse.Namespace, model: Path) -> driver.Settings:
    """Return the driver's settings for a command line and a checkpoint."""
    vocab_size = json.loads((model / "config.json").read_text())["vocab_size"]
    return driver.Settings(
        WORK,
        model,
        dataclasses.replace(cases.read_workload(common.WORKLOAD), vocab_size=vocab_size),
        args.tests,
        args.threads,
        varied=args.model == "smollm2",
        reload=args.reload,
        start_timeout_s=args.start_timeout,
        run_timeout_s=args.run_timeout,
    )


def measure(args: argparse.Namespace, run: driver.Driver) -> None:
    """Run the rounds; where they are interrupted, what was measured is kept as such."""
    peaks = functools.partial(roofline.measure_peaks, roofline.build_peaks(), args.threads)
    whole = False
    try:
        run.prepare(args.variants)
        run.fresh_starts(0 if args.quick else args.rounds, peaks)
        run.start_all()
        run.compare_outputs()
        for round_idx in range(args.rounds):
            begin = time.monotonic()
            run.round(round_idx, peaks)
            driver.say(f"round {round_idx} took {time.monotonic() - begin:.0f} s")
        whole = True
    finally:
        if run.samples and not whole:
            keep_partial(args, run)


def run_all(args: argparse.Namespace) -> None:
    """Install what is asked for, run the rounds and print the report; exit with 1 where nothing could be measured."""
    check_plansmith()
    with driver.Driver(settings_of(args, checkpoint(args.model)), driver.say) as run:
        if args.install:
            run.prepare(args.variants)
            for name, facts in run.facts.items():
                driver.say(f"{name}: ready to run, weights of {facts['weight_bytes'] / 1e6:.0f} MB")
            sys.exit(f"failed: {run.failures}" if run.failures else 0)
        measure(args, run)
    if not run.samples:
        sys.exit(f"nothing was measured: {run.failures}")
    text, values = report_of(args, run, whole=True)
    print(text)
    (WORK / f"report{suffix(args.model)}.md").write_text(text)
    if args.store:
        store(args, text, values)


def main() -> None:
    """Run as the command line says; sessions are ended on every way out, Ctrl-C and SIGTERM among them."""
    args = parse()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    try:
        run_all(args)
    except KeyboardInterrupt:
        sys.exit(130)


if __name__ == "__main__":
    main()
