"""plansmith's cpu target beside its peers: the same checkpoint, token ids, threads and machine, in turns.

    python bench/peers.py [--rounds 5] [--variants plansmith,llama_cpp:q8_0] [--tests single,prefill] [--model llama1b]

Every engine is installed in an environment of its own under build/peers, converts the checkpoint, is started once and
stays; but one alone runs at a time, the others are stopped (SIGSTOP). A round runs every test with every engine, one
after another, and measures the machine's peaks before each test. The first token id of all prompts changes with each
round, so no cache of an earlier one helps. What an engine answers is checked; one that fails is named and left out.

The report goes to stdout and build/peers/report.md; --store keeps samples and report in docs/results.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import common
import history
from peer import cases, driver, goals, report, roofline
from peer.results import Results

WORK = common.ROOT / "build" / "peers"
REFERENCE = "transformers:fp32"
# Of the larger model: what 24 GiB hold at once, and one engine of each kind of weights.
LARGE_VARIANTS = "plansmith:int8,plansmith:int4,llama_cpp:q8_0,llama_cpp:q4_0,openvino:int8,openvino:int4"


def parse() -> argparse.Namespace:
    """Return the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--quick", action="store_true", help="one round, without fresh starts")
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--model", choices=["smollm2", "llama1b"], default="smollm2")
    parser.add_argument(
        "--variants", default="", help="modules or module:variant, with commas; all where empty"
    )
    parser.add_argument("--tests", default=",".join(cases.TESTS))
    parser.add_argument("--install", action="store_true", help="install and convert, run nothing")
    parser.add_argument(
        "--start-timeout", type=float, default=900.0, help="seconds an engine may take to load"
    )
    parser.add_argument("--run-timeout", type=float, default=300.0, help="seconds a run may take")
    parser.add_argument("--store", action="store_true", help="write docs/results/peers.json and peers.md")
    args = parser.parse_args()
    args.tests = [test for test in args.tests.split(",") if test]
    for test in args.tests:
        if test not in cases.TESTS:
            parser.error(f"no test {test!r}; there are {', '.join(cases.TESTS)}")
    if args.quick:
        args.rounds = 1
    if args.rounds < 1 or args.threads < 1:
        parser.error("--rounds and --threads are at least 1")
    if args.model == "llama1b" and not args.variants:
        args.variants = LARGE_VARIANTS
    return args


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
        with driver.Driver(settings, driver.say) as alone:
            alone.prepare(driver.chosen(driver.all_variants(), REFERENCE))
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


def store(args: argparse.Namespace, run: driver.Driver, text: str, verdicts: list[dict[str, Any]]) -> None:
    """Write docs/results/peers[-model].json and the report beside it."""
    name = "peers" if args.model == "smollm2" else f"peers-{args.model}"
    head = {"commit": history.commit(common.ROOT), "threads": args.threads, "model": args.model}
    rest = {"facts": run.facts, "failures": run.failures, "goals": verdicts, "samples": run.samples}
    common.store(name, head | rest)
    (common.RESULTS / f"{name}.md").write_text(text)


def main() -> None:
    """Run the rounds and print the report; exit with 1 where nothing could be measured."""
    args = parse()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that sessions are ended on the way out
    model = checkpoint(args.model)
    vocab_size = json.loads((model / "config.json").read_text())["vocab_size"]
    settings = driver.Settings(
        WORK,
        model,
        dataclasses.replace(cases.read_workload(common.WORKLOAD), vocab_size=vocab_size),
        args.tests,
        args.threads,
        varied=args.model == "smollm2",
        start_timeout_s=args.start_timeout,
        run_timeout_s=args.run_timeout,
    )
    binary = roofline.build_peaks()
    with driver.Driver(settings, driver.say) as run:
        run.prepare(driver.chosen(driver.all_variants(), args.variants), start=not args.install)
        if args.install:
            sys.exit(f"failed: {run.failures}" if run.failures else 0)
        run.compare_outputs()
        for round_idx in range(args.rounds):
            run.round(round_idx, lambda: roofline.measure_peaks(binary, args.threads), starts=not args.quick)
    if not run.samples:
        sys.exit(f"nothing was measured: {run.failures}")
    equal = equal_tokens(settings, run.outputs) if args.model == "smollm2" else {}
    results = results_of(run)
    verdicts = goals.judge_all(goals.GOALS if args.model == "smollm2" else goals.EVEN_GOALS, results)
    text = report.markdown(results, verdicts, run.failures, equal)
    print(text)
    (WORK / "report.md").write_text(text)
    if args.store:
        store(args, run, text, verdicts)


if __name__ == "__main__":
    main()
