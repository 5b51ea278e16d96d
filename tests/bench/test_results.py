"""Statistics, shares of the peaks, goals and the report, from runs of round numbers."""

from __future__ import annotations

import dataclasses
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "bench"))
sys.path.insert(0, str(Path(__file__).resolve().parent))

import history
from peer import goals, report
from peer.results import better
from peer.roofline import ModelCost, arithmetic_share, bandwidth_share, bits_of
from peer.statistic import Spread, number, round_ratios
from runs import COST, PEAKS, results

SPEEDS = {
    "plansmith int8": [200.0, 220.0, 180.0],
    "plansmith int4": [300.0, 330.0, 270.0],
    "llama.cpp q8_0": [100.0, 100.0, 100.0],
    "llama.cpp q4_0": [150.0, 165.0, 90.0],
    "OpenVINO GenAI int8": [110.0, 55.0, 60.0],
}


def test_spreads() -> None:
    spread = Spread.of([10.0, 30.0, 20.0])
    assert dataclasses.astuple(spread) == (20.0, 10.0, 30.0, 3)
    assert spread.noise == 0.5
    assert spread.text() == "20.0 (10.0-30.0, n=3)"
    assert Spread.of([0.25]).text() == "0.250 (n=1)"
    assert [number(v) for v in (1234.4, 123.4, 12.34, 1.234, 0.1234)] == [
        "1234",
        "123",
        "12.3",
        "1.23",
        "0.123",
    ]


def test_ratios_are_of_rounds_that_both_have() -> None:
    assert round_ratios({0: 4.0, 1: 9.0, 3: 8.0}, {0: 2.0, 2: 1.0, 3: 4.0}) == [2.0, 2.0]


@pytest.mark.parametrize(
    ("variant", "bits"),
    [("int4", 4), ("q4_0", 4), ("int8-avx2", 8), ("q8_0", 8), ("bfloat16", 16), ("float32", 32), ("f32", 32)],
)
def test_bits(variant: str, bits: int) -> None:
    assert bits_of(variant) == bits


def test_bits_of_an_unknown_name() -> None:
    with pytest.raises(ValueError, match="no bits are known of variant 'fast'"):
        bits_of("fast")


def test_operations_and_shares() -> None:
    requests = [{"prompt_ids": [1] * 10, "output_len": 3}, {"prompt_ids": [1] * 4, "output_len": 1}]
    # 12 and 4 tokens are read: what is generated last is not. The logits of 4 are computed.
    assert COST.operations(requests) == 2 * (1000 * 16 + 100 * 4)
    assert arithmetic_share(500_000_000_000, 2.0, "int8", PEAKS) == 0.25
    assert arithmetic_share(500_000_000_000, 2.0, "fp32", PEAKS) == 1.25
    assert arithmetic_share(1, 1.0, "bf16", PEAKS) is None
    assert bandwidth_share(200.0, 100_000_000, PEAKS) == 0.5
    assert bandwidth_share(200.0, 100_000_000, PEAKS, sustained=True) == 1.0


