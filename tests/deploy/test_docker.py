"""deploy/docker: what hadolint says of the Dockerfiles, and that they fit the package and the command line."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import yaml

try:
    import tomllib
except ModuleNotFoundError:  # Python 3.10, where pytest brings it
    import tomli as tomllib
from manifests import (
    DOCKER,
    ROOT,
    container,
    dockerfile,
    exec_form,
    flags_of_instruction,
    last,
    options_of,
    seconds,
)

FILES = ("Dockerfile.triton", "Dockerfile.serve")
_PODS = {"Dockerfile.triton": "triton", "Dockerfile.serve": "openai"}


@pytest.mark.parametrize("name", FILES)
def test_hadolint_has_nothing_to_say(name: str) -> None:
    program = Path(sys.executable).parent / "hadolint"
    done = subprocess.run([program, DOCKER / name], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("name", FILES)
def test_images_are_pinned_and_nobody_is_root(name: str) -> None:
    found = dockerfile(name)
    assert found[0][0] == "ARG"
    variable, _, image = found[0][1].partition("=")
    assert image.rpartition(":")[2] not in ("", "latest") and ":" in image
    bases = [rest.split()[0] for word, rest in found if word == "FROM"]
    assert set(bases) == {f"${{{variable}}}"}
    user = last(name, "USER").partition(":")[0]
    assert user.isdigit() and int(user) > 0
    behind = [word for word, _ in found[[word for word, _ in found].index("USER") :]]
    assert "RUN" not in behind and "COPY" not in behind


@pytest.mark.parametrize("name", FILES)
def test_commands_have_the_options_that_there_are(name: str, environ: dict[str, str]) -> None:
    assert exec_form(last(name, "ENTRYPOINT")) == ["plansmith"]
    options = options_of(exec_form(last(name, "CMD")), environ)
    assert options["--host"] == "0.0.0.0"
    pod = options_of(container(_PODS[name])["args"], environ)
    assert options.items() <= pod.items(), "the pods say otherwise"
    exposed = {int(one) for one in last(name, "EXPOSE").split()}
    assert exposed == {one["containerPort"] for one in container(_PODS[name])["ports"]}
    check = last(name, "HEALTHCHECK")
    assert {one.partition("=")[0] for one in flags_of_instruction(check)} == {
        "--interval", "--timeout", "--start-period", "--retries",
    }  # fmt: skip
    words = exec_form(check)
    if words[0] == "plansmith":
        assert options_of(words[1:], environ)["--state-dir"] == options["--state-dir"]
        assert words[3] == exec_form(last(name, "CMD"))[2]


@pytest.mark.parametrize("name", FILES)
def test_the_context_has_what_the_wheel_is_made_of(name: str) -> None:
    lines = (DOCKER / f"{name}.dockerignore").read_text().splitlines()
    assert "*" in lines
    allowed = {line[1:] for line in lines if line.startswith("!")}
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    wanted = set(project["tool"]["scikit-build"]["wheel"]["packages"].values())
    wanted |= {
        project["project"]["readme"],
        *project["project"]["license-files"],
        "CMakeLists.txt",
        "pyproject.toml",
    }
    assert allowed == wanted
    assert all((ROOT / one).exists() for one in allowed)


@pytest.mark.parametrize("name", FILES)
def test_the_extras_exist(name: str) -> None:
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    (install,) = [rest for word, rest in dockerfile(name) if word == "RUN" and "pip install" in rest]
    asked = install.partition(".whl)[")[2].partition("]")[0].split(",")
    assert asked[0] and set(asked) <= extras.keys()


def test_compose_is_as_locked_up_and_waits_for_drains(environ: dict[str, str]) -> None:
    content = yaml.safe_load((DOCKER / "compose.yaml").read_text())
    assert content["services"].keys() == {"triton", "serve"}
    for name, service in content["services"].items():
        file = (DOCKER / service["build"]["context"] / service["build"]["dockerfile"]).resolve()
        assert file.is_file() and (DOCKER / service["build"]["context"]).resolve() == ROOT
        options = options_of(exec_form(last(file.name, "CMD")), environ)
        drain_s = float(options.get("--exit-timeout") or options["--drain-seconds"])
        assert seconds(service["stop_grace_period"]) >= drain_s + 5
        assert service["read_only"] and service["cap_drop"] == ["ALL"]
        assert service["security_opt"] == ["no-new-privileges:true"]
        assert service["volumes"][0].endswith(":/models:ro")
        assert all(one.startswith("127.0.0.1:") for one in service["ports"])
        assert not service["image"].endswith(":latest")
        writable = {one.partition(":")[0] for one in service["tmpfs"]}
        assert writable == ({"/tmp", options["--state-dir"]} if name == "triton" else {"/tmp"})
