"""deploy/ci/gitlab: both pipelines, executed as they are, on tiny checkpoints and machines that this one plays."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import yaml
from ci_runner import JobRun, Machine, Site
from ci_runner_fleet import H100, checkpoints, fork, leaks, make_site, members, records, spoil
from ci_runner_gitlab import Event, Gitlab, Variable

PUSH = Event("push", changed=("plansmith.yaml",))
MACHINES = (Machine(frozenset()), Machine(frozenset({"other"})))


def gitlab(site: Site) -> Gitlab:
    """Return the project's pipeline, with the settings that docs/ci.md asks for."""
    key = (site.root / "key.pem").read_text()
    settings = {
        "PLANSMITH_SIGNING_KEY": Variable(key, scope="fleet", is_protected=True, is_file=True),
        "FLEET_READ_ROLE": Variable("arn:reader"),
        "FLEET_WRITE_ROLE": Variable("arn:writer", is_protected=True),
    }
    return Gitlab(site, settings)


@pytest.fixture(scope="module")
def first(
    environ: dict[str, str],
    tiny_checkpoint: Callable[[str], Path],
    tmp_path_factory: pytest.TempPathFactory,
) -> tuple[Site, dict[str, JobRun]]:
    """Return a fleet for CPU and H100 after its first push, and its jobs; do not change it, but a fork."""
    models = {"smol": tiny_checkpoint("llama"), "qwen": tiny_checkpoint("qwen2")}
    site, _ = make_site(tmp_path_factory.mktemp("gitlab") / "site", "gitlab", environ, models)
    site.machines = list(MACHINES)
    site.edit("plansmith.yaml", ("  l4:\n", ""))
    return site, gitlab(site).run(PUSH)


@pytest.fixture
def built(first: tuple[Site, dict[str, JobRun]], tmp_path: Path) -> Site:
    """Return a copy of the place, of a fleet without the GPU that no machine here has: so everything is built."""
    site = fork(first[0], tmp_path / "site")
    site.edit("plansmith.yaml", ("  h100:\n", ""))
    return site


def test_a_new_fleet_is_built_a_job_a_plan(first: tuple[Site, dict[str, JobRun]]) -> None:
    site, jobs = first
    states = {name: job.status for name, job in jobs.items()}
    assert states == {
        "plan": "success",
        "build": "queued",
        "smol/int8/cpu": "success",
        "qwen/int8/cpu": "success",
        "smol/int8/sm90": "queued",
        "qwen/int8/sm90": "queued",
        "release": "queued",
    }, jobs["plan"].log
    assert jobs["smol/int8/sm90"].wanted == H100
    assert members(site) == {"smol/int8/cpu", "qwen/int8/cpu"}
    assert len(site.log_of("hf")) == 2 * len(checkpoints())  # by the job `plan`, and by those that build
    assert site.log_of("pip") == ["requirements.txt from index", *2 * ["requirements.txt from cache"]]
    for run in (site.root / "jobs").iterdir():
        assert (run / "PLANSMITH_SIGNING_KEY.secret").exists() is (run.name != "1")  # the job `plan`
    assert leaks(site, (site.root / "key.pem").read_text()) == []


def test_a_current_fleet_compiles_nothing_and_is_released(built: Site) -> None:
    before, downloads = records(built), built.log_of("hf")
    jobs = gitlab(built).run(PUSH)
    assert {name: job.status for name, job in jobs.items()} == {
        "plan": "success",
        "build": "success",
        "nothing to build": "success",
        "release": "success",
    }, jobs["release"].log
    assert (records(built), built.log_of("hf")) == (before, downloads)
    assert "2 of 2 members are current" in jobs["release"].log
    kept = built.root / "artifacts" / "release" / "work" / "engines"
    assert sorted(path.name for path in kept.iterdir()) == ["qwen-int8", "smol-int8"]
    assert json.loads((kept / "qwen-int8" / "manifest.json").read_text())["targets"].keys() == {"cpu"}


def test_a_changed_limit_builds_its_plans_alone(built: Site) -> None:
    line = "    checkpoint: checkpoints/qwen\n"
    built.edit("plansmith.yaml", (line, f"{line}    limits: {{max_batch_size: 1}}\n"))
    before, downloads = records(built), built.log_of("hf")
    jobs = gitlab(built).run(PUSH)
    assert {name: job.status for name, job in jobs.items()} == {
        "plan": "success",
        "build": "success",
        "qwen/int8/cpu": "success",
        "release": "success",
    }
    assert len(records(built) - before) == 1
    assert built.log_of("hf") == downloads  # from the cache


def test_a_spoiled_store_is_not_released(built: Site) -> None:
    spoil(built)
    jobs = gitlab(built).run(PUSH)
    assert (jobs["build"].status, jobs["release"].status) == ("success", "failure")
    assert gitlab(built).run(Event("schedule"))["collect"].status == "failure"


def test_the_night_collects_and_reads_all(built: Site) -> None:
    jobs = gitlab(built).run(Event("schedule"))
    assert jobs.keys() == {"plan", "build", "nothing to build", "collect"}
    assert jobs["collect"].status == "success" and "no problems" in jobs["collect"].log


def test_a_merge_request_gets_the_plan_and_no_more(
    first: tuple[Site, dict[str, JobRun]], tmp_path: Path
) -> None:
    site = fork(first[0], tmp_path / "site")
    request = Event("merge_request_event", "topic", ("plansmith.yaml",))
    jobs = gitlab(site).run(request)
    assert jobs.keys() == {"plan"} and jobs["plan"].status == "success"
    assert not gitlab(site).is_triggered(Event("merge_request_event", "topic", ("README.md",)))
    assert not gitlab(site).is_triggered(Event("push", "topic", ("plansmith.yaml",)))


def test_a_machine_without_its_gpu_fails_the_job(
    first: tuple[Site, dict[str, JobRun]], tmp_path: Path
) -> None:
    site = fork(first[0], tmp_path / "site")
    kept = tmp_path / "checkpoints"
    site.machines.append(Machine(frozenset(H100), environ={"CHECKPOINTS_DIR": str(kept)}))
    jobs = gitlab(site).run(PUSH)
    assert (jobs["smol/int8/sm90"].status, jobs["build"].status) == ("failure", "failure")
    assert jobs["release"].status == "skipped"
    assert site.log_of("pip")[-1] == "requirements-gpu.txt from cache"
    assert sorted(path.name for path in kept.iterdir()) == ["qwen", "qwen.commit", "smol", "smol.commit"]


def test_the_pipeline_that_a_job_writes_is_one(first: tuple[Site, dict[str, JobRun]]) -> None:
    file = first[0].root / "artifacts" / "plan" / "work" / "fleet-pipeline.yml"
    program = Path(sys.executable).parent / "check-jsonschema"
    done = subprocess.run(
        [program, "--builtin-schema", "vendor.gitlab-ci", file], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout
    pipeline = yaml.safe_load(file.read_text())
    assert pipeline["include"] == [{"local": ".gitlab/plansmith-jobs.yml"}]
    assert all(pipeline[name]["extends"] == ".plansmith" for name in ("smol/int8/cpu", "qwen/int8/sm90"))
