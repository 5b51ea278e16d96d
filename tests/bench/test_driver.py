"""The rounds, with engines that are real processes but count instead of computing."""

from __future__ import annotations

import dataclasses
import sys
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "bench"))
sys.path.insert(0, str(Path(__file__).resolve().parent))

from fake_peer import module, variants
from peer import driver
from peer.variants import all_variants, chosen
from runs import PEAKS, WORKLOAD


def settings(work: Path, tests: tuple[str, ...] = ("single", "conc16")) -> driver.Settings:
    return driver.Settings(work, work / "model", WORKLOAD, tests, threads=1, run_timeout_s=60.0)


def test_rounds_go_through_tests_and_engines_in_turn(tmp_path: Path) -> None:
    said: list[str] = []
    one, two = variants(module("one", "ok"), module("two", "ok"))
    with driver.Driver(settings(tmp_path), said.append) as run:
        run.prepare([one, two])
        run.fresh_starts(2, lambda: PEAKS)
        assert not run.sessions
        run.start_all()
        run.compare_outputs()
        for round_idx in range(2):
            run.round(round_idx, lambda: PEAKS)
    order = [(s["round"], s["test"], s["engine"]) for s in run.samples]
    assert order == [
        (0, "start", "One ok"),
        (0, "start", "Two ok"),
        (1, "start", "Two ok"),
        (1, "start", "One ok"),
        (0, "single", "One ok"),
        (0, "single", "Two ok"),
        (0, "conc16", "One ok"),
        (0, "conc16", "Two ok"),
        (1, "single", "Two ok"),
        (1, "single", "One ok"),
        (1, "conc16", "Two ok"),
        (1, "conc16", "One ok"),
    ]
    assert not run.failures
    first = WORKLOAD.tests["single"][0]["prompt_ids"][0]
    assert run.outputs["One ok"] == [first + i for i in range(128)]
    assert run.facts["One ok"]["version"] == "1.0"
    for sample in run.samples:
        assert sample["peaks"] == PEAKS
        assert all(value > 0 for value in sample["metrics"].values())
        assert sample["others_cpu_s"] >= 0
    assert all(session._process.returncode is not None for session in run.sessions.values())


@pytest.mark.parametrize(
    ("how", "reason"),
    [
        ("dies", "ended before it answered"),
        ("refuses", "too many tokens"),
        ("short", "0 tokens, wanted 1"),
    ],
)
def test_an_engine_that_fails_is_named_and_the_rest_runs(tmp_path: Path, how: str, reason: str) -> None:
    with driver.Driver(settings(tmp_path, ("prefill",)), lambda text: None) as run:
        run.prepare(variants(module("good", "ok"), module("bad", how)))
        run.start_all()
        run.round(0, lambda: PEAKS)
    assert list(run.failures) == [f"Bad {how}"]
    assert reason in run.failures[f"Bad {how}"]
    # Where the log is, but not where this machine has the folder.
    assert f"{tmp_path.name}/logs" in run.failures[f"Bad {how}"]
    assert str(tmp_path) not in run.failures[f"Bad {how}"]
    assert [s["engine"] for s in run.samples] == ["Good ok"]


def test_an_engine_that_repeats_one_token_is_left_out(tmp_path: Path) -> None:
    with driver.Driver(settings(tmp_path), lambda text: None) as run:
        run.prepare(variants(module("good", "ok"), module("bad", "repeats")))
        run.start_all()
        run.compare_outputs()
    assert list(run.outputs) == ["Good ok"]
    assert "128 times and no other" in run.failures["Bad repeats"]


def test_an_engine_that_cannot_be_installed_is_left_out(tmp_path: Path) -> None:
    with driver.Driver(settings(tmp_path), lambda text: None) as run:
        run.prepare(variants(module("bad", "ok", broken=True), module("good", "ok")))
    assert list(run.failures) == ["Bad ok"]
    assert "no such package" in run.failures["Bad ok"]
    assert run.facts == {"Good ok": {"weight_bytes": 1000}}
    assert str(tmp_path) not in run.failures["Bad ok"]


def test_a_failure_in_the_repository_is_told_without_where_that_is(tmp_path: Path) -> None:
    work = driver.BENCH.parent / "build" / "peers"
    with driver.Driver(settings(work), lambda text: None) as run:
        text = f"Command '['{work}/venv/bin/python', '{driver.BENCH.parent}/demo']' failed; logs are in {work}/logs"
        wanted = "Command '['build/peers/venv/bin/python', 'demo']' failed; logs are in build/peers/logs"
        assert run._without_folders(text) == wanted


