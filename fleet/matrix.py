"""The units that have to be built as jobs of a CI system: a matrix for GitHub Actions, a child pipeline for GitLab."""

from __future__ import annotations

import dataclasses
import json
import shlex
from collections.abc import Mapping, Sequence
from typing import Any

from ..runtime.errors import InvalidArgumentError, UnsupportedError
from .plan import Step
from .selection import shard
from .units import Unit

GITHUB_MAX_JOBS = 256  # of a matrix
_GITHUB_RUNNER = ("ubuntu-latest",)  # where the file names none
_IDLE = "nothing to build"


@dataclasses.dataclass(frozen=True)
class Job:
    """Units that are built one after the other on one runner. runner : its labels; () = any"""

    units: tuple[Unit, ...]
    runner: tuple[str, ...]

    @property
    def name(self) -> str:
        """A name for people."""
        more = len(self.units) - 1
        return self.units[0].name + (f" and {more} more" if more else "")

    @property
    def only(self) -> str:
        """What --only takes to build these units and no others."""
        return ",".join(unit.name for unit in self.units)

    @property
    def target(self) -> str:
        """The targets, with commas between."""
        return ",".join(dict.fromkeys(unit.target.name for unit in self.units))


def jobs_of(steps: Sequence[Step], *, all_units: bool = False, max_jobs: int = GITHUB_MAX_JOBS) -> list[Job]:
    """Return the jobs that build what is not in the store: one a unit, or where those are too many, one for several.

    all_units : also for units that the store has
    max_jobs : units share jobs where there are more; those of a job have the same runner
    raises InvalidArgumentError where no runner is named that a unit needs, UnsupportedError where none could build it
    """
    chosen = [step for step in steps if all_units or step.action != "keep"]
    by_runner: dict[tuple[str, ...], list[Unit]] = {}
    for step in chosen:
        by_runner.setdefault(_runner(step), []).append(step.unit)
    if len(chosen) <= max_jobs:
        return [Job((step.unit,), _runner(step)) for step in chosen]
    if len(by_runner) > max_jobs:
        raise InvalidArgumentError(
            f"--max-jobs is {max_jobs}, and the units need {len(by_runner)} kinds of runners; give at least that many"
        )
    counts = _allot({runner: len(units) for runner, units in by_runner.items()}, max_jobs)
    parts = [
        Job(tuple(part), runner)
        for runner, units in by_runner.items()
        for i in range(1, counts[runner] + 1)
        if (part := shard(units, i, counts[runner]))
    ]
    return parts


def github_matrix(jobs: Sequence[Job]) -> dict[str, Any]:
    """Return what `strategy.matrix` takes."""
    return {
        "include": [
            {
                "unit": job.units[0].name,
                "name": job.name,
                "runner": list(job.runner or _GITHUB_RUNNER),
                "target": job.target,
                "only": job.only,
            }
            for job in jobs
        ]
    }


def github_outputs(jobs: Sequence[Job]) -> str:
    """Return the lines that a step writes to $GITHUB_OUTPUT.

    `any` lets the job be skipped where the matrix is empty, which GitHub takes for an error.
    """
    matrix = json.dumps(github_matrix(jobs), separators=(",", ":"))
    return f"any={'true' if jobs else 'false'}\nmatrix={matrix}\n"


def gitlab_pipeline(
    jobs: Sequence[Job], file: str, include: str | None = None, *, options: Sequence[str] = ()
) -> dict[str, Any]:
    """Return a child pipeline, JSON being YAML; one without work has a job that says so, for GitLab wants one.

    file, options : the fleet file, and more words, as the jobs give them to `plansmith fleet build`
    include : a file of the repository with a hidden job ".plansmith" that every job extends: its image, its variables
    """
    pipeline: dict[str, Any] = {"stages": ["build"]}
    common: dict[str, Any] = {"stage": "build"}
    if include is not None:
        pipeline["include"] = [{"local": include}]
        common["extends"] = ".plansmith"
    if not jobs:
        return {**pipeline, _IDLE: {"stage": "build", "script": ["echo 'all engines are current'"]}}
    for job in jobs:
        command = shlex.join(["plansmith", "fleet", "build", "--file", file, "--only", job.only, *options])
        tags: Mapping[str, Any] = {"tags": list(job.runner)} if job.runner else {}
        variables = {
            "FLEET_UNITS": job.only
        }  # so that what .plansmith does before can fetch their checkpoints alone
        pipeline[job.name] = {**common, **tags, "variables": variables, "script": [command]}
    return pipeline


def _runner(step: Step) -> tuple[str, ...]:
    """Return the labels of a unit's runner."""
    unit = step.unit
    if unit.buildable.state == "refused":
        raise UnsupportedError(
            f"{unit.name} cannot be built anywhere: {unit.buildable.why}; or leave it out of the fleet, with the "
            "combinations that there are under engines"
        )
    if unit.buildable.state == "gpu" and not step.runner:
        raise InvalidArgumentError(
            f"{unit.name} has to be built on {unit.buildable.needs}, and no runner is named for it; add e.g. "
            f"{unit.target.sm[0]}: [self-hosted, {unit.target.sm[0]}] under runners"
        )
    return step.runner


def _allot(sizes: Mapping[tuple[str, ...], int], max_jobs: int) -> dict[tuple[str, ...], int]:
    """Return how many jobs each runner gets: one at least, the rest to whose jobs are the longest."""
    counts = dict.fromkeys(sizes, 1)
    for _ in range(max_jobs - len(sizes)):
        longest = max(sizes, key=lambda runner: sizes[runner] / counts[runner])
        counts[longest] += 1
    return counts
