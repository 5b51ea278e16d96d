"""What structured output adds to a step: SmolLM2 at int8, 16 requests in flight, with and without guides.

    python bench/guided.py

The same 16 prompts run freely, under an expression that allows all text (the masks cost, the tokens stay), and under a
JSON schema; in turns, in one engine. A step counts when all 16 generate and nothing else happens. No request can end
before its tokens are used up: freely by ignore_eos, with a guide because the language has no shorter texts.
"""

from __future__ import annotations

import argparse
import statistics
from typing import Any

import common
from plansmith.runtime.engine import Engine, SamplingParams
from plansmith.runtime.guided import GuidedParams

SCHEMA = {
    "type": "array",
    "minItems": 500,
    "items": {
        "type": "object",
        "properties": {
            "name": {"type": "string", "minLength": 3, "maxLength": 40},
            "age": {"type": "integer", "minimum": 0, "maximum": 150},
            "email": {"type": "string", "pattern": "^[a-z]{2,12}@[a-z]{2,12}\\.(com|org)$"},
            "tags": {"type": "array", "items": {"enum": ["new", "paid", "blocked", "admin"]}, "maxItems": 3},
        },
        "required": ["name", "age", "email", "tags"],
        "additionalProperties": False,
    },
}
MODES: dict[str, GuidedParams | None] = {
    "free": None,
    "any text": GuidedParams(regex=r"(?s:.){5000,}"),
    "json schema": GuidedParams(json_schema=SCHEMA),
}


def run(
    engine: Engine, prompts: list[list[int]], mode: str, num_tokens: int
) -> tuple[list[float], list[float], list[Any]]:
    """Return the times of the full steps, what of them was outside the model, ms, and the tokens."""
    guide = MODES[mode]
    params = SamplingParams(
        max_tokens=num_tokens, temperature=0.0, guided=guide, ignore_eos=guide is None, detokenize=False
    )
    engine.iteration_stats()
    completions = engine.generate(prompts, params)
    full = [
        step
        for step in engine.iteration_stats()
        if step.num_gen_requests == len(prompts)
        and step.num_ctx_tokens == 0
        and step.num_completed_requests == 0
    ]
    times = [step.iter_latency_ms for step in full]
    return (
        times,
        [s.iter_latency_ms - s.executor_latency_ms for s in full],
        [c.token_ids for c in completions],
    )


def main() -> None:
    """Measure, print the table, store the results."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--rounds", type=int, default=5, help="how often each mode runs, in turns")
    parser.add_argument("--tokens", type=int, default=64, help="of each request")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--dry", action="store_true", help="do not store the results")
    args = parser.parse_args()
    prompts = [request["prompt_ids"] for request in common.workload()["requests16"]]
    steps: dict[str, list[list[float]]] = {mode: [] for mode in MODES}
    outside: dict[str, list[float]] = {mode: [] for mode in MODES}
    tokens: dict[str, list[Any]] = {}
    with Engine.open(common.engine("int8"), num_threads=args.threads) as engine:
        for mode in MODES:
            run(engine, prompts, mode, 8)  # compiles the grammar, fills the prefix cache
        for _ in range(args.rounds):
            for mode in MODES:
                times, rest, tokens[mode] = run(engine, prompts, mode, args.tokens)
                steps[mode].append(times)
                outside[mode] += rest
    medians = {mode: [statistics.median(times) for times in rounds] for mode, rounds in steps.items()}
    # Round by round, so that a machine that slows down between rounds cancels out.
    added = {mode: [b / a - 1 for a, b in zip(medians["free"], medians[mode], strict=True)] for mode in MODES}
    same = [
        a == b
        for x, y in zip(tokens["free"], tokens["any text"], strict=True)
        for a, b in zip(x, y, strict=True)
    ]
    rows = [
        [
            mode,
            common.spread(medians[mode], 2),
            f"{statistics.median(outside[mode]):.2f}",
            ""
            if mode == "free"
            else f"{statistics.median(added[mode]):+.1%} ({min(added[mode]):+.1%} to {max(added[mode]):+.1%})",
        ]
        for mode in MODES
    ]
    print(
        common.table(
            ["16 requests", "step, ms: median of each round", "of it outside the model", "added"], rows
        )
    )
    print(f"\ntokens of `any text` that are those of `free`: {statistics.mean(same):.1%}")
    if not args.dry:
        common.store(
            "guided",
            {
                "batch": len(prompts),
                "threads": args.threads,
                "tokens": args.tokens,
                "step_ms": medians,
                "outside_ms": {mode: statistics.median(values) for mode, values in outside.items()},
                "added": {
                    mode: statistics.median(values) for mode, values in added.items() if mode != "free"
                },
                "same_tokens": statistics.mean(same),
            },
        )


if __name__ == "__main__":
    main()