@pytest.mark.parametrize("reload", [False, True])
def test_the_peak_of_every_test_once_is_noted_behind_a_whole_warm_up(tmp_path: Path, reload: bool) -> None:
    ran: list[int] = []
    settled = dataclasses.replace(settings(tmp_path), reload=reload)
    with (
        driver.Driver(settled, lambda text: None) as run,
        pytest.MonkeyPatch.context() as patch,
    ):
        real = driver.Session.run

        def counted(session: Any, requests: Any, timeout_s: float) -> dict[str, Any]:
            ran.append(len(requests))
            return real(session, requests, timeout_s)

        patch.setattr(driver.Session, "run", counted)
        run.prepare(variants(module("one", "ok")))
        run.start_all()
        assert ran == ([] if reload else [1, 16])
        run.round(0, lambda: PEAKS)
    # With reload: a start, four short requests, a prompt of 512, the greedy tokens, the tests.
    assert ran == ([1, 4, 1, 1, 1, 16] if reload else [1, 16, 1, 16])
    assert ("warm_up_peak_rss_bytes" in run.facts["One ok"]) is not reload


def test_an_engine_that_would_not_fit_into_memory_is_not_started(tmp_path: Path) -> None:
    with driver.Driver(settings(tmp_path), lambda text: None, lambda: 1_500_000_000) as run:
        run.prepare(variants(module("one", "ok")))
        run.start_all()
    assert "1.5 GB of memory are left" in run.failures["One ok"]
    assert not run.sessions


def test_with_reload_one_engine_alone_is_there(tmp_path: Path) -> None:
    there: list[list[str]] = []
    settled = dataclasses.replace(settings(tmp_path), reload=True)
    with driver.Driver(settled, lambda text: None) as run:

        def peaks() -> dict[str, Any]:
            there.append([v.label for v in run.sessions])
            return PEAKS

        run.prepare(variants(module("one", "ok"), module("two", "ok", "short")))
        run.fresh_starts(2, peaks)
        run.start_all()
        assert not run.sessions and not there
        for round_idx in range(2):
            run.round(round_idx, peaks)
    order = [(s["round"], s["test"], s["engine"]) for s in run.samples]
    tests = ("start", "single", "conc16")
    assert order == [
        *((0, test, "One ok") for test in tests),
        *((0, test, "Two ok") for test in tests),
        *((1, test, "Two ok") for test in tests),
        *((1, test, "One ok") for test in tests),
    ]
    assert max(len(labels) for labels in there) == 1
    # One for the start, one for each test.
    assert there[:3] == [[], ["One ok"], ["One ok"]]
    assert list(run.failures) == ["Two short"]
    assert sorted(run.outputs) == ["One ok", "Two ok"]


def test_a_start_asks_for_ids_that_no_round_asks_for() -> None:
    started = WORKLOAD.requests("single", driver._START_ROUND)[0]["prompt_ids"]
    ran = [WORKLOAD.requests("single", idx)[0]["prompt_ids"] for idx in range(100)]
    assert started not in ran


def test_this_machine_says_how_much_memory_is_left() -> None:
    assert 0 < driver.available_memory() < 1 << 50


def test_variants_are_chosen_by_module_or_name() -> None:
    everything = variants(module("one", "fp32", "int8"), module("two", "q8_0"))
    assert chosen(everything, None) == everything
    assert [v.slug for v in chosen(everything, "two,one:int8")] == ["one:int8", "two:q8_0"]
    assert [v.slug for v in chosen(everything, " two , one:int8,")] == ["one:int8", "two:q8_0"]
    with pytest.raises(ValueError, match=r"no variant 'one:q8_0'; there are one:fp32, one:int8, two:q8_0"):
        chosen(everything, "one:q8_0")


@pytest.mark.parametrize("wanted", ["", ",", " "])
def test_a_list_without_names_chooses_nothing(wanted: str) -> None:
    with pytest.raises(ValueError, match="names no variant; there are one:fp32"):
        chosen(variants(module("one", "fp32")), wanted)


def test_every_module_has_what_the_driver_calls() -> None:
    found = all_variants()
    assert len({v.slug for v in found}) == len(found)
    assert len({v.label for v in found}) == len(found)
    for v in found:
        for name in ("install", "convert", "weight_bytes", "command"):
            assert callable(getattr(v.module, name)), (v.slug, name)
        command = v.module.command(Path("/models"), Path("/checkpoint"), v.name, 2)
        assert command and all(isinstance(part, str) for part in command)
    assert [v.slug for v in found if v.is_ours][:3] == ["plansmith:int8", "plansmith:int4", "plansmith:fp32"]
