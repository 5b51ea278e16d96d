"""Accuracy gates: measured once, and what is not passed is no engine, here or where it is pulled."""

from __future__ import annotations

import errno
import math
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from plansmith.builder.spec import weight_shapes
from plansmith.calibration import gate
from plansmith.fleet.budget import Budget
from plansmith.fleet.gate_check import gates_name, is_verdict_on
from plansmith.fleet.plan import plan_fleet
from plansmith.fleet.report import FleetReport
from plansmith.fleet.share import NOT_JUDGED, collect_fleet, pull_fleet, push_fleet
from plansmith.fleet.store import RemoteStore, open_store
from plansmith.fleet.store.record import Record
from plansmith.runtime.errors import InvalidArgumentError
from tiny_fleets import QuickRtx, TinyFleet, engines, names, statuses

MakeFleet = Callable[..., TinyFleet]
GOOD = "{fp16: {gate: 'kl<=5'}}"
BAD = "{int4: {gate: 'kl<=0.0000001'}}"


@pytest.fixture
def measured(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Return the bounds of every gate that is measured from now on."""
    real, seen = gate.try_gate, list[str]()

    def try_gate(bounds: str, *arguments: Any, **options: Any) -> Any:
        seen.append(bounds)
        return real(bounds, *arguments, **options)

    monkeypatch.setattr(gate, "try_gate", try_gate)
    return seen


def gate_records(fleet: TinyFleet) -> list[Record]:
    store = fleet.store
    found = (store.record(key) for key in store.records())
    return [one for one in found if one is not None and one.kind == "gate"]


def test_a_gate_that_is_passed_is_not_measured_again(tiny_fleet: MakeFleet, measured: list[str]) -> None:
    fleet = tiny_fleet(recipes=GOOD)
    report = fleet.build()
    assert report.failures == {} and engines(report) == {"tiny-fp16": "assembled"}
    assert measured == ["kl<=5"]
    (record,) = gate_records(fleet)
    assert record.content["gate"]["passed"] is True
    assert 0 <= record.content["gate"]["bounds"][0]["got"] <= 5
    assert [ref.key for ref in fleet.store.refs(gates_name(fleet.fleet)).values()] == [record.key]
    assert engines(fleet.build()) == {"tiny-fp16": "kept"}
    fleet.edit("kl<=5", " kl <= 5 ")  # says the same
    # There is no memory to measure in, and nothing to measure.
    assert fleet.build(budget=Budget(1, 1)).failures == {}
    assert measured == ["kl<=5"]
    fleet.edit(" kl <= 5 ", "kl<=4")
    assert fleet.build().failures == {}
    assert measured == ["kl<=5", "kl<=4"]


def test_a_gates_memory_is_told_and_kept_to(
    tiny_fleet: MakeFleet, measured: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is that of two open plans, one of them the original in float32; beyond the budget nothing is measured."""
    fleet = tiny_fleet()
    assert fleet.build().failures == {}
    fleet.edit("[fp16]", GOOD)
    (unit,) = fleet.units()
    (step,) = plan_fleet(fleet.fleet, [unit], fleet.store)
    assert step.action == "gate" and step.peak_bytes == unit.gate_bytes
    num_weights = sum(math.prod(shape) for shape in weight_shapes(unit.checkpoint.spec).values())
    assert step.peak_bytes > (4 + 2) * num_weights
    monkeypatch.setattr("plansmith.fleet.build.tree_bytes", lambda _: 100 << 20)
    base = 100 << 20
    report = fleet.build(budget=Budget(base + unit.gate_bytes - 1, 1))
    assert "beside the" in report.failures["tiny-fp16"] and measured == []
    assert fleet.build(budget=Budget(base + unit.gate_bytes, 1)).failures == {}
    assert measured == ["kl<=5"]


def test_what_a_disk_says_while_a_gate_is_measured_fails_that_engine(
    tiny_fleet: MakeFleet, monkeypatch: pytest.MonkeyPatch
) -> None:
    def try_gate(*_: Any, **__: Any) -> Any:
        raise OSError(errno.EIO, os.strerror(errno.EIO), "/a/disk")

    fleet = tiny_fleet(recipes="{fp16: {gate: 'kl<=5'}, fp32: }")
    with monkeypatch.context() as patch:
        patch.setattr(gate, "try_gate", try_gate)
        report = fleet.build()
    assert engines(report) == {"tiny-fp16": "failed", "tiny-fp32": "assembled"}
    assert f"tiny-fp16: {os.strerror(errno.EIO)} (/a/disk); run it again" in report.failures["tiny-fp16"]
    assert fleet.build().failures == {}


def test_a_gate_that_is_not_passed_is_no_engine(tiny_fleet: MakeFleet, measured: list[str]) -> None:
    """The plans are there for all that, and the verdict as well: the engine that was there stays."""
    fleet = tiny_fleet(recipes=BAD)
    for status in ("built", "kept"):
        report = fleet.build()
        assert statuses(report) == {"tiny/int4/cpu": status}
        assert engines(report) == {"tiny-int4": "failed"}
        assert "kl is" in report.failures["tiny-int4"] and "wanted <= 1e-07" in report.failures["tiny-int4"]
        assert not (fleet.folder / "engines").exists()
    assert measured == ["kl<=0.0000001"]
    fleet.edit("kl<=0.0000001", "kl<=100")
    assert engines(fleet.build()) == {"tiny-int4": "assembled"}
    fleet.edit("kl<=100", "kl<=0.0000001")
    manifest = (fleet.folder / "engines/tiny-int4/manifest.json").read_bytes()
    assert engines(fleet.build()) == {"tiny-int4": "failed"}
    assert measured == ["kl<=0.0000001", "kl<=100"]
    assert (fleet.folder / "engines/tiny-int4/manifest.json").read_bytes() == manifest


def test_a_gate_of_an_engine_without_a_cpu_plan(
    tiny_fleet: MakeFleet, quick_rtx: QuickRtx, measured: list[str]
) -> None:
    """The plan that it is measured with is made for the time being, with what the fleet has for it else."""
    fleet = tiny_fleet(recipes=GOOD, skus="[sm89]")
    report = fleet.build()
    assert report.failures == {} and statuses(report) == {"tiny/fp16/sm89": "built"}
    assert len(names(fleet.store)) == 1 and len(gate_records(fleet)) == 1
    fleet.edit("[sm89]", "[sm89, cpu]")
    assert statuses(fleet.build()) == {"tiny/fp16/sm89": "kept", "tiny/fp16/cpu": "built"}
    assert measured == ["kl<=5"]


def test_a_gate_that_cannot_be_read_fails_its_engine_alone(tiny_fleet: MakeFleet) -> None:
    fleet = tiny_fleet(recipes="{fp16: {gate: 'speed>=5'}, fp32: }")
    try:
        report: FleetReport | None = fleet.build()
    except InvalidArgumentError as error:  # told with the line of the file
        assert "speed" in str(error)
        return
    assert report is not None
    assert engines(report) == {"tiny-fp16": "failed", "tiny-fp32": "assembled"}


def test_only_one_process_measures(tiny_fleet: MakeFleet, measured: list[str]) -> None:
    """Whoever finds the lock taken waits for the verdict, and takes it."""
    import threading

    from plansmith.builder.build_key import inputs_key

    fleet = tiny_fleet(recipes=GOOD)
    fleet.build(assemble=False)
    other = tiny_fleet(recipes=GOOD, name="other")
    (unit,) = other.units()
    key = inputs_key(unit.gate_inputs)
    (verdict,) = gate_records(fleet)
    assert verdict.key == key
    held = other.store.lock_unit(key)
    assert held is not None

    def another_builder() -> None:
        with held:
            other.store.put_record(verdict)

    timer = threading.Timer(2.0, another_builder)
    timer.start()
    assert engines(other.build()) == {"tiny-fp16": "assembled"}
    timer.join()
    assert measured == ["kl<=5"]


@pytest.fixture
def remote(tmp_path: Path) -> RemoteStore:
    return RemoteStore(f"file://{tmp_path}/remote")


def pull_to(fleet: TinyFleet, folder: Path, remote: RemoteStore) -> dict[str, tuple[str, str]]:
    """Pull a fleet into a new folder, and return what became of its engines."""
    import dataclasses

    moved = dataclasses.replace(fleet.fleet, output=folder / "engines")
    pulled = pull_fleet(moved, (), open_store(folder / "store"), remote)
    return {one.name: (one.status, one.why) for one in pulled.engines}


@pytest.mark.parametrize("way", ["build --push", "push"])
def test_a_verdict_goes_where_the_plans_go(
    tiny_fleet: MakeFleet, tmp_path: Path, remote: RemoteStore, way: str
) -> None:
    """Nobody gets an engine that failed its gate, however its plans were pushed."""
    fleet = tiny_fleet(recipes="{int4: {gate: 'kl<=0.0000001'}, fp16: {gate: 'kl<=5'}}")
    if way == "push":
        fleet.build()
        push_fleet(fleet.fleet, fleet.units(), fleet.store, remote)
    else:
        fleet.build(remote=remote, push=True)
    pulled = pull_to(fleet, tmp_path / "elsewhere", remote)
    assert pulled["tiny-fp16"] == ("assembled", "")
    assert pulled["tiny-int4"][0] == "failed" and "kl is" in pulled["tiny-int4"][1]
    assert not (tmp_path / "elsewhere/engines/tiny-int4").exists()


def test_plans_without_a_verdict_are_no_engine_yet(
    tiny_fleet: MakeFleet, tmp_path: Path, remote: RemoteStore
) -> None:
    """Units are pushed one by one, the verdict behind them; and an old verdict says nothing of new plans."""
    fleet = tiny_fleet(recipes=GOOD)
    fleet.build(remote=remote, push=True)
    remote.remove_ref(gates_name(fleet.fleet), "tiny-fp16")
    assert pull_to(fleet, tmp_path / "one", remote) == {"tiny-fp16": ("waiting", NOT_JUDGED)}
    fleet.build(remote=remote, push=True)
    assert pull_to(fleet, tmp_path / "two", remote) == {"tiny-fp16": ("assembled", "")}
    fleet.edit("kl<=5", "kl<=4")
    assert pull_to(fleet, tmp_path / "three", remote) == {"tiny-fp16": ("waiting", NOT_JUDGED)}
    fleet.edit("kl<=4", "kl<=5")
    old = remote.refs(gates_name(fleet.fleet))["tiny-fp16"]
    fleet.edit("max_seq_len: 128", "max_seq_len: 96")
    fleet.build(remote=remote, push=True)
    assert pull_to(fleet, tmp_path / "four", remote) == {"tiny-fp16": ("assembled", "")}
    remote.set_ref(gates_name(fleet.fleet), "tiny-fp16", old)
    assert pull_to(fleet, tmp_path / "five", remote) == {"tiny-fp16": ("waiting", NOT_JUDGED)}


def test_a_gate_of_plans_that_others_built(
    tiny_fleet: MakeFleet, tmp_path: Path, remote: RemoteStore, measured: list[str]
) -> None:
    """A machine with an empty store measures it where it can tell the others, without their plans; once."""
    fleet = tiny_fleet(recipes=GOOD)
    fleet.build(remote=remote, push=True)
    fleet.edit("kl<=5", "kl<=4")
    shutil.rmtree(fleet.folder / ".plansmith")
    report = fleet.build(remote=remote)  # which could tell nobody
    assert statuses(report) == {"tiny/fp16/cpu": "remote"} and measured == ["kl<=5"]
    report = fleet.build(remote=remote, push=True)
    assert statuses(report) == {"tiny/fp16/cpu": "remote"} and report.failures == {}
    assert measured == ["kl<=5", "kl<=4"]
    assert pull_to(fleet, tmp_path / "one", remote) == {"tiny-fp16": ("assembled", "")}
    shutil.rmtree(fleet.folder / ".plansmith")
    assert fleet.build(remote=remote, push=True).failures == {}
    assert measured == ["kl<=5", "kl<=4"]


def test_what_a_verdict_is_on() -> None:
    told = {"checkpoint": "c", "spec": "s", "precision.name": "int8", "limits.max_seq_len": "64"}
    verdict = Record(
        "0" * 64,
        "gate",
        {
            "bounds": "kl<=1",
            "original": "c",
            "plan.target.name": "cpu",
            **{f"plan.{k}": v for k, v in told.items()},
        },
        (),
        {},
        {},
    )
    plan = Record("1" * 64, "unit", {**told, "target.name": "sm89", "limits.max_batch_size": "4"}, (), {}, {})
    assert is_verdict_on(verdict, " kl <= 1", [plan])
    assert not is_verdict_on(verdict, "kl<=2", [plan])
    for name in told:
        other = Record("1" * 64, "unit", {**plan.inputs, name: "other"}, (), {}, {})
        assert not is_verdict_on(verdict, "kl<=1", [plan, other])


def test_verdicts_stay_with_their_engines(tiny_fleet: MakeFleet, measured: list[str]) -> None:
    """A collection keeps those that the file still has, passed or not, and no others."""
    fleet = tiny_fleet(recipes="{int4: {gate: 'kl<=0.0000001'}, fp16: {gate: 'kl<=5'}}")
    fleet.build()
    assert len(gate_records(fleet)) == 2
    assert collect_fleet(fleet.fleet, fleet.store, keep_days=0)[0] == []
    assert len(gate_records(fleet)) == 2
    shutil.rmtree(fleet.folder / "engines")
    assert engines(fleet.build()) == {"tiny-int4": "failed", "tiny-fp16": "assembled"}
    assert len(measured) == 2
    fleet.edit("int4: {gate: 'kl<=0.0000001'}, ", "")
    assert collect_fleet(fleet.fleet, fleet.store, keep_days=0)[0] == ["tiny/int4/cpu", "tiny-int4"]
    (left,) = gate_records(fleet)
    assert left.content["gate"]["passed"] is True


def test_a_gate_holds_also_where_its_plan_was_not_asked_for(
    tiny_fleet: MakeFleet, measured: list[str]
) -> None:
    """The unit asked for is another machine's; the engine would be put together of plans that are here."""
    fleet = tiny_fleet(recipes=BAD, skus="[cpu, sm90]")
    assert engines(fleet.build()) == {"tiny-int4": "failed"}
    assert engines(fleet.build("*/sm90")) == {"tiny-int4": "failed"}
    assert not (fleet.folder / "engines" / "tiny-int4").exists()
    assert len(measured) == 1
