"""What every engine is asked to do: the tests, the ids that change from round to round, checks of the answers."""

from __future__ import annotations

import dataclasses
import json
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from .session import PeerError, Request

# single   one request, 32 prompt tokens, 128 generated: how fast one user reads
# prefill  one request, 512 prompt tokens, 1 generated: how fast a prompt is read
# conc16   16 requests of 17 to 253 and 16 to 125 tokens, sent at once: a small server
# shared16 16 requests that share their first 256 tokens, sent at once: a system prompt
TESTS = ("single", "prefill", "conc16", "shared16")
# Ids that no token of special meaning has, in every round other ones; the vocabulary of the workload has 49152.
_FIRST_SALT = 1000
_NUM_SALTS = 40000


@dataclasses.dataclass(frozen=True)
class Workload:
    """The requests of the tests as written, without a round's own first id."""

    tests: dict[str, list[Request]]
    vocab_size: int

    def requests(self, test: str, round_idx: int) -> list[Request]:
        """Return a test's requests with a first token id of this round and test, so that no cached prefix helps.

        Requests of a test get the same id, so what they share they go on sharing.
        """
        salt = _FIRST_SALT + (7 * (round_idx * len(TESTS) + TESTS.index(test))) % _NUM_SALTS
        return _beginning_with(salt, self.tests[test])

    def warm_up(self, tests: Sequence[str]) -> list[list[Request]]:
        """Return runs that make an engine touch its weights and allocate or compile what it does late: each test once.

        Their first ids are those of no round, so that no round finds a prefix of them cached.
        """
        return [_beginning_with(_FIRST_SALT - 1 - TESTS.index(test), self.tests[test]) for test in tests]

    def short_warm_up(self) -> list[list[Request]]:
        """Return two cheap runs for an engine that is started anew for each round: four short requests, one prompt."""
        salt = _FIRST_SALT - 1 - len(TESTS)
        short = _beginning_with(salt, self.tests["conc16"][:4])
        short = [{"prompt_ids": r["prompt_ids"][:32], "output_len": 8} for r in short]
        return [short, _beginning_with(salt - 1, self.tests["prefill"])]


def _beginning_with(first: int, requests: Sequence[Request]) -> list[Request]:
    return [{**r, "prompt_ids": [first, *r["prompt_ids"][1:]]} for r in requests]


def read_workload(path: Path) -> Workload:
    """Return the workload of a file of bench/workloads."""
    loaded = json.loads(path.read_text())
    tests = {
        "single": [loaded["single"]],
        "prefill": [loaded["prefill"]],
        "conc16": loaded["requests16"],
        "shared16": loaded["shared_prefix16"]["requests"],
    }
    return Workload(tests, loaded["vocab"])


def check(requests: Sequence[Request], answer: dict[str, Any], vocab_size: int, varied: bool = True) -> None:
    """Raise PeerError where an answer is not what was asked for.

    varied : refuse an output that repeats one token; False for a model of random weights, which may do that
    """
    outputs = answer["token_ids"]
    if len(outputs) != len(requests):
        raise PeerError(f"answered {len(outputs)} requests of {len(requests)}")
    for idx, (request, output) in enumerate(zip(requests, outputs, strict=True)):
        if len(output) != request["output_len"]:
            raise PeerError(f"request {idx}: {len(output)} tokens, wanted {request['output_len']}")
        if not all(0 <= token < vocab_size for token in output):
            raise PeerError(f"request {idx}: token id {max(output)} of a vocabulary of {vocab_size}")
        if varied and len(output) >= 16 and len(set(output)) == 1:
            raise PeerError(f"request {idx}: token {output[0]} {len(output)} times and no other")


def metrics(test: str, requests: Sequence[Request], answer: dict[str, Any]) -> dict[str, float]:
    """Return a run's numbers by name."""
    ttft_s = answer["ttft_s"]
    if test == "single":
        generation_s = answer["end_s"][0] - ttft_s[0]
        return {"decode_tokens_per_s": (requests[0]["output_len"] - 1) / generation_s, "ttft_s": ttft_s[0]}
    if test == "prefill":
        return {"prefill_tokens_per_s": len(requests[0]["prompt_ids"]) / ttft_s[0]}
    generated = sum(request["output_len"] for request in requests)
    return {
        "generated_tokens_per_s": generated / answer["wall_s"],
        "wall_s": answer["wall_s"],
        "ttft_mean_s": statistics.mean(ttft_s),
        "ttft_p95_s": percentile(ttft_s, 0.95),
    }


def percentile(values: Sequence[float], share: float) -> float:
    """Return the value at `share` of the sorted values, between two of them in proportion."""
    ordered = sorted(values)
    position = share * (len(ordered) - 1)
    low = int(position)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (position - low)


def equal_leading(left: Sequence[int], right: Sequence[int]) -> int:
    """Return how many tokens at the start are the same."""
    count = 0
    for a, b in zip(left, right, strict=False):
        if a != b:
            break
        count += 1
    return count
