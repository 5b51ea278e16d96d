"""deploy/ci/github: the workflow, executed as it is, on tiny checkpoints and machines that this one plays."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest
from ci_runner import JobRun, Machine, Site
from ci_runner_fleet import H100, checkpoints, fork, leaks, make_site, members, records, spoil, unsign
from ci_runner_github import Event, Github

PUSH = Event("push", changed=("plansmith.yaml",))
BY_HAND = Event("workflow_dispatch")
ROLES = {"FLEET_READ_ROLE": "arn:reader", "FLEET_WRITE_ROLE": "arn:writer"}
BUILT_HERE = {"smol/int8/cpu", "smol/int8/l4", "qwen/int8/cpu", "qwen/int8/l4"}


@dataclasses.dataclass
class First:
    """What the first run of a new fleet leaves behind."""

    site: Site
    key: str
    jobs: Mapping[str, JobRun]

    def github(self, site: Site | None = None) -> Github:
        """Return the workflow, of a copy of the place if one is given."""
        return Github(site or self.site, ROLES, {"fleet": {"PLANSMITH_SIGNING_KEY": self.key}})


@pytest.fixture(scope="module")
def models(tiny_checkpoint: Callable[[str], Path]) -> dict[str, Path]:
    """Return the checkpoints that stand for those of checkpoints.txt."""
    return {"smol": tiny_checkpoint("llama"), "qwen": tiny_checkpoint("qwen2")}


@pytest.fixture(scope="module")
def first(
    environ: dict[str, str], models: dict[str, Path], tmp_path_factory: pytest.TempPathFactory
) -> First:
    """Return the whole fleet after its first push; do not change it, but a fork."""
    site, key = make_site(tmp_path_factory.mktemp("github") / "site", "github", environ, models)
    found = First(site, key, {})
    found.jobs = found.github().run(PUSH)
    return found


@pytest.fixture
def built(first: First, tmp_path: Path) -> Site:
    """Return a copy of the place, of a fleet without the GPU that no machine here has: so everything is built."""
    site = fork(first.site, tmp_path / "site")
    site.edit("plansmith.yaml", ("  h100:\n", ""))
    return site


def test_a_new_fleet_is_built_a_job_a_plan(first: First) -> None:
    states = {name: job.status for name, job in first.jobs.items()}
    here = {"smol/int8/cpu", "smol/int8/sm89", "qwen/int8/cpu", "qwen/int8/sm89"}
    gpu = {"smol/int8/sm90", "qwen/int8/sm90"}
    assert states == {
        "plan": "success",
        **dict.fromkeys(here, "success"),
        **dict.fromkeys(gpu, "queued"),
        "release": "queued",
        "collect": "queued",
    }, first.jobs["plan"].log
    assert {first.jobs[name].wanted for name in gpu} == {H100}
    assert {first.jobs[name].wanted for name in here} == {("ubuntu-latest",)}
    assert members(first.site) == BUILT_HERE
    assert len(records(first.site)) == 4
    assert "as arn:reader" in first.jobs["plan"].log
    assert all("as arn:writer" in first.jobs[name].log for name in here)
    assert "smol/int8/sm89" in first.jobs["plan"].log


def test_downloads_are_kept_by_commit(first: First) -> None:
    calls = [line.split()[1] for line in first.site.log_of("hf")]
    # By the job `plan`, which knows nothing of a new fleet's; then once for all plans of a model.
    assert sorted(calls) == sorted(2 * [one for one, _ in checkpoints().values()])
    assert first.site.log_of("pip") == [
        "requirements.txt from index",
        *4 * ["requirements.txt from cache"],
    ]
    assert {path.name.partition("-")[0] for path in (first.site.root / "caches").iterdir()} == {
        "pip", "checkpoints", "kernels",
    }  # fmt: skip


def test_the_key_is_nowhere(first: First) -> None:
    assert leaks(first.site, first.key) == []
    secret = first.key.splitlines()[1]
    assert not any(secret in job.log for job in first.jobs.values())
    # The check would see it.
    note = first.site.root / "jobs" / "note"
    note.write_text(first.key)
    assert leaks(first.site, first.key) == [str(note)]
    note.unlink()


def test_a_current_fleet_compiles_nothing(first: First, built: Site) -> None:
    before, downloads = records(built), built.log_of("hf")
    jobs = first.github(built).run(PUSH)
    assert {name: job.status for name, job in jobs.items()} == {
        "plan": "success",
        "build": "skipped",
        "release": "skipped",
        "collect": "skipped",
    }, jobs["plan"].log
    assert jobs["plan"].outputs == {"any": "false", "matrix": '{"include":[]}'}
    assert (records(built), built.log_of("hf")) == (before, downloads)


def test_a_release_is_what_machines_get(first: First, built: Site) -> None:
    jobs = first.github(built).run(BY_HAND)
    assert (jobs["build"].status, jobs["release"].status) == ("skipped", "success"), jobs["release"].log
    assert "4 of 4 members are current" in jobs["release"].log
    found = built.root / "artifacts" / "engine-manifests" / "work" / "engines"
    for model in ("smol", "qwen"):
        manifest = json.loads((found / f"{model}-int8" / "manifest.json").read_text())
        assert set(manifest["targets"]) == {"cpu", "sm89"}


def test_a_changed_limit_builds_its_plans_alone(first: First, built: Site) -> None:
    built.edit("plansmith.yaml", ("  cpu:\n", "  cpu: {limits: {max_batch_size: 1}}\n"))
    before, downloads = records(built), built.log_of("hf")
    jobs = first.github(built).run(PUSH)
    made = {"smol/int8/cpu@cpu", "qwen/int8/cpu@cpu"}
    assert {name: job.status for name, job in jobs.items()} == {
        "plan": "success",
        **dict.fromkeys(made, "success"),
        "release": "success",
        "collect": "skipped",
    }, jobs["plan"].log
    assert len(records(built) - before) == 2
    assert built.log_of("hf") == downloads
    assert leaks(built, first.key) == []


def test_a_spoiled_store_is_not_released(first: First, built: Site) -> None:
    spoil(built)
    jobs = first.github(built).run(BY_HAND)
    assert (jobs["plan"].status, jobs["release"].status) == ("success", "failure")
    assert "was altered" in jobs["release"].log.rpartition("$ plansmith fleet pull")[2], jobs["release"].log


def test_a_plan_that_nobody_signed_is_built_anew(first: First, built: Site) -> None:
    unsign(built, "qwen/int8/cpu")
    jobs = first.github(built).run(PUSH)
    assert "is not signed" in jobs["plan"].log
    assert {name: job.status for name, job in jobs.items()} == {
        "plan": "success",
        "qwen/int8/cpu": "success",
        "release": "success",
        "collect": "skipped",
    }, jobs["plan"].log


def test_the_night_collects_and_reads_all(first: First, built: Site) -> None:
    jobs = first.github(built).run(Event("schedule"))
    assert (jobs["release"].status, jobs["collect"].status) == ("skipped", "success"), jobs["collect"].log
    assert "no problems" in jobs["collect"].log
    spoil(built)
    assert first.github(built).run(Event("schedule"))["collect"].status == "failure"


def test_a_pull_request_gets_the_plan_and_no_more(first: First, tmp_path: Path) -> None:
    github = first.github(fork(first.site, tmp_path / "site"))
    pull = Event("pull_request", "refs/pull/7/merge", ("plansmith.yaml",))
    jobs = github.run(pull)
    assert {name: job.status for name, job in jobs.items()} == {
        "plan": "success",
        "build": "skipped",
        "release": "skipped",
        "collect": "skipped",
    }
    assert "smol/int8/sm90" in jobs["plan"].log and jobs["plan"].outputs["any"] == "true"
    assert github.run(dataclasses.replace(pull, fork=True))["plan"].status == "skipped"


def test_what_does_not_touch_the_fleet_starts_nothing(first: First) -> None:
    github = first.github()
    assert not github.is_triggered(Event("push", changed=("README.md",)))
    assert not github.is_triggered(Event("push", "refs/heads/topic", ("plansmith.yaml",)))
    assert github.is_triggered(Event("push", changed=(".github/actions/setup/action.yml",)))


def test_a_machine_without_its_gpu_fails_the_job(first: First, tmp_path: Path) -> None:
    site = fork(first.site, tmp_path / "site")
    kept = tmp_path / "checkpoints"
    site.machines.append(Machine(frozenset(H100), is_hosted=False, environ={"CHECKPOINTS_DIR": str(kept)}))
    jobs = first.github(site).run(PUSH)
    assert jobs["smol/int8/sm90"].status == "failure"
    assert "needs a GPU sm90, with TensorRT 11" in jobs["smol/int8/sm90"].log
    assert jobs["release"].status == "skipped"
    assert site.log_of("pip")[-2:] == 2 * ["requirements-gpu.txt from cache"]
    assert sorted(path.name for path in kept.iterdir()) == ["qwen", "qwen.commit", "smol", "smol.commit"]


def test_other_weights_than_those_that_were_meant(
    environ: dict[str, str], models: dict[str, Path], tmp_path: Path
) -> None:
    site, key = make_site(tmp_path / "site", "github", environ, models)
    repository, commit = checkpoints()["qwen"]
    weights = site.hub / repository / commit / "model.safetensors"
    weights.chmod(0o644)
    weights.write_bytes(weights.read_bytes()[:-1] + b"\x01")
    jobs = Github(site, {}, {"fleet": {"PLANSMITH_SIGNING_KEY": key}}).run(PUSH)
    assert (jobs["plan"].status, jobs["build"].status) == ("failure", "skipped")
    assert "checkpoints/qwen has the fingerprint" in jobs["plan"].log


def test_without_the_key_nothing_is_pushed(first: First, built: Site) -> None:
    built.edit("plansmith.yaml", ("  cpu:\n", "  cpu: {limits: {max_batch_size: 1}}\n"), ("  l4:\n", ""))
    before = records(built)
    jobs = Github(built, ROLES, {}).run(PUSH)
    assert jobs["smol/int8/cpu@cpu"].status == jobs["qwen/int8/cpu@cpu"].status == "failure"
    assert "PLANSMITH_SIGNING_KEY" in jobs["smol/int8/cpu@cpu"].log  # what to set
    assert jobs["release"].status == "skipped" and records(built) == before
