"""Which models a repository has, in which order they are loaded, and loading them one by one."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

from ...runtime.errors import Error, InvalidArgumentError
from .api import NoAnswer, TritonApi, TritonError

_STEP_MODEL = re.compile(r"\bmodel_name\s*:\s*[\"']([^\"']+)[\"']")
_IS_ENSEMBLE = re.compile(r"\bplatform\s*:\s*[\"']ensemble[\"']|\bensemble_scheduling\b")
_COMMENT = re.compile(r"^((?:[^#\"\n]|\"(?:[^\"\\\n]|\\.)*\")*)#.*$", re.MULTILINE)
# A stub that was starved while it started; the model is fine.
_PASSING_REASONS = ("Stub process", "stub process", "Failed to initialize Python stub", "lock_exception")


class LoadError(Error):
    """A model does not load, and loading it again will not help."""


class StartError(Error):
    """The server ended or went silent while its models were loaded; starting it again may help."""


def load_order(repositories: Iterable[Path], only: Sequence[str] = ()) -> list[str]:
    """Return the models' names: those without others' help first, the engine's foremost, ensembles last.

    only : the models wanted; an ensemble's steps come with it. () = all
    raises : InvalidArgumentError when there is no such folder or model, or a name is in two repositories
    """
    configs: dict[str, str] = {}
    for repository in repositories:
        for name, text in _configs(repository).items():
            if name in configs:
                raise InvalidArgumentError(f"the model {name} is in two repositories; remove one of them")
            configs[name] = text
    missing = [name for name in only if name not in configs]
    if missing or not configs:
        known = ", ".join(sorted(configs)) or "none"
        what = f"no model {missing[0]}" if missing else "no model"
        places = ", ".join(str(one) for one in repositories)
        raise InvalidArgumentError(f"there is {what} in {places}, which has {known}; check the path")
    order: list[str] = []
    wanted = sorted(only or configs, key=_rank)
    for name in sorted(wanted, key=lambda one: bool(steps_of(configs[one]))):
        _add(name, configs, order, ())
    return order


def load_all(
    api: TritonApi, names: Sequence[str], *, timeout_s: float, is_running: Callable[[], bool], tries: int = 3
) -> None:
    """Load models one after another: in parallel, under load, the server may abort.

    timeout_s : that one model may take
    is_running : whether the server's process is there
    raises : LoadError for a model that does not load; StartError when the server ended or does not answer
    """
    for name in names:
        for again in reversed(range(tries)):
            try:
                api.load(name, timeout_s)
                break
            except TritonError as error:
                if not (again and any(one in str(error) for one in _PASSING_REASONS) and is_running()):
                    raise LoadError(f"the model {name} does not load: {_tidy(str(error))}") from None
            except NoAnswer as error:
                ended = "" if is_running() else "; the server ended"
                raise StartError(f"loading the model {name}: {error}{ended}") from None


def touch(repositories: Iterable[Path], name: str) -> bool:
    """Make a model's files newer, so that loading it again does so; False when they cannot be changed."""
    for repository in repositories:
        files = sorted((repository / name).glob("*/model.py"))
        try:
            for file in files:
                file.touch()
        except OSError:
            return False
        if files:
            return True
    return False


def _configs(repository: Path) -> dict[str, str]:
    """Return model -> text of its configuration without comments."""
    if not repository.is_dir():
        raise InvalidArgumentError(f"{repository} is no directory; write one with `plansmith triton-repo`")
    return {
        one.parent.name: _COMMENT.sub(r"\1", one.read_text(encoding="utf-8", errors="replace"))
        for one in repository.glob("*/config.pbtxt")
    }


def _rank(name: str) -> tuple[int, str]:
    """Sort the engine's model first: what takes long or fails should do so at once."""
    return (0 if name == "tensorrt_llm" else 2 if name.endswith("_bls") else 1, name)


def _add(name: str, configs: dict[str, str], order: list[str], outer: tuple[str, ...]) -> None:
    if name in order or name in outer or name not in configs:
        return
    for step in steps_of(configs[name]):
        _add(step, configs, order, (*outer, name))
    order.append(name)


def steps_of(config: str) -> list[str]:
    """Return the models that an ensemble's configuration names; [] for other models."""
    return _STEP_MODEL.findall(config) if _IS_ENSEMBLE.search(config) else []


def _tidy(text: str) -> str:
    """Return an error of the server without the empty ends that it puts around a model's own."""
    return text.strip().removesuffix(";").strip()
