"""plansmith's cpu target beside its peers: the same checkpoint, token ids, threads and machine, in turns.

    python bench/peers.py [--rounds 5] [--variants plansmith,llama_cpp:q8_0] [--tests single,prefill] [--model llama1b]

Every engine is installed in an environment of its own under build/peers, converts the checkpoint, is started once and
stays; but one alone runs at a time, the others are stopped (SIGSTOP). Each runs every test once as its warm-up. A round
runs every test with every engine, one after another, and measures the machine's peaks before each test. The first token
id of all prompts changes with each round, so no cache of an earlier one helps. What an engine answers is checked; one
that fails is named and left out. With --reload (the default for larger models) an engine is started in each round and
ended after its tests, and its warm-up is short.

The report goes to stdout and build/peers/report[-model].md; --store keeps samples and report in docs/results. Its first
lines say what was not run. Samples are written after every round to build/peers/partial[-model].json; a run that ends
early (Ctrl-C: exit code 130) leaves them there with a report of them beside, and stores nothing else.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import hashlib
import json
import os
import signal
import subprocess
import sys
import time
from importlib import metadata
from pathlib import Path
from typing import Any

import common
import history
from peer import cases, driver, goals, report, roofline, variants
from peer.results import Results

WORK = common.ROOT / "build" / "peers"
REFERENCE = "transformers:fp32"
# Of a comparison to keep: the median of fewer is one of them. A larger model's rounds take long.
WANTED_ROUNDS = {"smollm2": 3, "llama1b": 2}
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
    parser.add_argument("--model", choices=list(WANTED_ROUNDS), default="smollm2")
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
    parser.add_argument("--name", default="", help="with --store: what the files' names end with besides")
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
    try:
        args.variants = variants.chosen(variants.all_variants(), wanted)
    except ValueError as error:
        parser.error(f"--variants: {error}")
    if args.name and not (args.store and args.name.isidentifier()):
        parser.error(f"--name {args.name!r}: letters, digits and _, together with --store")
    if args.store and args.quick:
        parser.error("--store --quick: a quick run is no result to keep; leave one of them out")
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


def reference_key(settings: driver.Settings) -> str:
    """Return what transformers' tokens depend on: its version and torch's, the prompt, the checkpoint's content."""
    content = hashlib.sha256(json.dumps(settings.workload.tests["single"]).encode())
    for path in sorted(settings.checkpoint.glob("*")):
        if path.suffix in (".json", ".safetensors"):
            content.update(f"{path.name} {path.stat().st_size} ".encode())
            with path.open("rb") as file:
                for block in iter(lambda: file.read(1 << 20), b""):
                    content.update(block)
    versions = {name: metadata.version(name) for name in ("transformers", "torch")}
    return f"{versions} {content.hexdigest()}"


def _kept_tokens(path: Path, key: str) -> list[int] | None:
    """Return what a file holds under a key; None where it holds something else, or is not whole."""
    try:
        kept = json.loads(path.read_text())
        return list(kept["tokens"]) if kept["key"] == key else None
    except (OSError, ValueError, TypeError, KeyError):
        return None


def reference_tokens(settings: driver.Settings) -> list[int]:
    """Return transformers' greedy float32 tokens of `single`, kept or made now; none where that fails."""
    cached = settings.work / "models" / settings.checkpoint.name / "reference-single.json"
    try:
        key = reference_key(settings)
    except metadata.PackageNotFoundError as error:
        driver.say(f"no tokens to compare with: {error} is not installed")
        return []
    if (kept := _kept_tokens(cached, key)) is not None:
        return kept
    with driver.Driver(dataclasses.replace(settings, reload=False, tests=["single"]), driver.say) as alone:
        alone.prepare(variants.chosen(variants.all_variants(), REFERENCE))
        alone.start_all()
        alone.compare_outputs()
        tokens = alone.outputs.get("transformers fp32", [])
    if tokens:
        cached.parent.mkdir(parents=True, exist_ok=True)
        cached.write_text(json.dumps({"key": key, "tokens": tokens}))
    return tokens


def equal_tokens(reference: list[int], outputs: dict[str, list[int]]) -> dict[str, int]:
    """Return how many leading tokens of each engine are those of the reference; nothing where there is none."""
    if not reference:
        return {}
    return {name: cases.equal_leading(tokens, reference) for name, tokens in outputs.items()}


def results_of(run: driver.Driver) -> Results:
    """Return the samples of a run, with what it takes to compare them with the machine's peaks."""
    settings = run.settings
    cost = roofline.ModelCost.of(settings.checkpoint)
    return Results(run.samples, run.facts, cost, settings.workload)


def suffix(model: str) -> str:
    """Return what the names of a model's results end with."""
    return "" if model == "smollm2" else f"-{model}"


def head_of(args: argparse.Namespace) -> dict[str, Any]:
    """Return what a report says of its run first: what ran on what, and what did not."""
    ran = {variant.label for variant in args.variants}
    return {
        "commit": history.commit(common.ROOT),
        "machine": common.machine(),
        "threads": args.threads,
        "model": args.model,
        "rounds": args.rounds,
        "tests": args.tests,
        "quick": args.quick,
        "reload": args.reload,
        "not_run": [v.label for v in variants.all_variants() if v.label not in ran],
        "short_of": short_of(args),
    }


