"""Runs a GitLab pipeline on this machine: includes, extends, rules, stages, caches, artifacts, a child pipeline.

What deploy/ci does not use is not here, and a file that uses it is refused instead of half run.
"""

from __future__ import annotations

import dataclasses
import fnmatch
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml
from ci_runner import JobRun, Machine, Site, Status, Workspace

PIPELINE = ".gitlab-ci.yml"
_TOP = {"include", "workflow", "stages"}
_RUN_KEYS = {
    "stage", "image", "timeout", "retry", "variables", "id_tokens", "cache", "before_script", "script", "artifacts",
    "needs", "rules", "environment", "tags",
}  # fmt: skip
_TRIGGER_KEYS = {"stage", "needs", "resource_group", "trigger", "rules"}
Job = dict[str, Any]


@dataclasses.dataclass(frozen=True)
class Variable:
    """A variable of the project's settings. scope : the environment that alone has it; is_file : jobs get its path"""

    value: str
    scope: str = "*"
    is_protected: bool = False
    is_file: bool = False


@dataclasses.dataclass(frozen=True)
class Event:
    """What starts a pipeline. changed : files of the push or merge request"""

    source: str
    branch: str = "main"
    changed: tuple[str, ...] = ()

    def variables(self) -> dict[str, str]:
        """Return the predefined variables that rules ask for."""
        branch = {} if self.source == "merge_request_event" else {"CI_COMMIT_BRANCH": self.branch}
        return {"CI_PIPELINE_SOURCE": self.source, "CI_DEFAULT_BRANCH": "main", **branch}


class Gitlab:
    """A project's pipeline with the variables of its settings."""

    def __init__(self, site: Site, variables: Mapping[str, Variable]) -> None:
        self.site = site
        self._variables = variables

    def is_triggered(self, event: Event) -> bool:
        """Return whether an event starts a pipeline."""
        document = self._load(yaml.safe_load((self.site.repository / PIPELINE).read_text()))
        return _matches(document["workflow"]["rules"], event, event.variables())

    def run(self, event: Event) -> dict[str, JobRun]:
        """Run the pipeline of an event and its child, and return what became of every job, by their names.

        A job waits where no machine has its tags, and so does one that needs a job which waits.
        """
        assert self.is_triggered(event)
        return self._pipeline(yaml.safe_load((self.site.repository / PIPELINE).read_text()), event)

    def _pipeline(self, document: dict[str, Any], event: Event) -> dict[str, JobRun]:
        document = self._load(document)
        jobs = {name: one for name, one in document.items() if name not in _TOP and not name.startswith(".")}
        stages = document["stages"]
        chosen = {
            name: _extended(document, job)
            for name, job in sorted(jobs.items(), key=lambda pair: stages.index(pair[1]["stage"]))
        }
        runs: dict[str, JobRun] = {}
        for name, job in chosen.items():
            assert set(job) <= (_TRIGGER_KEYS if "trigger" in job else _RUN_KEYS), name
            if "rules" in job and not _matches(job["rules"], event, event.variables()):
                continue  # it is not part of this pipeline
            runs |= self._job(name, job, event, runs)
        return runs

    def _job(self, name: str, job: Job, event: Event, runs: Mapping[str, JobRun]) -> dict[str, JobRun]:
        needs = job.get("needs", [])
        before: set[Status] = {runs[one].status for one in needs}
        for status in ("queued", "failure", "skipped"):
            if status in before:
                waits: Status = "queued" if status == "queued" else "skipped"
                return {name: JobRun(name, waits)}
        if "trigger" in job:
            return self._child(name, job, event)
        machine = self.site.machine(job.get("tags", ()))
        if machine is None:
            return {name: JobRun(name, "queued", tuple(job["tags"]))}
        run = _Run(self.site.start(machine), machine, name, job, self._environ(job, event))
        is_good = run.run(needs)
        return {
            name: JobRun(
                name, "success" if is_good else "failure", tuple(job.get("tags", ())), run.workspace.log
            )
        }

    def _child(self, name: str, job: Job, event: Event) -> dict[str, JobRun]:
        """Run the pipeline that another job wrote; the job that starts it becomes what the pipeline becomes."""
        (include,) = job["trigger"]["include"]
        assert job["trigger"]["strategy"] == "depend" and include["job"] in job["needs"]
        file = include["artifact"]
        assert Path(file).suffix in (".yml", ".yaml"), "GitLab includes no other file"
        path = self.site.root / "artifacts" / include["job"] / "work" / file
        child = self._pipeline(
            yaml.safe_load(path.read_text()), dataclasses.replace(event, source="parent_pipeline")
        )
        assert child, "GitLab refuses a pipeline without jobs"
        states = {one.status for one in child.values()}
        order: tuple[Status, ...] = ("queued", "failure", "success")
        status = next(one for one in order if one in states)
        return {name: JobRun(name, status), **child}

    def _environ(self, job: Job, event: Event) -> dict[str, Variable]:
        """Return the settings' variables that a job sees."""
        environment = job.get("environment", {})
        assert environment.get("action", "access") == "access"
        is_protected = event.branch == "main" and event.source != "merge_request_event"
        return {
            name: one
            for name, one in self._variables.items()
            if one.scope in ("*", environment.get("name")) and (is_protected or not one.is_protected)
        }

    def _load(self, document: dict[str, Any]) -> dict[str, Any]:
        """Return a document with what it includes."""
        merged: dict[str, Any] = {}
        for one in document.get("include", []):
            assert set(one) == {"local"} and Path(one["local"]).suffix in (".yml", ".yaml")
            merged |= yaml.safe_load((self.site.repository / one["local"]).read_text())
        return {**merged, **document}


