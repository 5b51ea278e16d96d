"""fleet plan and fleet status over a real store: what is kept, what is built and why, what is stale."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from fleet_records import put
from plansmith.builder.build_key import inputs_key
from plansmith.fleet import buildable
from plansmith.fleet.changes import Change
from plansmith.fleet.compare import compare
from plansmith.fleet.fleet_file import Fleet
from plansmith.fleet.plan import Step, plan_fleet, summary
from plansmith.fleet.status import status_of
from plansmith.fleet.store.local import LocalStore
from plansmith.fleet.store.names import ref_name
from plansmith.fleet.store.record import Record, Ref
from plansmith.fleet.store.signing import load_private, load_public, make_key
from plansmith.fleet.stores import FirstOf
from plansmith.fleet.units import Unit, units_of
from plansmith.runtime.errors import Error, UnsupportedError

MakeFleet = Callable[..., Fleet]


def steps_of(fleet: Fleet, store: LocalStore) -> dict[str, Step]:
    return {step.unit.name: step for step in plan_fleet(fleet, units_of(fleet), store)}


def units(fleet: Fleet) -> dict[str, Unit]:
    return {unit.name: unit for unit in units_of(fleet)}


def put_gate(store: LocalStore, unit: Unit, verdict: object) -> None:
    key = inputs_key(unit.gate_inputs)
    content: dict[str, Any] = {"gate": verdict}
    store.put_record(Record(key, "gate", dict(unit.gate_inputs), (), content, {}))


def test_a_new_fleet(make_fleet: MakeFleet, store: LocalStore, tmp_path: Path) -> None:
    fleet = make_fleet()
    steps = steps_of(fleet, store)
    assert all((step.action, step.where, step.why) == ("build", "here", ("new",)) for step in steps.values())
    assert summary(list(steps.values())) == {"kept": 0, "here": 4, "runner": 0, "nowhere": 0, "gates": 0}
    status = status_of(fleet, units_of(fleet), store)
    assert not status.is_true
    assert {member.status for member in status.members} == {"missing"}
    assert not (tmp_path / "store").exists()  # looking makes no store


def test_a_fleet_that_is_built(make_fleet: MakeFleet, store: LocalStore) -> None:
    fleet = make_fleet()
    for unit in units_of(fleet):
        put(store, unit)
    steps = steps_of(fleet, store)
    assert {(step.action, step.why) for step in steps.values()} == {("keep", ("in the store",))}
    status = status_of(fleet, units_of(fleet), store)
    assert status.is_true and not status.orphans
    assert {member.time for member in status.members} == {"2026-01-31T12:00:00Z"}
    assert json.loads(json.dumps(status.to_json()))["is_true"] is True


@pytest.mark.parametrize(
    ("old", "new", "stale", "why"),
    [
        ("max_batch_size: 4", "max_batch_size: 8", 4, "limits.max_batch_size: 4 -> 8"),
        ("int8: {draft: int4}", "int8:", 2, "draft: int4 -> none"),
        ("  fp16:", "  fp16: {weight_streaming: true}", 1, "weight_streaming: false -> true"),
        ("  fp16:", "  fp16: {precision: bf16}", 2, "precision.name: fp16 -> bf16"),
    ],
)
def test_what_made_it_stale(
    make_fleet: MakeFleet, store: LocalStore, old: str, new: str, stale: int, why: str
) -> None:
    for unit in units_of(make_fleet()):
        put(store, unit)
    fleet = make_fleet(**{old: new})
    steps = [step for step in steps_of(fleet, store).values() if step.action == "build"]
    assert len(steps) == stale
    assert all(why in step.why for step in steps)
    status = status_of(fleet, units_of(fleet), store)
    found = [member for member in status.members if member.status == "stale"]
    assert found and all(why in member.why for member in found)
    assert {member.status for member in status.members} <= {"stale", "current"}
    changes = [str(Change(**one)) for step in steps for one in step.to_json()["changes"]]
    assert set(changes) == {one for step in steps for one in step.why}


def test_other_weights(
    make_fleet: MakeFleet, store: LocalStore, tiny_checkpoint: Callable[[str], Path]
) -> None:
    for unit in units_of(make_fleet()):
        put(store, unit)
    other = make_fleet(CHECKPOINT=str(tiny_checkpoint("llama_linear")))
    for step in steps_of(other, store).values():
        assert "checkpoint: weights or config changed" in step.why


def test_other_sources_and_compilers(make_fleet: MakeFleet, store: LocalStore) -> None:
    fleet = make_fleet()
    for unit in units_of(fleet):
        old = {**unit.inputs, "sources": "0" * 64, "compiler_version": "0.1"}
        put(store, unit, inputs=old, key=inputs_key(old))
    for step in steps_of(fleet, store).values():
        assert step.why == (
            f"compiler_version: 0.1 -> {step.unit.inputs['compiler_version']}",
            "sources: plansmith's builder changed",
        )


def test_a_new_sku_of_a_known_target(make_fleet: MakeFleet, store: LocalStore) -> None:
    fleet = make_fleet()
    for unit in units_of(fleet):
        put(store, unit, members=[name for name in unit.members if not name.endswith("l40s")])
    step = steps_of(fleet, store)["tiny/fp16/sm89"]
    assert (step.action, step.why) == ("keep", ("in the store; tiny/fp16/l40s gets it",))
    status = {one.name: one for one in status_of(fleet, units_of(fleet), store).members}
    assert status["tiny/fp16/l40s"].why == ("new here, its plan is in the store",)
    assert (status["tiny/fp16/l40s"].status, status["tiny/fp16/l4"].status) == ("missing", "current")


def test_going_back_compiles_nothing(make_fleet: MakeFleet, store: LocalStore) -> None:
    """What an earlier version of the file was built to is still there."""
    first, second = make_fleet(), make_fleet(**{"max_batch_size: 4": "max_batch_size: 8"})
    for fleet in (first, second):
        for unit in units_of(fleet):
            put(store, unit)
    for step in steps_of(first, store).values():
        assert step.action == "keep" and "gets it" in step.why[0]
    assert {one.status for one in status_of(first, units_of(first), store).members} == {"stale"}


def test_orphans(make_fleet: MakeFleet, store: LocalStore) -> None:
    for unit in units_of(make_fleet()):
        put(store, unit)
    put(store, units_of(make_fleet())[0], members=["x/y/z"], fleet="another")
    fleet = make_fleet(**{"  l40s:\n": ""})
    status = status_of(fleet, units_of(fleet), store)
    assert status.is_true
    assert status.orphans == ("tiny/fp16/l40s", "tiny/int8/l40s")
    # Members that were not asked for are no orphans.
    some = units_of(fleet, only=["*/cpu"])
    assert status_of(fleet, some, store).orphans == status.orphans
    assert [member.name for member in status_of(fleet, some, store).members] == [
        "tiny/int8/cpu",
        "tiny/fp16/cpu",
    ]


def test_a_record_that_is_gone_or_damaged(make_fleet: MakeFleet, store: LocalStore, tmp_path: Path) -> None:
    fleet = make_fleet()
    keys = {unit.name: put(store, unit) for unit in units_of(fleet)}
    records = tmp_path / "store" / "records"
    (records / f"{keys['tiny/int8/cpu']}.json").unlink()
    (records / f"{keys['tiny/fp16/cpu']}.json").write_text("{")
    steps = steps_of(fleet, store)
    assert steps["tiny/int8/cpu"].why == ("its record is missing from the store",)
    assert "records/" in steps["tiny/fp16/cpu"].why[0]
    assert {steps[name].action for name in ("tiny/int8/cpu", "tiny/fp16/cpu")} == {"build"}
    status = {one.name: one.status for one in status_of(fleet, units_of(fleet), store).members}
    assert (status["tiny/int8/cpu"], status["tiny/fp16/cpu"], status["tiny/fp16/l4"]) == (
        "lost",
        "lost",
        "current",
    )


def test_a_ref_that_cannot_be_read(make_fleet: MakeFleet, store: LocalStore, tmp_path: Path) -> None:
    """Its member is lost, and named; the others are what they are, and the next build writes it anew."""
    fleet = make_fleet()
    units = units_of(fleet)
    for unit in units:
        put(store, unit)
    (tmp_path / "store" / ref_name(fleet.name, "tiny/fp16/l4")).write_text("{")
    for stores in (store, FirstOf([store, store])):
        members = {one.name: one for one in status_of(fleet, units, stores).members}
        assert {name for name, one in members.items() if one.status != "current"} == {"tiny/fp16/l4"}
        assert members["tiny/fp16/l4"].status == "lost" and "refs/" in members["tiny/fp16/l4"].why[0]


def test_what_nobody_trusted_signed(make_fleet: MakeFleet, tmp_path: Path) -> None:
    ours, theirs = (load_public(make_key(tmp_path / name)) for name in ("ours.pem", "theirs.pem"))
    fleet = make_fleet()
    signed = LocalStore(tmp_path / "store", key=load_private(tmp_path / "ours.pem"))
    for unit in units_of(fleet):
        put(signed, unit)
    trusting = LocalStore(tmp_path / "store", trust=[ours])
    assert status_of(fleet, units_of(fleet), trusting).is_true
    wary = LocalStore(tmp_path / "store", trust=[theirs])
    assert {step.action for step in steps_of(fleet, wary).values()} == {"build"}
    assert {one.status for one in status_of(fleet, units_of(fleet), wary).members} == {"lost"}


@pytest.fixture
def no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    def absent(target: object) -> str:
        raise UnsupportedError("there is no such GPU here")

    monkeypatch.setattr(buildable.tensorrt, "check_available", absent)


H100 = {"skus:": "skus:\n  h100:"}


@pytest.mark.usefixtures("no_gpu")
def test_what_another_machine_has_to_build(make_fleet: MakeFleet, store: LocalStore) -> None:
    step = steps_of(make_fleet(**H100), store)["tiny/fp16/sm90"]
    assert (step.action, step.where, step.runner) == ("none", "nowhere", ())
    assert step.needs == "a GPU sm90, with TensorRT 11"
    general = {"models:": "runners: {default: ubuntu-latest}\nmodels:"}
    assert steps_of(make_fleet(**H100, **general), store)["tiny/fp16/sm90"].where == "nowhere"
    named = {"models:": "runners: {default: ubuntu-latest, sm90: [self-hosted, h100]}\nmodels:"}
    fleet = make_fleet(**H100, **named)
    step = steps_of(fleet, store)["tiny/fp16/sm90"]
    assert (step.action, step.where, step.runner) == ("build", "runner", ("self-hosted", "h100"))
    assert summary(plan_fleet(fleet, units_of(fleet), store)) == {
        "kept": 0,
        "here": 4,
        "runner": 2,
        "nowhere": 0,
        "gates": 0,
    }


@pytest.mark.usefixtures("no_gpu")
def test_what_another_machine_has_built(make_fleet: MakeFleet, store: LocalStore) -> None:
    """Its compiler is not known here, so everything else is compared."""
    fleet = make_fleet(**H100)
    for unit in units_of(fleet):
        there = {**unit.inputs, **dict.fromkeys(unit.unknown, "of another machine")}
        put(store, unit, inputs=there, key=inputs_key(there))
    assert {step.action for step in steps_of(fleet, store).values()} == {"keep"}
    assert status_of(fleet, units_of(fleet), store).is_true
    other = make_fleet(**H100, **{"max_batch_size: 4": "max_batch_size: 8"})
    step = steps_of(other, store)["tiny/fp16/sm90"]
    assert step.why == ("limits.max_batch_size: 4 -> 8",)


def test_what_runs_nowhere(make_fleet: MakeFleet, store: LocalStore) -> None:
    step = steps_of(make_fleet(**{"  fp16:": "  fp16: {precision: int8, group_size: 64}"}), store)[
        "tiny/fp16/sm89"
    ]
    assert (step.action, step.where) == ("none", "nowhere")
    assert "one scale an output" in step.to_json()["refused"]


GATED = {"int8: {draft: int4}": "int8: {gate: kl<=0.05}"}


def test_a_gate(make_fleet: MakeFleet, store: LocalStore) -> None:
    # Two engines ask the same, whose limits differ in what no result depends on.
    fleet = make_fleet(**GATED, **{"  l40s:": "  l40s: {limits: {max_batch_size: 8}}"})
    for unit in units_of(fleet):
        put(store, unit)
    # Everything is there, but nobody has measured.
    steps = steps_of(fleet, store)
    assert {name for name, step in steps.items() if step.action == "gate"} == {"tiny/int8/cpu"}
    assert steps["tiny/int8/cpu"].why == ("in the store", "the gate is not measured")
    assert summary(list(steps.values()))["gates"] == 1
    status = status_of(fleet, units_of(fleet), store)
    verdicts = [(gate.engine, gate.passed) for gate in status.gates]
    assert verdicts == [("tiny-int8", None), ("tiny-int8-l40s", None)]
    assert not status.is_true
    # Measured.
    bounds = [{"metric": "kl", "compare": "<=", "wanted": 0.05, "got": 0.01, "passed": True}]
    put_gate(store, units(fleet)["tiny/int8/cpu"], {"passed": True, "bounds": bounds})
    status = status_of(fleet, units_of(fleet), store)
    assert status.is_true and status.gates[0].bounds == tuple(bounds)
    assert {step.action for step in steps_of(fleet, store).values()} == {"keep"}
    # Other bounds are another question.
    other = make_fleet(**{"int8: {draft: int4}": "int8: {gate: kl<=0.01}"})
    assert status_of(other, units_of(other), store).gates[0].passed is None


@pytest.mark.parametrize("verdict", [{"passed": False, "bounds": []}, {"passed": "yes"}, None, [1]])
def test_a_gate_that_has_not_passed(make_fleet: MakeFleet, store: LocalStore, verdict: object) -> None:
    fleet = make_fleet(**GATED)
    for unit in units_of(fleet):
        put(store, unit)
    put_gate(store, units(fleet)["tiny/int8/cpu"], verdict)
    status = status_of(fleet, units_of(fleet), store)
    assert not status.is_true
    assert status.gates[0].passed is (
        False if isinstance(verdict, dict) and verdict["passed"] is False else None
    )


def test_a_key_is_read_once(
    make_fleet: MakeFleet, store: LocalStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    fleet = make_fleet()
    for unit in units_of(fleet):
        put(store, unit)
    reads: list[str] = []

    class Counting:
        """The store, counting."""

        def record(self, key: str) -> Record | None:
            reads.append(key)
            return store.record(key)

        def refs(self, fleet: str, damaged: dict[str, Error] | None = None) -> dict[str, Ref]:
            return store.refs(fleet, damaged)

    states = compare(units_of(fleet), Counting(), fleet.name)
    assert {member.status for state in states for member in state.members} == {"current"}
    assert len(reads) == len(set(reads)) == 4
