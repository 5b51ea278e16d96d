"""A tiny engine for the commands that run one, and the command line in this process."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path

import pytest


@dataclasses.dataclass(frozen=True)
class Outcome:
    """What a command left: exit status, standard output, standard error."""

    status: int
    out: str
    err: str


@pytest.fixture(scope="session")
def engine_dir(tiny_checkpoint: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the engine directory of the tiny llama; do not change the files."""
    from tiny_engines import build_tiny

    return build_tiny(tiny_checkpoint("llama"), tmp_path_factory.mktemp("engine") / "llama")


@pytest.fixture
def plansmith(capsys: pytest.CaptureFixture[str]) -> Callable[..., Outcome]:
    """Return a function that runs the command line and gives its outcome."""
    from plansmith.cli import main

    def run(*arguments: object) -> Outcome:
        capsys.readouterr()
        with pytest.raises(SystemExit) as exit_:
            main([str(argument) for argument in arguments])
        out, err = capsys.readouterr()
        code = exit_.value.code
        return Outcome(code if isinstance(code, int) else int(code is not None), out, err)

    return run