def test_the_cost_of_the_demo_model(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(
        '{"hidden_size": 576, "num_attention_heads": 9, "num_key_value_heads": 3, "intermediate_size": 1536,'
        ' "num_hidden_layers": 30, "vocab_size": 49152}'
    )
    cost = ModelCost.of(tmp_path)
    norms = 61 * 576
    assert cost.layer_weights + cost.logits_weights + norms == 134_515_008  # its parameters


def test_values_by_round() -> None:
    run = results(SPEEDS, peak_rss_bytes=5e8)
    assert run.values("plansmith int8", "single", "decode_tokens_per_s") == {0: 200.0, 1: 220.0, 2: 180.0}
    assert run.values("plansmith int8", "single", "bandwidth_share")[0] == 0.5
    assert run.values("plansmith int8", "memory", "peak_rss_mb") == {0: 500.0, 1: 500.0, 2: 500.0}
    assert run.values("plansmith int8", "start", "start_to_first_token_s")[0] == 0.05
    prefill = run.values("plansmith int8", "prefill", "arithmetic_share")[0]
    assert prefill == pytest.approx(2 * (1000 * 512 + 100) / (512 / 2000) / 1e12)
    assert run.values("another", "single", "ttft_s") == {}
    assert run.peers() == ["llama.cpp q8_0", "llama.cpp q4_0", "OpenVINO GenAI int8"]


def test_which_way_is_better() -> None:
    for goal in goals.GOALS:
        more = "tokens/s" in goal.name or "share" in goal.name
        assert better(goal.metric) == (1 if more else -1), goal.name


def goal(name: str) -> goals.Goal:
    (found,) = [g for g in goals.GOALS if g.name == name]
    return found


def test_a_goal_beside_the_best_peer_of_its_bits() -> None:
    run = results(SPEEDS)
    verdict = goals.judge(goal("one request, 8 bits: tokens/s"), run)
    assert verdict is not None
    assert verdict["peer"] == "llama.cpp q8_0"
    assert (verdict["got"], verdict["low"], verdict["high"]) == (2.0, 1.8, 2.2)
    assert verdict["met"]
    verdict = goals.judge(goal("one request, 4 bits: tokens/s"), run)
    assert verdict is not None and verdict["peer"] == "llama.cpp q4_0" and verdict["got"] == 2.0


def test_a_goal_without_a_precision_takes_the_best_of_both_sides() -> None:
    verdict = goals.judge(goal("16 at once: generated tokens/s"), results(SPEEDS))
    assert verdict is not None
    assert (verdict["ours"], verdict["value"]) == ("plansmith int4", 300.0)
    assert (verdict["peer"], verdict["peer_value"]) == ("llama.cpp q4_0", 150.0)
    # 300/150, 330/165, 270/90: each round beside the same round.
    assert (verdict["got"], verdict["low"], verdict["high"]) == (2.0, 2.0, 3.0)
    assert not verdict["met"]
    assert report.distance(verdict) == pytest.approx(1 / 3)


@pytest.mark.parametrize(
    ("speeds", "ours", "peer"),
    [
        (
            {"plansmith int8": [5.0], "plansmith int4": [4.0], "x q4_0": [1.0], "x q8_0": [2.0]},
            "int8",
            "x q8_0",
        ),
        ({"plansmith int8": [1.0], "plansmith int8-avx2": [9.0], "x q8_0": [2.0]}, "int8", "x q8_0"),
        ({"plansmith bf16": [9.0], "plansmith int8": [1.0], "x f32": [2.0]}, "bf16", "x f32"),
    ],
)
def test_the_best_of_ours_is_of_any_precision_but_with_all_kernels(
    speeds: dict[str, list[float]], ours: str, peer: str
) -> None:
    for test in ("prefill", "conc16", "shared16"):
        (found,) = [g for g in goals.GOALS if g.test == test and g.ratio and "tokens_per_s" in g.metric]
        verdict = goals.judge(found, results(speeds))
        assert verdict is not None
        assert (verdict["ours"], verdict["peer"]) == (f"plansmith {ours}", peer)


def test_a_goal_where_less_is_better() -> None:
    verdict = goals.judge(goal("16 at once: mean TTFT"), results(SPEEDS))
    assert verdict is not None and verdict["peer"] == "llama.cpp q4_0"
    assert (verdict["ours"], verdict["value"], verdict["peer_value"]) == ("plansmith int4", 1 / 300, 1 / 150)
    assert verdict["got"] == pytest.approx(0.5)
    assert verdict["met"] and not verdict["at_least"]
    assert report.distance(verdict) == pytest.approx(0.0)


@pytest.mark.parametrize(("peak", "met"), [(641e6, True), (642e6, False)])
def test_a_limit(peak: float, met: bool) -> None:
    verdict = goals.judge(goal("peak memory of all tests once"), results(SPEEDS, peak))
    assert verdict is not None and verdict["met"] is met


def test_memory_is_the_peak_of_the_first_round() -> None:
    run = results({"plansmith int8": [1.0, 1.0, 1.0]})
    for sample in run.samples:
        if "peak_rss_bytes" in sample:
            sample["peak_rss_bytes"] = 600e6 + 50e6 * sample["round"]
    verdict = goals.judge(goal("peak memory of all tests once"), run)
    assert verdict is not None and verdict["got"] == 600.0
    assert verdict["met"]
    assert "| 600 | 700 |" in report.footprint_table(run, {})


def test_memory_is_the_peak_of_the_warm_up_where_that_ran_every_test() -> None:
    run = results({"plansmith int8": [1.0, 1.0]}, peak_rss_bytes=700e6)
    run.facts["plansmith int8"]["warm_up_peak_rss_bytes"] = 500_000_000
    verdict = goals.judge(goal("peak memory of all tests once"), run)
    assert verdict is not None and verdict["got"] == 500.0
    assert "| 500 | 700 |" in report.footprint_table(run, {})
    once = history.entry(run, 2)["medians"]["plansmith int8"]["memory.peak_rss_mb"]
    assert (once["median"], once["count"]) == (500.0, 1)


def test_memory_of_a_part_of_the_tests_is_not_judged() -> None:
    run = results({"plansmith int8": [1.0]})
    part = dataclasses.replace(run, samples=[s for s in run.samples if s["test"] != "shared16"])
    assert goals.judge(goal("peak memory of all tests once"), part) is None


def test_memory_of_engines_that_are_started_in_each_round_is_that_of_the_first() -> None:
    run = results({"plansmith int8": [1.0, 1.0, 1.0]})
    for sample in run.samples:
        if "peak_rss_bytes" in sample:
            sample["peak_rss_bytes"] = 600e6 - 50e6 * sample["round"]
    assert run.memory_of_all_tests_once("plansmith int8") == 600.0
    verdict = goals.judge(goal("peak memory of all tests once"), run)
    assert verdict is not None and verdict["got"] == 600.0
    once = history.entry(run, 2)["medians"]["plansmith int8"]["memory.peak_rss_mb"]
    assert once["median"] == 600.0


def test_goals_that_a_run_cannot_judge_are_not_judged() -> None:
    names = {v["goal"] for v in goals.judge_all(goals.GOALS, results({"plansmith int8": [1.0]}))}
    assert "one request, 8 bits: tokens/s" not in names  # no peer
    assert "one request, 4 bits: share of the bandwidth" not in names  # not run
    assert "start to first token" in names


def test_the_report_holds_every_engine_and_goal() -> None:
    run = results(SPEEDS)
    verdicts = goals.judge_all(goals.GOALS, run)
    text = report.markdown(
        run,
        verdicts,
        {"vLLM float32": "it did not start; see x.log"},
        {"plansmith int8": 128},
        ["a goal of another test"],
    )
    for title, _, _ in report.TABLES.values():
        section = text.split(f"### {title}\n\n")[1].split("\n\n")[0]
        rows = [row.split("|")[1].strip() for row in section.splitlines()[2:]]
        assert rows == list(SPEEDS)
        columns = {row.count("|") for row in section.splitlines()}
        assert len(columns) == 1
    assert (
        "| llama.cpp q8_0 | 100 (100-100, n=3) | 0.010 (0.010-0.010, n=3) | 25% | 50% | 3.00 x | 2.00 x |"
        in text
    )
    assert (
        "| plansmith int4 | 300 | llama.cpp q4_0 | 150 | >= 3.00 x | 2.00 x (2.00-3.00) | not met: 33% off |"
        in text
    )
    assert "| vLLM float32 | it did not start; see x.log |" in text
    assert "other processes took 0.25 cores" in text
    assert "0.04 nats apart" in text
    assert "0.04 nats" not in report.footprint_table(run, {})
    assert "Not judged, for want of a variant or a test: a goal of another test." in text
    for verdict in verdicts:
        assert f"| {verdict['goal']} |" in text


HEAD = {
    "commit": ("abc123", True),
    "machine": {
        "date": "2026-01-02",
        "cores": 2,
        "processor": "A processor",
        "memory_gib": 8,
        "system": "Linux",
    },
    "threads": 2,
    "model": "smollm2",
    "rounds": 2,
    "tests": ["single"],
    "not_run": ["vLLM CPU float32"],
    "short_of": ["Fewer rounds than a comparison takes: 2 of at least 3."],
}


def test_the_first_lines_say_what_ran_and_what_did_not() -> None:
    first, fewer, not_run, failed = report.head(HEAD, {"X int8": "see x.log"}).split("\n\n")
    assert first.startswith(
        "plansmith at commit abc123 with changes, 2026-01-02, model smollm2; 2 threads on 2 "
    )
    assert "A processor" in first and "rounds: 2; tests: single." in first
    assert fewer == HEAD["short_of"][0]
    assert not_run == "Not run: vLLM CPU float32."
    assert "X int8" in failed
    whole = report.head(HEAD | {"commit": ("abc123", False), "not_run": [], "short_of": []}, {}).split("\n\n")
    assert len(whole) == 2 and "with changes" not in whole[0]
    assert whole[1] == "Not run: none of the variants there are."
