"""plansmith bench: throughput, latencies and KV use of an engine under a workload."""

from __future__ import annotations

import statistics
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from ..runtime.engine import Engine, SamplingParams
from ..runtime.errors import Error, InvalidArgumentError
from ..runtime.page_cache import wait_prefetched
from ..runtime.profile import OpProfile, measure_peaks, since
from ..runtime.prompts import check_lengths
from ..runtime.stats import EngineStats
from . import _options as options
from ._app import error_sentence
from ._measure import PERCENTILES, Load, run_workload
from ._output import print_json
from ._profile import engine_profile
from ._profile_files import ProfileFiles
from ._profile_text import profile_lines
from ._workload import Work, random_workload, read_workload

# Step records kept for a run; more steps than that only make the means of the last ones.
_MAX_ITERATIONS = 100_000


def bench(
    engine_dir: options.EngineDir,
    workload: Annotated[
        Path | None, typer.Option("--workload", help='A JSON file of {"prompt_ids": [..], "output_len": n}.')
    ] = None,
    set_name: Annotated[str | None, typer.Option("--set", help="Which set of the workload file.")] = None,
    requests: Annotated[int, typer.Option("--requests", min=1, max=1_000_000, help="Random requests.")] = 16,
    input_len: Annotated[int, typer.Option("--input-len", min=1, help="Tokens of a random prompt.")] = 128,
    output_len: Annotated[int, typer.Option("--output-len", min=1, help="Tokens to generate for it.")] = 64,
    seed: Annotated[int, typer.Option("--seed", min=0, help="Seed of random prompts and arrivals.")] = 0,
    concurrency: Annotated[
        int, typer.Option("--concurrency", min=0, help="Most requests in flight; 0 = no limit.")
    ] = 0,
    rate: Annotated[
        float, typer.Option("--rate", min=0.0, help="Mean arrivals a second (Poisson); 0 = all at once.")
    ] = 0.0,
    warmup: Annotated[
        int, typer.Option("--warmup", min=0, max=1000, help="Short requests run first, unmeasured.")
    ] = 2,
    repeat: Annotated[
        int, typer.Option("--repeat", min=1, max=1000, help="Runs; the median one is reported.")
    ] = 1,
    target: options.Target = "cpu",
    device: options.Device = None,
    cuda_graphs: options.CudaGraphs = "auto",
    threads: options.Threads = 0,
    isa: options.Isa = None,
    reuse: Annotated[
        bool, typer.Option("--reuse/--no-reuse", help="Share equal prefixes of a run's prompts.")
    ] = True,
    draft: options.Draft = None,
    speculation: options.Speculation = "auto",
    max_draft_len: options.MaxDraftLen = 0,
    host_cache_bytes: options.HostCacheBytes = 0,
    max_batch_size: options.MaxBatchSize = 0,
    max_num_tokens: options.MaxNumTokens = 0,
    kv_cache_bytes: options.KvCacheBytes = 0,
    kv_cache_free_gpu_mem_fraction: options.KvCacheFraction = options.DEFAULT_FRACTION,
    scheduler_policy: options.SchedulerPolicy = "guaranteed_no_evict",
    queue_order: options.QueueOrder = "arrival",
    weights: options.Weights = "auto",
    profile: Annotated[
        bool,
        typer.Option(
            "--profile", help="Also print where the time of the steps goes, op by op (the cpu target)."
        ),
    ] = False,
    profile_plot: Annotated[
        Path | None,
        typer.Option(
            "--profile-plot",
            metavar="FILE.svg|FILE.png",
            help="Draw the profile as a roofline to this file; turns --profile on.",
        ),
    ] = None,
    profile_json: Annotated[
        Path | None,
        typer.Option(
            "--profile-json",
            metavar="FILE",
            help="Write the profile as JSON to this file; turns --profile on.",
        ),
    ] = None,
    as_json: options.Json = False,
) -> None:
    """Measure an engine's speed and memory.

    Every request generates exactly its output length, greedily, whatever tokens come. Latencies are what a client in
    this process sees: time to the first token (TTFT), between tokens, and to the last one.

    --profile measures what the machine can do at most, and notes the time of each op beside the bytes and operations
    it takes; docs/serving.md, Where the time goes, tells how to read it.
    """
    files = ProfileFiles(profile_plot, profile_json)
    files.check(workload)
    profile = profile or bool(files)
    if set_name is not None and workload is None:
        raise InvalidArgumentError("--set names a set of a workload file; give --workload")
    opening = {
        "max_batch_size": max_batch_size,
        "max_num_tokens": max_num_tokens,
        "kv_cache_bytes": kv_cache_bytes,
        "kv_cache_free_gpu_mem_fraction": kv_cache_free_gpu_mem_fraction,
        "device": device,
        "cuda_graphs": cuda_graphs,
        "scheduler_policy": scheduler_policy,
        "queue_order": queue_order,
        "host_cache_bytes": host_cache_bytes,
        "enable_block_reuse": reuse,
        "draft": draft,
        "speculation": speculation,
        "max_draft_len": max_draft_len,
        "isa": isa,
        "weights": weights,
        "profile": profile,
        "iter_stats_max_iterations": _MAX_ITERATIONS,
    }
    with options.open_engine(engine_dir, target, threads, **opening) as engine:
        if workload is not None:
            works = read_workload(workload, set_name)
        else:
            check_lengths(input_len, SamplingParams(max_tokens=output_len), engine.model_info)
            vocab_size = engine.model_info.vocab_size
            works = random_workload(requests, input_len, output_len, vocab_size, seed)
        _check(engine, works)
        peaks = [measure_peaks(threads, isa)] if profile else []
        _warm_up(engine, works, warmup)
        before = _moment(engine, profile)
        runs = _measure(engine, works, Load(concurrency, rate, seed), repeat)
        after = _moment(engine, profile)
        if profile:  # a machine with neighbours shows what it can do at one time or the other
            peaks.append(measure_peaks(threads, isa))
        opened = engine.target or target
    result = _result(engine_dir, opened, runs)
    problems: list[str] = []
    profiled = None
    if peaks:
        profiled = engine_profile(since(after[0], before[0]), peaks, before[1], after[1], threads)
        result["profile"] = profiled.to_dict()
        problems += [error_sentence(error) for error in files.write(profiled)]
    print_json(result, indent=None) if as_json else _print_report(result)
    if profiled is not None and not as_json:
        print("", *profile_lines(profiled), sep="\n")
    failures = [failure for run in runs for failure in run["failures"]]
    if failures:
        problems.append(f"{len(failures)} requests failed; the first: {failures[0]}")
    for problem in problems:
        print(f"plansmith: {problem}", file=sys.stderr)
    if problems:
        sys.exit(1)