class _Run:
    """A job on a machine."""

    def __init__(
        self, workspace: Workspace, machine: Machine, name: str, job: Job, settings: Mapping[str, Variable]
    ) -> None:
        self.workspace = workspace
        self._name = name
        self._job = job
        environ = workspace.environ
        environ["CI_PROJECT_DIR"] = str(workspace.work)
        environ["CI_JOB_NAME_SLUG"] = re.sub(r"[^a-z0-9]", "-", name.lower())[:63].strip("-")
        environ["CI_RUNNER_TAGS"] = json.dumps(sorted(machine.labels))
        for variable, one in settings.items():
            environ[variable] = self._file(variable, one.value) if one.is_file else one.value
        for variable in job.get("id_tokens", {}):
            environ[variable] = f"token for {job['id_tokens'][variable]['aud']}"
        for variable, value in job.get("variables", {}).items():
            environ[variable] = _expanded(str(value), environ)

    def run(self, needs: Sequence[str]) -> bool:
        """Run the job; return whether it went well."""
        self.workspace.check_out()
        for one in needs:
            self.workspace.restore("artifacts", one)
        caches = [(self._key(one["key"]), one) for one in self._job.get("cache", [])]
        for key, _ in caches:
            self.workspace.restore("caches", key)
        script = "\n".join([*self._job.get("before_script", []), *self._job["script"]])
        self.workspace.log += f"$ {script}\n"
        is_good = self.workspace.bash(script, {})
        if is_good:
            for key, cache in caches:
                if "push" in _expanded(cache.get("policy", "pull-push"), self.workspace.environ):
                    self.workspace.save("caches", key, cache["paths"])
            self.workspace.save("artifacts", self._name, self._job.get("artifacts", {}).get("paths", []))
        return is_good

    def _key(self, key: Mapping[str, Any]) -> str:
        prefix = _expanded(key["prefix"], self.workspace.environ)
        return f"{prefix}-{self.workspace.hash_files(key['files'])}"

    def _file(self, name: str, value: str) -> str:
        """Write a variable's value to a file outside the project, and return its path."""
        path = Path(self.workspace.environ["HOME"]).parent / f"{name}.secret"
        path.write_text(value)
        return str(path)


def _extended(document: Mapping[str, Any], job: Job) -> Job:
    """Return a job with what it extends: mappings are merged, all else is replaced."""
    base = job.get("extends")
    if base is None:
        return job
    return _merged(
        _extended(document, document[base]), {name: one for name, one in job.items() if name != "extends"}
    )


def _merged(base: Job, more: Job) -> Job:
    both = {
        name: _merged(base[name], more[name])
        for name in base.keys() & more.keys()
        if isinstance(base[name], dict) and isinstance(more[name], dict)
    }
    return {**base, **more, **both}


def _matches(rules: Iterable[Mapping[str, Any]], event: Event, variables: Mapping[str, str]) -> bool:
    """Return whether the first rule that holds lets the job or pipeline in; none means no."""
    for rule in rules:
        assert set(rule) <= {"if", "changes"}
        patterns = rule.get("changes")
        is_touched = patterns is None or any(
            fnmatch.fnmatch(path, pattern) for path in event.changed for pattern in patterns
        )
        if _holds(rule["if"], variables) and is_touched:
            return True
    return False


def _holds(expression: str, variables: Mapping[str, str]) -> bool:
    """Return whether an expression holds: comparisons of variables and texts with && and || between."""
    return any(
        all(_compared(one, variables) for one in either.split("&&")) for either in expression.split("||")
    )


def _compared(text: str, variables: Mapping[str, str]) -> bool:
    found = re.fullmatch(r"\s*(\$\w+)\s*(==|!=)\s*(\$\w+|\"[^\"]*\")\s*", text)
    assert found is not None, f"{text!r} is not understood"
    left, right = (
        variables.get(one[1:]) if one.startswith("$") else one.strip('"') for one in (found[1], found[3])
    )
    return (left == right) is (found[2] == "==")


def _expanded(text: str, environ: Mapping[str, str]) -> str:
    """Return a text with $NAME replaced by variables."""
    return re.sub(r"\$(\w+)", lambda found: environ.get(found[1], ""), text)
