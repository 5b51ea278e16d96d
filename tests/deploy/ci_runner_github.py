"""Runs a GitHub workflow on this machine: jobs, matrices, conditions, outputs, steps, a composite action.

What deploy/ci does not use is not here, and a file that uses it is refused instead of half run.
"""

from __future__ import annotations

import dataclasses
import fnmatch
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml
from ci_runner import JobRun, Machine, Site, Status, Workspace
from ci_runner_expressions import Functions, as_text, condition, fill

WORKFLOW = ".github/workflows/fleet.yml"
REPOSITORY = "acme/engines"
_JOB_KEYS = {
    "needs", "if", "name", "runs-on", "timeout-minutes", "environment", "permissions", "outputs", "strategy", "steps",
}  # fmt: skip
_STEP_KEYS = {"uses", "with", "run", "shell", "env", "if", "id", "name"}
_PINNED = 40  # the digits of a commit


@dataclasses.dataclass(frozen=True)
class Event:
    """What starts a workflow. changed : files of a push or pull request; fork : the latter comes from one"""

    name: str
    ref: str = "refs/heads/main"
    changed: tuple[str, ...] = ()
    fork: bool = False

    def context(self) -> dict[str, Any]:
        """Return the context `github`."""
        head = "someone/engines" if self.fork else REPOSITORY
        pull = {"head": {"repo": {"full_name": head}}} if self.name == "pull_request" else None
        return {
            "event_name": self.name,
            "ref": self.ref,
            "repository": REPOSITORY,
            "event": {"pull_request": pull},
        }


class Github:
    """A repository's workflow with its variables, and secrets by the environment that has them."""

    def __init__(
        self, site: Site, variables: Mapping[str, str], secrets: Mapping[str, Mapping[str, str]]
    ) -> None:
        self.site = site
        self._variables = variables
        self._secrets = secrets

    def is_triggered(self, event: Event) -> bool:
        """Return whether an event starts the workflow."""
        document = self._document()
        triggers = document[True]  # what YAML makes of `on`
        if event.name not in triggers:
            return False
        wanted = triggers[event.name] or {}
        if isinstance(wanted, list):  # schedule
            return True
        if "branches" in wanted and event.ref.removeprefix("refs/heads/") not in wanted["branches"]:
            return False
        patterns = wanted.get("paths")
        return patterns is None or any(
            fnmatch.fnmatch(path, pattern) for path in event.changed for pattern in patterns
        )

    def run(self, event: Event) -> dict[str, JobRun]:
        """Run the workflow for an event, and return what became of every job; those of a matrix by their names.

        A job waits where no machine has its labels, and so does one that needs a job which waits.
        """
        assert self.is_triggered(event)
        document = self._document()
        results: dict[str, JobRun] = {}  # by the ids of jobs
        runs: dict[str, JobRun] = {}
        for job_id, job in document["jobs"].items():
            _check_keys(job, _JOB_KEYS)
            needs = [job["needs"]] if isinstance(job.get("needs"), str) else job.get("needs", [])
            before = {one: results[one] for one in needs}
            found = self._job(job_id, job, event, before)
            runs |= {one.name: one for one in found}
            results[job_id] = _together(job_id, found)
        return runs

    def _document(self) -> dict[Any, Any]:
        document: dict[Any, Any] = yaml.safe_load((self.site.repository / WORKFLOW).read_text())
        _check_keys(document, {"name", True, "permissions", "concurrency", "defaults", "jobs"})
        assert document["permissions"] == {} and document["defaults"] == {"run": {"shell": "bash"}}
        return document

    def _job(
        self, job_id: str, job: dict[str, Any], event: Event, needs: Mapping[str, JobRun]
    ) -> list[JobRun]:
        if any(one.status == "queued" for one in needs.values()):
            return [JobRun(job_id, "queued")]
        contexts = {
            "github": event.context(),
            "vars": self._variables,
            "needs": {name: {"result": one.status, "outputs": one.outputs} for name, one in needs.items()},
        }
        went_well = all(one.status == "success" for one in needs.values())
        functions = _status_functions(lambda: went_well)
        if not condition(job.get("if"), contexts, functions):
            return [JobRun(job_id, "skipped")]
        matrix = fill(job.get("strategy", {}).get("matrix"), contexts, functions)
        if matrix is None:
            return [self._instance(job_id, job, event, {**contexts, "matrix": {}})]
        assert set(matrix) == {"include"} and 0 < len(matrix["include"]) <= 256  # what GitHub takes
        assert job["strategy"]["fail-fast"] is False
        return [self._instance(job_id, job, event, {**contexts, "matrix": one}) for one in matrix["include"]]

    def _instance(
        self, job_id: str, job: dict[str, Any], event: Event, contexts: Mapping[str, Any]
    ) -> JobRun:
        name = as_text(fill(job.get("name", job_id), contexts, {})) if contexts["matrix"] else job_id
        labels = fill(job["runs-on"], contexts, {})
        wanted = (labels,) if isinstance(labels, str) else tuple(labels)
        machine = self.site.machine(wanted)
        if machine is None:
            return JobRun(name, "queued", wanted)
        secrets = self._secrets.get(job.get("environment", ""), {})
        run = _Run(self.site.start(machine), machine, job, {**contexts, "secrets": secrets}, event)
        is_good, outputs = run.all_steps()
        return JobRun(name, "success" if is_good else "failure", wanted, run.workspace.log, outputs)