def _moment(engine: Engine, profile: bool) -> tuple[list[OpProfile], EngineStats]:
    return engine.profile() if profile else [], engine.stats()


def _check(engine: Engine, works: Sequence[Work]) -> None:
    """Refuse a workload that the engine cannot take, before any of it runs."""
    for i, work in enumerate(works):
        try:
            engine.check_prompt(work.prompt_ids, SamplingParams(max_tokens=work.output_len))
        except Error as error:
            raise type(error)(f"request {i} of the workload: {error}") from error


def _warm_up(engine: Engine, works: Sequence[Work], count: int) -> None:
    """Touch the weights and the KV pools, so that the first run does not pay for page faults."""
    params = SamplingParams(max_tokens=1, temperature=0.0, ignore_eos=True, detokenize=False)
    engine.generate([works[i % len(works)].prompt_ids for i in range(count)], params)
    wait_prefetched()


def _measure(engine: Engine, works: Sequence[Work], load: Load, repeat: int) -> list[dict[str, Any]]:
    console = Console(stderr=True)
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    runs = []
    with Progress(*columns, console=console, disable=not console.is_terminal, transient=True) as progress:
        for i in range(repeat):
            task = progress.add_task(f"run {i + 1} of {repeat}", total=len(works))
            # A salt of its own: no run finds what the warm-up or another one left in the cache.
            runs.append(
                run_workload(engine, works, load, lambda task=task: progress.advance(task), cache_salt=i + 1)  # type: ignore[misc]
            )
    return runs


