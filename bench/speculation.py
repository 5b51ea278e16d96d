"""Tokens a second of one stream with speculation and without: a draft model on free answers, n-grams on copying ones.

    python bench/speculation.py [--rounds 3] [--threads 2] [--draft int4] [--max-draft-len 8] [--fixed]

For each prompt the target alone and the speculating engine take turns, in one process and over one mapped plan, so that
whatever else the machine does meets both. Greedy; the tokens of both must be the same or the run fails. Prompts are not
reused between the rounds. The bound is what bytes allow: a verification reads the target's weights once and yields
`acceptance length` tokens, each draft round reads the draft's.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import time
from pathlib import Path
from typing import Any

import common
from plansmith.runtime.engine import Completion, Engine, SamplingParams

WORKLOADS = common.ROOT / "bench" / "workloads"


def prompts_of(name: str) -> tuple[list[str], int]:
    """Return a workload's prompts, and how many tokens to generate for each."""
    loaded = json.loads((WORKLOADS / f"{name}.json").read_text())
    prompts = [p if isinstance(p, str) else p["text"] for p in loaded["prompts"]]
    return prompts, int(loaded["output_len"])


def timed(engine: Engine, prompt: str, max_tokens: int) -> tuple[float, Completion]:
    """Return how long one greedy request took, in seconds, and what came."""
    params = SamplingParams(max_tokens=max_tokens, temperature=0.0, ignore_eos=True, detokenize=False)
    begin = time.perf_counter()
    completion = engine.generate([prompt], params)[0]
    return time.perf_counter() - begin, completion


def run(
    case: str, alone: Engine, speculating: Engine, prompts: list[str], max_tokens: int, rounds: int
) -> dict[str, Any]:
    """Return both engines' times over all prompts, round by round, and what became of the drafts."""
    for engine in (alone, speculating):  # maps the plans, and lets adaptive lengths meet the machine
        timed(engine, prompts[0], max_tokens)
    before = speculating.stats()
    samples = []
    for round_idx in range(rounds):
        seconds = {"alone": 0.0, "speculating": 0.0}
        identical = 0
        for i, prompt in enumerate(prompts):
            turns = [("alone", alone), ("speculating", speculating)]
            tokens = {}
            for name, engine in turns if (i + round_idx) % 2 == 0 else reversed(turns):
                took, completion = timed(engine, prompt, max_tokens)
                seconds[name] += took
                tokens[name] = list(completion.token_ids)
            identical += tokens["alone"] == tokens["speculating"]
        if identical != len(prompts):
            raise SystemExit(f"{case}: only {identical} of {len(prompts)} prompts gave the same tokens")
        num_tokens = len(prompts) * max_tokens
        sample = {f"{name}_tokens_per_s": num_tokens / took for name, took in seconds.items()}
        sample["ratio"] = seconds["alone"] / seconds["speculating"]
        samples.append({"round": round_idx, "load_average": os.getloadavg()[0], **sample})
        print(f"{case} round {round_idx}: {sample['ratio']:.2f} x", flush=True)
    return {
        "case": case,
        "identical_prompts": len(prompts),
        "samples": samples,
        **drafting(before, speculating.stats()),
    }


def drafting(before: Any, after: Any) -> dict[str, float]:
    """Return what became of the drafts between two statistics of an engine."""
    drafted = after.num_draft_tokens - before.num_draft_tokens
    accepted = after.num_accepted_draft_tokens - before.num_accepted_draft_tokens
    with_drafts = after.num_requests_with_draft_tokens - before.num_requests_with_draft_tokens
    steps = after.iter - before.iter
    draft_ns = after.draft_time_ns - before.draft_time_ns
    step_ns = after.step_time_ns - before.step_time_ns
    return {
        "num_draft_tokens": drafted,
        "acceptance": accepted / max(1, drafted),
        "acceptance_length": 1 + accepted / max(1, with_drafts),
        "mean_draft_len": drafted / max(1, with_drafts),
        "share_of_steps_with_drafts": with_drafts / max(1, steps),
        "draft_overhead": draft_ns / max(1, draft_ns + step_ns),
    }


def byte_bound(result: dict[str, Any], target_bytes: int, draft_bytes: int) -> float:
    """Return the ratio there would be if reading the plans' weights were all that took time."""
    cost = target_bytes + result["mean_draft_len"] * draft_bytes
    return float(result["acceptance_length"] * target_bytes / cost)


def plan_bytes(engine_dir: Path) -> int:
    """Return the size of a cpu plan."""
    return (engine_dir / "targets" / "cpu" / "model.plan").stat().st_size


def main() -> None:
    """Run both cases, print the table, store everything."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--prompts", type=int, default=0, help="of each workload; 0 = all")
    parser.add_argument("--draft", default="int4", help="precision of the draft, or an engine directory")
    parser.add_argument("--max-draft-len", type=int, default=8)
    parser.add_argument("--fixed", action="store_true", help="always the longest draft, not as many as pay")
    parser.add_argument(
        "--output", default="speculation", help="name of the result file; empty = store nothing"
    )
    args = parser.parse_args()
    target = common.engine("fp32")
    draft = Path(args.draft) if Path(args.draft).is_dir() else common.engine(args.draft)
    options: dict[str, Any] = {"num_threads": args.threads, "max_batch_size": 1, "enable_block_reuse": False}
    drafting_options = {"max_draft_len": args.max_draft_len, "adaptive_draft_len": not args.fixed}
    results = []
    cases = [
        (
            f"fp32 with its {args.draft} draft, free answers",
            "questions32",
            {"draft": draft},
            plan_bytes(draft),
        ),
        ("fp32 with n-gram lookup, copying answers", "copy_heavy", {"speculation": "ngram"}, 0),
    ]
    for case, workload, how, draft_bytes in cases:
        prompts, max_tokens = prompts_of(workload)
        prompts = prompts[: args.prompts or None]
        with (
            Engine.open(target, speculation="off", **options) as alone,
            Engine.open(target, **how, **drafting_options, **options) as speculating,
        ):
            result = run(case, alone, speculating, prompts, max_tokens, args.rounds)
        result["plan_bytes"] = {"target": plan_bytes(target), "draft": draft_bytes}
        result["byte_bound"] = byte_bound(result, plan_bytes(target), draft_bytes)
        results.append(result)
    print(report(results))
    if args.output:
        common.store(
            args.output, {"threads": args.threads, "max_draft_len": args.max_draft_len, "cases": results}
        )


def report(results: list[dict[str, Any]]) -> str:
    """Return the table."""
    rows = []
    for r in results:
        column = {name: [s[name] for s in r["samples"]] for name in r["samples"][0]}
        rows.append(
            [
                r["case"],
                common.spread(column["alone_tokens_per_s"]),
                common.spread(column["speculating_tokens_per_s"]),
                f"{statistics.median(column['ratio']):.2f} x",
                f"{r['byte_bound']:.2f} x",
                f"{r['acceptance']:.2f}",
                f"{r['mean_draft_len']:.1f}",
                f"{r['acceptance_length']:.2f}",
                f"{100 * r['draft_overhead']:.0f} %",
                f"{r['identical_prompts']} of {r['identical_prompts']}",
            ]
        )
    header = ["one stream, greedy", "alone, tokens/s", "speculating", "ratio", "bound by bytes", "acceptance"]
    header += ["drafted a step", "tokens a step", "time in the draft", "identical prompts"]
    return common.table(header, rows)


if __name__ == "__main__":
    main()
