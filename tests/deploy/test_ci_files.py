"""deploy/ci: what linters and schemas say of the files, and that they fit the package, its commands and the docs."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from ci_runner_fleet import CI, ROOT, System, checkpoints, lay_out, places
from packaging.requirements import Requirement
from plansmith.fleet.fleet_file import read_fleet

try:
    import tomllib
except ModuleNotFoundError:  # Python 3.10, where pytest brings it
    import tomli as tomllib

BIN = Path(sys.executable).parent
WORKFLOW = ".github/workflows/fleet.yml"
ACTION = ".github/actions/setup/action.yml"
GITLAB = (".gitlab-ci.yml", ".gitlab/plansmith-jobs.yml")


def run(*words: str | Path, cwd: Path) -> subprocess.CompletedProcess[str]:
    """Run a program and return what it printed, both streams together."""
    return subprocess.run(
        words, cwd=cwd, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=60, check=False
    )


def schema(kind: str, *files: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    """Hold files against the schema of a CI system."""
    return run(BIN / "check-jsonschema", "--builtin-schema", f"vendor.{kind}", *files, cwd=cwd)


@pytest.fixture
def github(tmp_path: Path) -> Path:
    """Return a repository with the files where they go on GitHub."""
    lay_out("github", tmp_path)
    (tmp_path / ".git").mkdir()
    return tmp_path


def test_linter_and_schemas_have_nothing_to_say_of_the_workflow(github: Path) -> None:
    done = run(BIN / "jactionlint", "--no-hints", "--strict-exit", cwd=github)
    assert done.returncode == 0 and done.stdout == "", done.stdout
    for kind, file in (("github-workflows", WORKFLOW), ("github-actions", ACTION)):
        done = schema(kind, file, cwd=github)
        assert done.returncode == 0, done.stdout


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        ("needs.plan.outputs.any", "needs.plan.outputs.many", "many"),
        ("checkpoints: ${{", "checkpoint: ${{", "checkpoint"),
        ("needs: plan\n", "needs: plann\n", "plann"),
    ],
)
def test_the_linter_reads_it(github: Path, old: str, new: str, said: str) -> None:
    path = github / WORKFLOW
    assert old in path.read_text()
    path.write_text(path.read_text().replace(old, new))
    done = run(BIN / "jactionlint", "--no-hints", cwd=github)
    assert done.returncode == 1 and said in done.stdout


def test_gitlabs_schema_has_nothing_to_say(tmp_path: Path) -> None:
    lay_out("gitlab", tmp_path)
    done = schema("gitlab-ci", "--data-transform", "gitlab-ci", *GITLAB, cwd=tmp_path)
    assert done.returncode == 0, done.stdout
    path = tmp_path / GITLAB[0]
    path.write_text(path.read_text().replace("strategy: depend", "strategy: sometimes"))
    assert schema("gitlab-ci", "--data-transform", "gitlab-ci", *GITLAB, cwd=tmp_path).returncode == 1


def test_the_fleet_is_one(tmp_path: Path) -> None:
    done = run(
        BIN / "check-jsonschema",
        "--schemafile",
        ROOT / "fleet" / "schema.json",
        CI / "plansmith.yaml",
        cwd=tmp_path,
    )
    assert done.returncode == 0, done.stdout
    fleet = read_fleet(CI / "plansmith.yaml")
    assert fleet.models.keys() == checkpoints().keys()
    for name, model in fleet.models.items():
        assert model.source.path == CI / "checkpoints" / name
    assert {one.target.name for one in fleet.skus.values()} == {"cpu", "sm89", "sm90"}


def test_actions_are_pinned_and_say_their_version() -> None:
    lines = [
        line
        for name in ("fleet.yml", "setup/action.yml")
        for line in (CI / "github" / name).read_text().splitlines()
        if "uses: " in line and "uses: ./" not in line
    ]
    assert len(lines) >= 8
    for line in lines:
        assert re.search(r"uses: [\w-]+/[\w-]+@[0-9a-f]{40} # v\d+\.\d+\.\d+$", line), line


def test_requirements_fit_the_package() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    known = [Requirement(one) for group in extras.values() for one in group]
    texts = [(CI / name).read_text() for name in ("requirements.txt", "requirements-gpu.txt")]
    lines = [line.partition("#")[0].strip() for text in texts for line in text.splitlines()]
    asked = [Requirement(line) for line in lines if line and not line.startswith("-")]
    assert {"plansmith", "tensorrt-rtx", "tensorrt-cu13"} <= {one.name for one in asked}
    for one in asked:
        (pin,) = one.specifier
        assert pin.operator == "==", one
        assert all(other.specifier.contains(pin.version) for other in known if other.name == one.name), one
        if one.name == "plansmith":
            assert pin.version == project["version"] and one.extras <= extras.keys()


def test_checkpoints_are_downloaded_with_options_that_there_are(tmp_path: Path) -> None:
    script = (CI / "fetch-checkpoints.sh").read_text()
    (command,) = re.findall(r"^  hf download .*?[^\\]\n", script, re.MULTILINE | re.DOTALL)
    known = run(BIN / "hf", "download", "--help", cwd=tmp_path).stdout
    options = re.findall(r"(?<= )--[a-z-]+", command)
    assert {"--revision", "--local-dir", "--include", "--exclude"} == set(options)
    assert all(f"{option} " in known for option in options)


@pytest.mark.parametrize("commit", ["main", "12fd25f", "12fd25f77366fa6b3b4b768ec3050bf629380bac main"])
def test_a_checkpoint_that_moves_is_refused(tmp_path: Path, commit: str) -> None:
    shutil.copy(CI / "fetch-checkpoints.sh", tmp_path)
    (tmp_path / "checkpoints.txt").write_text(f"# model\n\nsmol some/where {commit}\n")
    done = run("bash", "fetch-checkpoints.sh", cwd=tmp_path)
    assert done.returncode == 1
    assert f"smol has '{commit}" in done.stdout and "40 hexadecimal digits" in done.stdout
    assert (
        run("bash", "fetch-checkpoints.sh", "qwen/int8/cpu", cwd=tmp_path).returncode == 1
    )  # read to the end


def test_docs_have_every_file_and_every_setting() -> None:
    docs = (ROOT / "docs" / "ci.md").read_text()
    readme = (CI / "README.md").read_text()
    systems: tuple[System, ...] = ("github", "gitlab")
    for system in systems:
        for name, place in places(system).items():
            assert f"`{name}`" in readme and place in readme, name
    texts = {path: path.read_text() for path in (*CI.glob("github/**/*.yml"), *CI.glob("gitlab/*.yml"))}
    assert len(texts) == 4
    wanted = {one for text in texts.values() for one in re.findall(r"(?:vars|secrets)\.(\w+)", text)}
    wanted |= {one for text in texts.values() for one in re.findall(r"\$\{(FLEET_\w+_ROLE)", text)}
    wanted |= {"PLANSMITH_SIGNING_KEY", "CHECKPOINTS_DIR"}
    assert wanted >= {"FLEET_READ_ROLE", "FLEET_WRITE_ROLE", "FLEET_RUNNER"}
    assert [one for one in sorted(wanted) if f"`{one}`" not in docs] == []


def test_docs_name_every_job() -> None:
    docs = (ROOT / "docs" / "ci.md").read_text()
    jobs = yaml.safe_load((CI / "github" / "fleet.yml").read_text())["jobs"]
    assert [job for job in jobs if f"`{job}`" not in docs] == []
