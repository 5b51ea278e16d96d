"""Deployment files as data: Kubernetes objects, patches, Dockerfiles, and the options that they give to `plansmith`."""

from __future__ import annotations

import copy
import json
import re
import shlex
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).parents[2]
DOCKER = ROOT / "deploy" / "docker"
KUBERNETES = ROOT / "deploy" / "kubernetes"
SERVERS = ("triton", "openai")
Object = dict[str, Any]


def objects(path: Path) -> list[Object]:
    """Return the objects of a file."""
    return [one for one in yaml.safe_load_all(path.read_text(encoding="utf-8")) if one is not None]


def resources(server: str) -> dict[str, list[Object]]:
    """Return what `kubectl apply -k` takes for a server: kind -> objects."""
    folder = KUBERNETES / server
    (listed,) = objects(folder / "kustomization.yaml")
    found: dict[str, list[Object]] = {}
    for name in listed["resources"]:
        for one in objects(folder / name):
            found.setdefault(one["kind"], []).append(one)
    return found


def deployment(server: str) -> Object:
    """Return a server's deployment."""
    (one,) = resources(server)["Deployment"]
    return one


def pod(server: str) -> Object:
    """Return the specification of a server's pods."""
    spec: Object = deployment(server)["spec"]["template"]["spec"]
    return spec


def container(server: str) -> Object:
    """Return a pod's only container."""
    (one,) = pod(server)["containers"]
    found: Object = one
    return found


def patched(base: Any, patch: Any) -> Any:
    """Return an object with a strategic merge patch on it: lists of named things are merged by their names."""
    if isinstance(patch, Mapping) and isinstance(base, Mapping):
        if patch.get("$patch") == "replace":
            return {name: value for name, value in patch.items() if name != "$patch"}
        return {
            **base,
            **{name: patched(base[name], one) if name in base else one for name, one in patch.items()},
        }
    if isinstance(patch, list) and all(isinstance(one, Mapping) and "name" in one for one in (*patch, *base)):
        made = {one["name"]: one for one in copy.deepcopy(base)}
        for one in patch:
            made[one["name"]] = patched(made.get(one["name"], {}), one)
        return list(made.values())
    return patch


def dockerfile(name: str) -> list[tuple[str, str]]:
    """Return a Dockerfile's instructions in order: (word, the rest), lines joined, comments left out."""
    text = (DOCKER / name).read_text(encoding="utf-8")
    text = re.sub(r"^#.*\n", "", text, flags=re.M).replace("\\\n", " ")
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return [(line.split()[0], line.partition(" ")[2].strip()) for line in lines]


def last(name: str, word: str) -> str:
    """Return the last instruction of its kind."""
    return [rest for found, rest in dockerfile(name) if found == word][-1]


_KNOWN: dict[str, frozenset[str]] = {}


def known_options(command: str, environ: Mapping[str, str]) -> frozenset[str]:
    """Return the options that the help of a command names; it is asked once."""
    if command not in _KNOWN:
        words = ["plansmith", *command.split(), "--help"]
        shown = subprocess.run(
            words, env=environ, capture_output=True, text=True, timeout=60, check=True
        ).stdout
        _KNOWN[command] = frozenset(re.findall(r"(--[a-z][a-z-]*)", shown))
    return _KNOWN[command]


def options_of(args: Sequence[str], environ: Mapping[str, str]) -> dict[str, str]:
    """Return the options of `plansmith ARGS` and their values, after asking `--help` that each of them exists."""
    words = (
        [word for one in args for word in one.split("=", 1)]
        if any("=" in one for one in args)
        else list(args)
    )
    command = " ".join(words[: 2 if words[0] == "triton" else 1])
    known = known_options(command, environ)
    found: dict[str, str] = {}
    for at, word in enumerate(words):
        if word.startswith("--"):
            assert word in known, f"plansmith {command} has no {word}"
            follows = words[at + 1 : at + 2]
            found[word] = follows[0] if follows and not follows[0].startswith("--") else ""
    return found


def exec_form(text: str) -> list[str]:
    """Return the words of an instruction in exec form: CMD ["a", "b"]."""
    found = json.loads(text[text.index("[") :])
    assert all(isinstance(one, str) for one in found)
    return list(found)


def seconds(text: str) -> float:
    """Return the seconds of a time like 70s or 1m30s."""
    found = re.fullmatch(r"(?:(\d+)m)?(?:(\d+)s)?", text)
    assert found is not None, text
    return 60 * int(found[1] or 0) + int(found[2] or 0)


def flags_of_instruction(text: str) -> list[str]:
    """Return the options of an instruction, such as HEALTHCHECK --interval=30s."""
    return [word for word in shlex.split(text.partition(" CMD ")[0]) if word.startswith("--")]