def _result(engine_dir: Path, target: str, runs: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Return the median run (by generated tokens a second) with the throughput of all."""
    speeds = [run["generated_tokens_per_s"] for run in runs]
    median = min(runs, key=lambda run: abs(run["generated_tokens_per_s"] - statistics.median(speeds)))
    head = {"engine": str(engine_dir), "target": target, "num_runs": len(runs)}
    return head | {"generated_tokens_per_s_of_runs": speeds} | median


def _sharing_rows(result: dict[str, Any]) -> list[tuple[str, str]]:
    """Return the rows of prefix reuse and speculation, where there was any."""
    kv, spec, rows = result["kv"], result["speculation"], []
    if kv["reused_tokens"]:
        rows.append(
            ("prefix reuse", f"{kv['reused_tokens']} tokens not computed, hit rate {kv['hit_rate']:.1%}")
        )
    if spec["draft_tokens"]:
        rows.append(
            (
                "speculation",
                f"{spec['accepted_tokens']} of {spec['draft_tokens']} draft tokens accepted "
                f"({spec['acceptance_rate']:.1%}), {spec['acceptance_length']:.2f} tokens a verification, "
                f"{spec['overhead']:.1%} of the time drafting",
            )
        )
    return rows


def _print_report(result: dict[str, Any]) -> None:
    console = Console()
    kv = result["kv"]
    speeds = result["generated_tokens_per_s_of_runs"]
    spread = f" ({min(speeds):.1f}-{max(speeds):.1f} in {len(speeds)} runs)" if len(speeds) > 1 else ""
    rows = [
        ("requests", f"{result['num_requests']}, {len(result['failures'])} failed"),
        ("tokens", f"{result['prompt_tokens']} of prompts, {result['generated_tokens']} generated"),
        ("time", f"{result['wall_s']:.2f} s ({result['cpu_s']:.2f} s of CPU)"),
        ("generated tokens/s", f"{result['generated_tokens_per_s']:.1f}{spread}"),
        ("all tokens/s", f"{result['total_tokens_per_s']:.1f}"),
        (
            "steps",
            f"{result['steps']}, on average {result['mean_requests_a_step']:.1f} requests and "
            f"{result['mean_tokens_a_step']:.1f} tokens in each",
        ),
        (
            "scheduler",
            f"{result['scheduler_s'] * 1e3:.1f} ms beside {result['executor_s']:.2f} s in the executor",
        ),
        (
            "KV blocks",
            f"{kv['peak_used_blocks']} of {kv['max_num_blocks']} in use at most "
            f"({kv['cache_bytes'] / 2**20:.0f} MiB in all), {kv['waste'] * 100:.1f}% "
            f"of the allocated positions empty, {result['num_pauses']} pauses",
        ),
        *_sharing_rows(result),
        ("memory", f"{result['peak_rss_bytes'] / 2**20:.0f} MiB resident at most"),
    ]
    for name, text in rows:
        console.print(f"{name:20s}{text}", highlight=False, soft_wrap=True)
    table = Table("ms", "mean", *(f"p{p}" for p in PERCENTILES), box=None)
    for name, key in (("first token", "ttft"), ("between tokens", "inter_token"), ("last token", "e2e")):
        numbers = result[key]
        if numbers is not None:
            table.add_row(name, *(f"{value:.1f}" for value in numbers.values()))
    console.print(table)
