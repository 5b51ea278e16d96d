"""What sharing a prompt's beginning saves: 16 requests with the same first 256 tokens, at once and one after another.

    python bench/prefix_reuse.py [--rounds 5] [--threads 2] [--precisions fp32,int8]

Each round runs every engine with reuse on and off, one after another, in this process, on the token ids of
bench/workloads/workload16.json (`shared_prefix16`, 32 tokens of output each, end tokens ignored). The prompts' first
token is changed each round, so nothing cached in an earlier one helps. "All prompts read" is the time until the last
request has its first token: what reuse is about; the total also holds the decoding of 512 tokens, which no reuse of
prompts can shorten.
"""

from __future__ import annotations

import argparse
import statistics
import time
from typing import Any

import common
from plansmith.runtime.engine import Engine
from plansmith.runtime.sampling import SamplingParams


def prompts(round_idx: int) -> list[tuple[list[int], int]]:
    """Return (token ids, tokens to generate) of the 16 requests, with a first token of this round."""
    requests = common.workload()["shared_prefix16"]["requests"]
    return [([1000 + 7 * round_idx, *r["prompt_ids"][1:]], r["output_len"]) for r in requests]


def greedy(max_tokens: int) -> SamplingParams:
    """Return parameters for exactly `max_tokens` greedy tokens."""
    return SamplingParams(max_tokens=max_tokens, temperature=0.0, ignore_eos=True, detokenize=False)


def at_once(engine: Engine, requests: list[tuple[list[int], int]]) -> dict[str, Any]:
    """Return the total time, the time until all have a first token, and the tokens."""
    begin = time.monotonic_ns()
    handles = [engine.submit(ids, greedy(n)) for ids, n in requests]
    done = [handle.result() for handle in handles]
    end = time.monotonic_ns()
    first = [c.stats.first_token_time_ns - begin for c in done]
    return {
        "wall_s": (end - begin) / 1e9,
        "all_first_tokens_s": max(first) / 1e9,
        "mean_ttft_s": statistics.mean(first) / 1e9,
        "tokens": [list(c.token_ids) for c in done],
        "reused_tokens": sum(c.stats.reused_tokens for c in done),
    }


def in_turn(engine: Engine, requests: list[tuple[list[int], int]]) -> dict[str, Any]:
    """Return the first request's time to first token, and the others'."""
    ttft = []
    for ids, n in requests:
        completion = engine.submit(ids, greedy(n)).result()
        ttft.append((completion.stats.first_token_time_ns - completion.stats.arrival_time_ns) / 1e9)
    return {"first_ttft_s": ttft[0], "second_ttft_s": ttft[1], "others_ttft_s": statistics.median(ttft[1:])}


def measure(precision: str, rounds: int, threads: int) -> list[dict[str, Any]]:
    """Return a sample for each round and switch; raises SystemExit when reuse changes a token."""
    samples = []
    path = common.engine(precision)
    on = Engine.open(path, num_threads=threads)
    off = Engine.open(path, num_threads=threads, enable_block_reuse=False)
    with on, off:
        for round_idx in range(rounds):
            pair = {}
            for name, engine in (("on", on), ("off", off)):
                pair[name] = at_once(engine, prompts(2 * round_idx))
                sample = {"precision": precision, "reuse": name, "round": round_idx, **pair[name]}
                sample.update(in_turn(engine, prompts(2 * round_idx + 1)))
                del sample["tokens"]
                samples.append(sample)
            if pair["on"]["tokens"] != pair["off"]["tokens"]:
                raise SystemExit(f"{precision}: reuse changed the tokens")
    return samples


def main() -> None:
    """Run the rounds, print the tables, store everything."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--precisions", default="fp32,int8")
    args = parser.parse_args()
    samples = []
    for precision in args.precisions.split(","):
        samples += measure(precision, args.rounds, args.threads)
    rows = []
    for precision in args.precisions.split(","):
        own = {
            name: [s for s in samples if s["precision"] == precision and s["reuse"] == name]
            for name in ("on", "off")
        }
        median = {
            name: {k: statistics.median(s[k] for s in own[name]) for k in own[name][0] if k.endswith("_s")}
            for name in own
        }
        for name in ("off", "on"):
            rows.append(
                [precision, name]
                + [common.spread([s[k] for s in own[name]], 3) for k in ("wall_s", "all_first_tokens_s")]
                + [common.spread([s[k] for s in own[name]], 4) for k in ("first_ttft_s", "second_ttft_s")]
            )
        ratio = {k: median["off"][k] / median["on"][k] for k in median["on"]}
        in_turn_ratio = median["on"]["first_ttft_s"] / median["on"]["second_ttft_s"]
        rows.append(
            [
                precision,
                "ratio",
                f"{ratio['wall_s']:.2f}",
                f"{ratio['all_first_tokens_s']:.2f}",
                "",
                f"{in_turn_ratio:.1f} (first / second)",
            ]
        )
    header = ["precision", "reuse", "at once: total s", "all prompts read s", "in turn: first TTFT s"]
    print(common.table([*header, "second TTFT s"], rows))
    common.store("prefix_reuse", {"threads": args.threads, "samples": samples})


if __name__ == "__main__":
    main()
