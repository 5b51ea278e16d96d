"""The runners of the tests themselves: what they make of expressions, rules and files that they do not know."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from ci_runner import Machine, Site
from ci_runner_expressions import condition, evaluate, fill
from ci_runner_github import Event, Github
from ci_runner_gitlab import Event as GitlabEvent
from ci_runner_gitlab import _extended, _holds, _matches

CONTEXTS = {
    "matrix": {"runner": ["self-hosted", "gpu"], "only": "a/b/c"},
    "needs": {"plan": {"result": "success", "outputs": {"any": "true"}}},
    "vars": {},
}


@pytest.mark.parametrize(
    ("expression", "value"),
    [
        ("contains(matrix.runner, 'GPU') && 'with' || 'without'", "with"),
        ("contains(matrix.runner, 'gp') && 'with' || 'without'", "without"),
        ("vars.MISSING || 'ubuntu'", "ubuntu"),
        ("needs.plan.outputs.any == 'true' && needs.plan.result != 'skipped'", True),
        ("!(needs.plan.result == 'Success') || false", False),  # GitHub compares without case
        ("fromJSON('[1, 2]')", [1, 2]),
        ("vars.MISSING == ''", True),
        ("'it''s'", "it's"),
    ],
)
def test_expressions(expression: str, value: Any) -> None:
    assert evaluate(expression, CONTEXTS, {}) == value


@pytest.mark.parametrize(
    "expression", ["secrets.KEY", "format('{0}', 1)", "matrix.only ==", "1 2", "a ? b", "(true"]
)
def test_what_is_not_understood_is_refused(expression: str) -> None:
    with pytest.raises((ValueError, IndexError)):
        evaluate(expression, CONTEXTS, {})


def test_text_around_expressions() -> None:
    assert fill("for ${{ matrix.only }}: ${{ true }}", CONTEXTS, {}) == "for a/b/c: true"
    assert fill("${{ matrix.runner }}", CONTEXTS, {}) == ["self-hosted", "gpu"]


def test_a_condition_asks_for_success_unless_it_asks_itself() -> None:
    functions = {"success": lambda: False, "cancelled": lambda: False}
    assert not condition("needs.plan.outputs.any == 'true'", CONTEXTS, functions)
    assert condition("${{ !cancelled() && needs.plan.outputs.any == 'true' }}", CONTEXTS, functions)
    assert not condition(None, CONTEXTS, functions)


def test_rules() -> None:
    variables = {"CI_PIPELINE_SOURCE": "push", "CI_COMMIT_BRANCH": "main", "CI_DEFAULT_BRANCH": "main"}
    assert _holds('$CI_PIPELINE_SOURCE == "web" || $CI_COMMIT_BRANCH == $CI_DEFAULT_BRANCH', variables)
    assert not _holds(
        '$CI_COMMIT_BRANCH == $CI_DEFAULT_BRANCH && $CI_PIPELINE_SOURCE == "schedule"', variables
    )
    with pytest.raises(AssertionError, match="is not understood"):
        _holds("$CI_COMMIT_TAG =~ /v.*/", variables)
    rules = [{"if": '$CI_PIPELINE_SOURCE == "push"', "changes": ["requirements*.txt"]}]
    assert _matches(rules, GitlabEvent("push", changed=("requirements-gpu.txt",)), variables)
    assert not _matches(rules, GitlabEvent("push", changed=("README.md",)), variables)
    assert not _matches([], GitlabEvent("push"), variables)


def test_jobs_take_over_what_they_extend() -> None:
    document = {
        ".a": {"script": ["a"], "variables": {"X": "1", "Y": "1"}},
        ".b": {"extends": ".a", "variables": {"Y": "2"}},
    }
    job = _extended(document, {"extends": ".b", "script": ["c"]})
    assert job == {"script": ["c"], "variables": {"X": "1", "Y": "2"}}


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("      - uses: actions/checkout@v7", "is not pinned"),
        ("      - run: echo ${{ github.ref }}", "run as code"),
        ("      - run: echo\n        continue-on-error: true", "continue-on-error"),
    ],
)
def test_a_workflow_that_is_not_understood_is_refused(tmp_path: Path, line: str, said: str) -> None:
    site = Site(tmp_path, {"PATH": "/bin:/usr/bin"}, [Machine(frozenset({"any"}))])
    workflow = site.repository / ".github" / "workflows" / "fleet.yml"
    workflow.parent.mkdir(parents=True)
    workflow.write_text(
        "on: {push: }\npermissions: {}\ndefaults: {run: {shell: bash}}\n"
        f"jobs:\n  one:\n    runs-on: any\n    permissions: {{}}\n    steps:\n{line}\n"
    )
    with pytest.raises(AssertionError, match=said):
        Github(site, {}, {}).run(Event("push"))


def test_a_job_stops_at_what_fails(tmp_path: Path) -> None:
    site = Site(tmp_path, {"PATH": "/bin:/usr/bin"}, [])
    place = site.start(Machine(frozenset()))
    assert place.bash("echo one", {})
    assert not place.bash("false | cat\necho two", {})
    assert place.log == "one\n"
