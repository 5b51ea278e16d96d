"""Runs over time: a line each, the last of the same machine, ratios with the peaks accounted for."""

from __future__ import annotations

import copy
import sys
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "bench"))
sys.path.insert(0, str(Path(__file__).resolve().parent))

import history
from runs import results


def run_of(speed: float, machine: str = "A", cores: int = 2, **peaks: float) -> dict[str, Any]:
    entry = history.entry(results({"plansmith int8": [speed, speed * 1.1, speed * 0.9]}), threads=2)
    entry["machine"] = {"processor": machine, "cores": cores}
    entry["peaks"] |= peaks
    return entry


def test_a_line_says_what_was_run_and_where() -> None:
    entry = history.entry(results({"plansmith int8": [200.0, 220.0, 180.0]}), threads=2)
    assert entry["rounds"] == 3
    assert entry["threads"] == 2
    assert entry["peaks"]["int8_gop_s"] == 1000.0
    assert entry["others_cores"] == 0.25
    assert entry["machine"]["cores"] >= 1
    decode = entry["medians"]["plansmith int8"]["single.decode_tokens_per_s"]
    assert decode == {"median": 200.0, "low": 180.0, "high": 220.0, "count": 3}
    assert entry["medians"]["plansmith int8"]["memory.peak_rss_mb"]["median"] == 300.0


def test_lines_come_back_as_they_were_written(tmp_path: Path) -> None:
    path = tmp_path / "folder" / "smoke.jsonl"
    assert history.read(path) == []
    for speed in (100.0, 200.0):
        history.append(path, run_of(speed))
    runs = history.read(path)
    assert runs == [run_of(100.0) | {"date": runs[0]["date"]}, run_of(200.0) | {"date": runs[1]["date"]}]
    assert len(path.read_text().splitlines()) == 2


def test_only_runs_of_such_a_machine_compare() -> None:
    now = run_of(1.0)
    other_threads = run_of(5.0) | {"threads": 1}
    runs = [run_of(2.0), run_of(3.0), run_of(4.0, machine="B"), run_of(4.0, cores=4), other_threads]
    last = history.last_like(runs, now)
    assert last is not None
    assert last["medians"]["plansmith int8"]["single.decode_tokens_per_s"]["median"] == 3.0
    assert history.last_like([run_of(4.0, machine="B")], now) is None


def change(now: dict[str, Any], then: dict[str, Any], number: str) -> history.Change:
    (found,) = [c for c in history.changes(now, then) if c.number == number]
    return found


def test_ratios_above_one_are_better_whatever_the_number() -> None:
    now, then = run_of(300.0), run_of(200.0)
    for number in (
        "single.decode_tokens_per_s",
        "single.ttft_s",
        "conc16.ttft_mean_s",
        "start.start_to_first_token_s",
    ):
        assert change(now, then, number).ratio == pytest.approx(1.5, rel=0.02), number
        assert change(now, then, number).noise == pytest.approx(0.1, rel=0.02), number
    assert change(now, then, "memory.peak_rss_mb").ratio == 1.0


def test_a_faster_memory_is_not_our_merit() -> None:
    now = run_of(300.0, read_sustained_gb_s=30.0, int8_gop_s=500.0)
    then = run_of(200.0, read_sustained_gb_s=20.0, int8_gop_s=1000.0)
    assert change(now, then, "single.decode_tokens_per_s").normalised == pytest.approx(1.0)
    assert change(now, then, "prefill.prefill_tokens_per_s").normalised == pytest.approx(3.0)
    assert change(now, then, "memory.peak_rss_mb").normalised == 1.0


def test_the_table_marks_what_is_beyond_the_noise() -> None:
    table = history.change_table(history.changes(run_of(300.0), run_of(200.0)))
    (row,) = [line for line in table.splitlines() if "single.decode" in line]
    assert row == "| plansmith int8 | single.decode_tokens_per_s | 300 | 1.50 x | 1.50 x | +-10% | better |"
    (row,) = [line for line in table.splitlines() if "memory" in line]
    assert row.endswith("+-0% |  |")


def test_what_one_run_lacks_is_not_compared() -> None:
    then = run_of(200.0)
    now = copy.deepcopy(then)
    now["medians"]["plansmith int4"] = now["medians"]["plansmith int8"]
    del then["medians"]["plansmith int8"]["single.ttft_s"]
    found = history.changes(now, then)
    assert {c.engine for c in found} == {"plansmith int8"}
    assert "single.ttft_s" not in {c.number for c in found}


def test_the_commit_of_a_folder_without_git(tmp_path: Path) -> None:
    assert history.commit(tmp_path) == ("", True)