class _Run:
    """A job on a machine."""

    def __init__(
        self,
        workspace: Workspace,
        machine: Machine,
        job: dict[str, Any],
        contexts: Mapping[str, Any],
        event: Event,
    ) -> None:
        self.workspace = workspace
        self._job = job
        self._machine = machine
        self._event = event
        self._contexts = {
            **contexts,
            "runner": {"environment": "github-hosted" if machine.is_hosted else "self-hosted"},
        }
        self._is_good = True
        self._after: list[Callable[[], object]] = []  # what actions do once all steps went well

    def all_steps(self) -> tuple[bool, dict[str, Any]]:
        """Run the steps; return whether all went well, and the job's outputs."""
        scope = {**self._contexts, "steps": {}}
        self._steps(self._job["steps"], scope)
        if self._is_good:
            for action in reversed(self._after):
                action()
        outputs = self._job.get("outputs", {})
        return self._is_good, {name: fill(value, scope, {}) for name, value in outputs.items()}

    def _steps(
        self, steps: Sequence[dict[str, Any]], scope: dict[str, Any], *, composite: bool = False
    ) -> None:
        functions: Functions = {
            **_status_functions(lambda: self._is_good),
            "hashFiles": lambda *patterns: self.workspace.hash_files(patterns),
        }
        for step in steps:
            _check_keys(step, _STEP_KEYS)
            if not condition(step.get("if"), scope, functions):
                continue
            with_ = {name: fill(one, scope, functions) for name, one in step.get("with", {}).items()}
            if "uses" in step:
                self._use(step["uses"], with_, scope)
                continue
            assert (step.get("shell") == "bash") is composite  # a composite action has no default
            environ = {
                name: as_text(fill(one, scope, functions)) for name, one in step.get("env", {}).items()
            }
            assert "${{" not in step["run"], "an expression in a script would be run as code"
            outputs = self._script(step["run"], environ)
            if "id" in step:
                scope["steps"][step["id"]] = {"outputs": outputs}

    def _script(self, script: str, environ: Mapping[str, str]) -> dict[str, str]:
        files = {name: self.workspace.folder / name for name in ("GITHUB_OUTPUT", "GITHUB_STEP_SUMMARY")}
        for path in files.values():
            path.write_text("")
        self.workspace.log += f"$ {script.strip()}\n"
        named = {name: str(path) for name, path in files.items()}
        if not self.workspace.bash(script, {**environ, **named}):
            self._is_good = False
        self.workspace.log += files["GITHUB_STEP_SUMMARY"].read_text()
        pairs = [line.partition("=") for line in files["GITHUB_OUTPUT"].read_text().splitlines()]
        return {name: value for name, _, value in pairs}

    def _use(self, action: str, with_: Mapping[str, Any], scope: Mapping[str, Any]) -> None:
        if action.startswith("./"):
            self._composite(self.workspace.work / action, with_, scope)
            return
        name, _, commit = action.partition("@")
        assert len(commit) == _PINNED, f"{action} is not pinned"
        known: dict[str, Callable[[Mapping[str, Any]], None]] = {
            "actions/checkout": self._check_out,
            "actions/setup-python": self._set_up_python,
            "actions/cache": self._cache,
            "actions/upload-artifact": self._upload,
            "aws-actions/configure-aws-credentials": self._assume_role,
        }
        self.workspace.log += f"$ uses {name}\n"
        known[name](with_)

    def _composite(self, folder: Path, with_: Mapping[str, Any], scope: Mapping[str, Any]) -> None:
        action = yaml.safe_load((folder / "action.yml").read_text())
        assert set(with_) <= set(action["inputs"]) and action["runs"]["using"] == "composite"
        inputs = {name: as_text(with_.get(name, one["default"])) for name, one in action["inputs"].items()}
        inner = {"inputs": inputs, "github": scope["github"], "runner": scope["runner"], "steps": {}}
        self._steps(action["runs"]["steps"], inner, composite=True)

    def _check_out(self, with_: Mapping[str, Any]) -> None:
        assert with_ == {"persist-credentials": False}
        assert self._job["permissions"]["contents"] == "read"
        self.workspace.check_out()

    def _set_up_python(self, with_: Mapping[str, Any]) -> None:
        assert (
            with_.keys() == {"python-version", "cache", "cache-dependency-path"} and with_["cache"] == "pip"
        )
        key = f"pip-{self.workspace.hash_files([with_['cache-dependency-path']])}"
        self._keep(key, "~/.cache/pip")

    def _cache(self, with_: Mapping[str, Any]) -> None:
        assert with_.keys() == {"path", "key"}
        self._keep(with_["key"], with_["path"])

    def _keep(self, key: str, path: str) -> None:
        """Restore a cache, or save it at the end where there is none: an entry is never overwritten."""
        if not self.workspace.restore("caches", key):
            self._after.append(lambda: self.workspace.save("caches", key, [path]))

    def _upload(self, with_: Mapping[str, Any]) -> None:
        count = self.workspace.save("artifacts", with_["name"], with_["path"].splitlines())
        if count == 0 and with_["if-no-files-found"] == "error":
            self._is_good = False

    def _assume_role(self, with_: Mapping[str, Any]) -> None:
        assert self._job["permissions"]["id-token"] == "write" and not self._event.fork
        self.workspace.environ["AWS_ROLE"] = with_["role-to-assume"]
        self.workspace.log += f"as {with_['role-to-assume']}\n"


def _together(job_id: str, found: Sequence[JobRun]) -> JobRun:
    """Return the jobs of a matrix as the one that others need."""
    order: tuple[Status, ...] = ("queued", "failure", "success", "skipped")
    states = {one.status for one in found}
    status = next(one for one in order if one in states)
    return JobRun(job_id, status, outputs=found[-1].outputs)


def _status_functions(went_well: Callable[[], bool]) -> Functions:
    return {
        "success": went_well,
        "failure": lambda: not went_well(),
        "always": lambda: True,
        "cancelled": lambda: False,
    }


def _check_keys(mapping: Mapping[Any, Any], known: set[Any]) -> None:
    """Refuse what is not interpreted here."""
    assert set(mapping) <= known, set(mapping) - known
