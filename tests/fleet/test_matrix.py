"""Units as jobs: GitHub's matrix, GitLab's child pipeline, and fleets of more units than jobs."""

from __future__ import annotations

import json
import shlex
from collections.abc import Callable

import pytest
import yaml
from fleet_records import put
from hypothesis import given
from hypothesis import strategies as st
from plansmith.fleet import buildable
from plansmith.fleet.fleet_file import Fleet
from plansmith.fleet.matrix import Job, _allot, github_matrix, github_outputs, gitlab_pipeline, jobs_of
from plansmith.fleet.plan import Step, plan_fleet
from plansmith.fleet.selection import select
from plansmith.fleet.store.local import LocalStore
from plansmith.fleet.units import units_of
from plansmith.runtime.errors import InvalidArgumentError, UnsupportedError

MakeFleet = Callable[..., Fleet]
RUNNERS = {"models:": "runners: {default: [big, linux], sm89: l4-box}\nmodels:"}


def steps_of(fleet: Fleet, store: LocalStore) -> list[Step]:
    return plan_fleet(fleet, units_of(fleet), store)


def test_a_job_a_unit(make_fleet: MakeFleet, store: LocalStore) -> None:
    jobs = jobs_of(steps_of(make_fleet(**RUNNERS), store))
    assert github_matrix(jobs) == {
        "include": [
            {"unit": name, "name": name, "runner": runner, "target": target, "only": name}
            for name, runner, target in (
                ("tiny/int8/cpu", ["big", "linux"], "cpu"),
                ("tiny/int8/sm89", ["l4-box"], "sm89"),
                ("tiny/fp16/cpu", ["big", "linux"], "cpu"),
                ("tiny/fp16/sm89", ["l4-box"], "sm89"),
            )
        ]
    }


def test_without_runners(make_fleet: MakeFleet, store: LocalStore) -> None:
    jobs = jobs_of(steps_of(make_fleet(), store))
    assert {tuple(one["runner"]) for one in github_matrix(jobs)["include"]} == {("ubuntu-latest",)}
    assert "tags" not in gitlab_pipeline(jobs, "plansmith.yaml")["tiny/int8/cpu"]


def test_stale_units_alone_unless_all_are_asked_for(make_fleet: MakeFleet, store: LocalStore) -> None:
    fleet = make_fleet()
    for unit in units_of(fleet, only=["*/cpu"]):
        put(store, unit)
    steps = steps_of(fleet, store)
    assert [job.name for job in jobs_of(steps)] == ["tiny/int8/sm89", "tiny/fp16/sm89"]
    assert len(jobs_of(steps, all_units=True)) == 4


def test_a_gate_is_work_too(make_fleet: MakeFleet, store: LocalStore) -> None:
    fleet = make_fleet(**{"int8: {draft: int4}": "int8: {gate: kl<=1}"})
    for unit in units_of(fleet):
        put(store, unit)
    assert [job.name for job in jobs_of(steps_of(fleet, store))] == ["tiny/int8/cpu"]


def test_a_fleet_that_is_current(make_fleet: MakeFleet, store: LocalStore) -> None:
    fleet = make_fleet()
    for unit in units_of(fleet):
        put(store, unit)
    jobs = jobs_of(steps_of(fleet, store))
    assert github_outputs(jobs) == 'any=false\nmatrix={"include":[]}\n'
    pipeline = gitlab_pipeline(jobs, "plansmith.yaml")
    (job,) = (one for name, one in pipeline.items() if name != "stages")
    assert job["stage"] in pipeline["stages"] and job["script"][0].startswith("echo")


def test_outputs_are_one_line_each(make_fleet: MakeFleet, store: LocalStore) -> None:
    jobs = jobs_of(steps_of(make_fleet(), store))
    lines = github_outputs(jobs).splitlines()
    assert lines[0] == "any=true"
    name, _, value = lines[1].partition("=")
    assert (name, json.loads(value)) == ("matrix", github_matrix(jobs))
    assert len(lines) == 2


