"""The tests of the benchmark: ids that change each round, checks of answers, numbers worked out by hand."""

from __future__ import annotations

import itertools
import sys
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "bench"))

from peer import cases
from peer.session import PeerError

ROOT = Path(__file__).resolve().parents[2]
WORKLOAD = cases.read_workload(ROOT / "bench" / "workloads" / "workload16.json")


def test_the_workload_is_as_described() -> None:
    lengths = {
        test: [(len(r["prompt_ids"]), r["output_len"]) for r in WORKLOAD.tests[test]] for test in cases.TESTS
    }
    assert lengths["single"] == [(32, 128)]
    assert lengths["prefill"] == [(512, 1)]
    assert len(lengths["conc16"]) == 16
    assert sum(n for _, n in lengths["conc16"]) == 1210
    assert lengths["shared16"] == [(272, 32)] * 16


def test_no_round_begins_as_another_and_the_rest_stays() -> None:
    firsts = []
    for round_idx, test in itertools.product(range(50), cases.TESTS):
        requests = WORKLOAD.requests(test, round_idx)
        (first,) = {r["prompt_ids"][0] for r in requests}
        firsts.append(first)
        for own, written in zip(requests, WORKLOAD.tests[test], strict=True):
            assert own["prompt_ids"][1:] == written["prompt_ids"][1:]
            assert own["output_len"] == written["output_len"]
    warm_ups = [*WORKLOAD.warm_up(cases.TESTS), *WORKLOAD.short_warm_up()]
    firsts += [requests[0]["prompt_ids"][0] for requests in warm_ups]
    assert len(set(firsts)) == len(firsts)
    assert all(0 <= first < WORKLOAD.vocab_size for first in firsts)


def test_a_warm_up_has_the_shape_of_every_test() -> None:
    tests = ["single", "conc16"]
    for requests, test in zip(WORKLOAD.warm_up(tests), tests, strict=True):
        assert len({r["prompt_ids"][0] for r in requests}) == 1
        for own, written in zip(requests, WORKLOAD.tests[test], strict=True):
            assert own["prompt_ids"][1:] == written["prompt_ids"][1:]
            assert own["output_len"] == written["output_len"]


def test_a_short_warm_up_still_reads_a_prompt_of_512() -> None:
    short, prompt = WORKLOAD.short_warm_up()
    assert [(len(r["prompt_ids"]) <= 32, r["output_len"]) for r in short] == [(True, 8)] * 4
    assert [(len(r["prompt_ids"]), r["output_len"]) for r in prompt] == [(512, 1)]


def test_what_was_shared_is_still_shared() -> None:
    prompts = [r["prompt_ids"] for r in WORKLOAD.requests("shared16", 3)]
    assert len({tuple(p[:256]) for p in prompts}) == 1
    assert len({tuple(p) for p in prompts}) == 16


REQUESTS = [{"prompt_ids": [1, 2], "output_len": 16}, {"prompt_ids": [3], "output_len": 2}]
GOOD = [list(range(16)), [7, 7]]


@pytest.mark.parametrize(
    ("token_ids", "message"),
    [
        ([GOOD[0]], "answered 1 requests of 2"),
        ([GOOD[0], [7]], "request 1: 1 tokens, wanted 2"),
        ([GOOD[0], [7, 100]], "request 1: token id 100 of a vocabulary of 100"),
        ([GOOD[0], [7, -1]], "request 1: token id"),
        ([[5] * 16, GOOD[1]], "request 0: token 5 16 times"),
    ],
)
def test_wrong_answers_are_refused(token_ids: list[list[int]], message: str) -> None:
    with pytest.raises(PeerError, match=message):
        cases.check(REQUESTS, {"token_ids": token_ids}, 100)


def test_right_answers_are_not() -> None:
    cases.check(REQUESTS, {"token_ids": GOOD}, 100)
    cases.check(REQUESTS, {"token_ids": [[5] * 16, GOOD[1]]}, 100, varied=False)


def test_numbers() -> None:
    one: dict[str, Any] = {"ttft_s": [0.5], "end_s": [2.0], "wall_s": 2.5}
    single = [{"prompt_ids": [1] * 32, "output_len": 16}]
    assert cases.metrics("single", single, one) == {"decode_tokens_per_s": 10.0, "ttft_s": 0.5}
    prompt = [{"prompt_ids": [1] * 512, "output_len": 1}]
    assert cases.metrics("prefill", prompt, one) == {"prefill_tokens_per_s": 1024.0}
    many = {"ttft_s": [1.0, 2.0], "end_s": [3.0, 4.0], "wall_s": 4.0}
    assert cases.metrics("conc16", REQUESTS, many) == {
        "generated_tokens_per_s": 4.5,
        "wall_s": 4.0,
        "ttft_mean_s": 1.5,
        "ttft_p95_s": pytest.approx(1.95),
    }


def test_percentiles_lie_between_samples() -> None:
    assert cases.percentile([3.0], 0.95) == 3.0
    assert cases.percentile([4.0, 0.0, 2.0], 0.5) == 2.0
    assert cases.percentile([4.0, 0.0, 2.0], 0.75) == 3.0
    assert cases.percentile([4.0, 0.0, 2.0], 1.0) == 4.0


def test_equal_leading_tokens() -> None:
    assert cases.equal_leading([1, 2, 3], [1, 2, 4]) == 2
    assert cases.equal_leading([1, 2], [1, 2, 4]) == 2
    assert cases.equal_leading([], [1]) == 0