def short_of(args: argparse.Namespace) -> list[str]:
    """Return what makes a run less than a whole comparison, as sentences; none where nothing does."""
    left = [test for test in cases.TESTS if test not in args.tests]
    wanted = WANTED_ROUNDS[args.model]
    sentences = [f"Tests that were not run: {', '.join(left)}."] if left else []
    if args.rounds < wanted:
        sentences.append(f"Fewer rounds than a comparison takes: {args.rounds} of at least {wanted}.")
    if args.quick:
        sentences.append("A quick run: no fresh starts were measured.")
    return sentences


def report_of(
    head: dict[str, Any], run: driver.Driver, reference: list[int], whole: bool
) -> tuple[str, dict[str, Any]]:
    """Return the report of a run, and the same with its samples as JSON."""
    results = results_of(run)
    wanted = goals.GOALS if head["model"] == "smollm2" else goals.EVEN_GOALS
    verdicts = goals.judge_all(wanted, results)
    judged = {verdict["goal"] for verdict in verdicts}
    open_goals = [goal.name for goal in wanted if goal.name not in judged]
    values = samples_of(head, run, whole) | {"goals": verdicts, "goals_not_judged": open_goals}
    text = report.markdown(results, verdicts, run.failures, equal_tokens(reference, run.outputs), open_goals)
    return f"{report.head(head, run.failures)}\n\n{text}", values


def samples_of(head: dict[str, Any], run: driver.Driver, whole: bool) -> dict[str, Any]:
    """Return what a run measured so far, as JSON."""
    rest = {"facts": run.facts, "failures": run.failures, "outputs": run.outputs, "samples": run.samples}
    return {**head, "whole": whole, **rest}


def partial(model: str) -> Path:
    """Return where the samples of a run lie until it is whole."""
    return WORK / f"partial{suffix(model)}.json"


def keep_samples(head: dict[str, Any], run: driver.Driver) -> None:
    """Write the samples so far; a file that is there is replaced at once."""
    path = partial(head["model"])
    made = path.with_suffix(".new")
    made.write_text(json.dumps(samples_of(head, run, whole=False)) + "\n")
    made.replace(path)


def keep_partial(head: dict[str, Any], run: driver.Driver, reference: list[int]) -> None:
    """Write what a run that ended early measured beside the reports of whole ones: samples first, then a report."""
    keep_samples(head, run)
    path = partial(head["model"]).with_suffix(".md")
    driver.say(
        f"ended early; {len(run.samples)} samples so far are in {path.with_suffix('.json')} and {path.name}"
    )
    text, _ = report_of(head, run, reference, whole=False)
    rounds = [sample["round"] for sample in run.samples if sample["test"] != "start"]
    when = f"in round {max(rounds) + 1} of {head['rounds']}" if rounds else "at the starts"
    title = f"Interrupted {when}: not a whole run; numbers of samples differ."
    path.write_text(f"{title}\n\n{text}")


def publish(args: argparse.Namespace, head: dict[str, Any], run: driver.Driver, reference: list[int]) -> None:
    """Print the report of a whole run and write it where it belongs; what was kept of its rounds goes."""
    text, values = report_of(head, run, reference, whole=True)
    print(text)
    (WORK / f"report{suffix(args.model)}.md").write_text(text)
    if args.store:
        store(args, text, values)
    for kept in (partial(args.model), partial(args.model).with_suffix(".md")):
        kept.unlink(missing_ok=True)


def store(args: argparse.Namespace, text: str, values: dict[str, Any]) -> None:
    """Write docs/results/peers[-model][-name].json and the report beside it."""
    name = "-".join(filter(None, (f"peers{suffix(args.model)}", args.name)))
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


def measure(args: argparse.Namespace, head: dict[str, Any], run: driver.Driver) -> None:
    """Run the rounds; the samples are on the disk after each."""
    peaks = functools.partial(roofline.measure_peaks, args.threads)
    run.fresh_starts(0 if args.quick else args.rounds, peaks)
    run.start_all()
    run.compare_outputs()
    for round_idx in range(args.rounds):
        begin = time.monotonic()
        run.round(round_idx, peaks)
        keep_samples(head, run)
        driver.say(f"round {round_idx} took {time.monotonic() - begin:.0f} s")


def run_all(args: argparse.Namespace) -> None:
    """Install what is asked for, run the rounds and print the report; exit with 1 where nothing could be measured."""
    check_plansmith()
    head = head_of(args)
    settings = settings_of(args, checkpoint(args.model))
    with driver.Driver(settings, driver.say) as run:
        run.prepare(args.variants)
        if args.install:
            for name, facts in run.facts.items():
                driver.say(f"{name}: ready to run, weights of {facts['weight_bytes'] / 1e6:.0f} MB")
            sys.exit(f"failed: {run.failures}" if run.failures else 0)
        # Random weights give no text to compare.
        reference = reference_tokens(settings) if args.model == "smollm2" else []
        whole = False
        try:
            measure(args, head, run)
            if not run.samples:
                sys.exit(f"nothing was measured: {run.failures}")
            publish(args, head, run, reference)
            whole = True
        finally:
            if run.samples and not whole:
                keep_partial(head, run, reference)


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