def test_a_pipeline_is_yaml_that_builds_every_unit(make_fleet: MakeFleet, store: LocalStore) -> None:
    fleet = make_fleet(**RUNNERS)
    jobs = jobs_of(steps_of(fleet, store))
    pipeline = yaml.safe_load(json.dumps(gitlab_pipeline(jobs, "my fleet.yaml", ".gitlab/plansmith.yml")))
    assert pipeline.pop("include") == [{"local": ".gitlab/plansmith.yml"}]
    assert pipeline.pop("stages") == ["build"]
    names = {unit.name: unit.members for unit in units_of(fleet)}
    built: set[str] = set()
    for job in pipeline.values():
        assert (job["stage"], job["extends"]) == ("build", ".plansmith")
        words = shlex.split(job["script"][0])
        assert words[:5] == ["plansmith", "fleet", "build", "--file", "my fleet.yaml"]
        assert words[5] == "--only"
        built |= select(names, [words[6]])
    assert built == set(names)
    assert pipeline["tiny/int8/sm89"]["tags"] == ["l4-box"]


def test_units_share_jobs_where_there_are_too_many(make_fleet: MakeFleet, store: LocalStore) -> None:
    fleet = make_fleet(**RUNNERS, **{"  fp16:": "  fp16:\n  bf16:\n  fp32: {precision: fp32}"})
    steps = [step for step in steps_of(fleet, store) if step.action == "build"]
    jobs = jobs_of(steps, max_jobs=3)
    assert len(jobs) == 3
    assert sorted(unit.name for job in jobs for unit in job.units) == sorted(step.unit.name for step in steps)
    for job in jobs:
        assert {step.runner for step in steps if step.unit in job.units} == {job.runner}
    names = {step.unit.name: step.unit.members for step in steps}
    grouped = max(jobs, key=lambda job: len(job.units))
    assert select(names, [grouped.only]) == {unit.name for unit in grouped.units}
    assert grouped.name.endswith(f"and {len(grouped.units) - 1} more")
    with pytest.raises(InvalidArgumentError, match="the units need 2 kinds of runners"):
        jobs_of(steps, max_jobs=1)


@given(
    st.dictionaries(st.tuples(st.text("abc", max_size=3)), st.integers(1, 500), min_size=1, max_size=6),
    st.data(),
)
def test_allotted_jobs_are_all_used(sizes: dict[tuple[str, ...], int], data: st.DataObject) -> None:
    most = data.draw(st.integers(len(sizes), 256))
    counts = _allot(sizes, most)
    assert sum(counts.values()) == most
    assert min(counts.values()) >= 1
    longest = max(sizes[one] / counts[one] for one in sizes)
    # Another job would not have helped a runner that has one more than it needs.
    assert all(counts[one] == 1 or sizes[one] / (counts[one] - 1) >= longest for one in sizes)


@pytest.fixture
def no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    def absent(target: object) -> str:
        raise UnsupportedError("there is no such GPU here")

    monkeypatch.setattr(buildable.tensorrt, "check_available", absent)


@pytest.mark.usefixtures("no_gpu")
def test_a_gpu_needs_a_runner_of_its_own(make_fleet: MakeFleet, store: LocalStore) -> None:
    h100 = {"skus:": "skus:\n  h100:"}
    with pytest.raises(
        InvalidArgumentError, match=r"a GPU sm90.*add e.g. sm90: \[self-hosted, sm90\] under runners"
    ):
        jobs_of(steps_of(make_fleet(**h100, **RUNNERS), store))
    named = {"skus:": "skus:\n  h100: {runner: [self-hosted, h100]}"}
    jobs = jobs_of(steps_of(make_fleet(**named, **RUNNERS), store))
    assert {job.runner for job in jobs if job.target == "sm90"} == {("self-hosted", "h100")}


def test_what_runs_nowhere_is_an_error(make_fleet: MakeFleet, store: LocalStore) -> None:
    fleet = make_fleet(**{"  fp16:": "  fp16: {precision: int8, group_size: 64}"})
    with pytest.raises(UnsupportedError, match=r"tiny/fp16/sm89 cannot be built anywhere: .* under engines"):
        jobs_of(steps_of(fleet, store))


def test_targets_of_a_job(make_fleet: MakeFleet) -> None:
    job = Job(tuple(units_of(make_fleet())), ())
    assert job.target == "cpu,sm89"
