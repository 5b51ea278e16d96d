"""What the tests of docs and deployment files share: a command line of this plansmith, tiny checkpoints' engines."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
for folder in ("tools", "tests/serving/repository", "tests/deploy"):
    sys.path.insert(0, str(ROOT / folder))


@pytest.fixture(scope="session")
def command_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with the command `plansmith`: the one of these tests, whichever is installed."""
    folder = tmp_path_factory.mktemp("bin")
    program = folder / "plansmith"
    program.write_text(f'#!/bin/sh\nexec "{sys.executable}" -m plansmith.cli "$@"\n')
    program.chmod(0o755)
    return folder


@pytest.fixture(scope="session")
def environ(command_dir: Path) -> dict[str, str]:
    """Return the environment of processes that call `plansmith`."""
    return {
        **os.environ,
        "PATH": f"{command_dir}{os.pathsep}{os.environ['PATH']}",
        "OMP_NUM_THREADS": "1",
        "HF_HUB_OFFLINE": "1",
        "TOKENIZERS_PARALLELISM": "false",
        "COLUMNS": "200",
    }


@pytest.fixture(scope="session")
def engine_dir(tiny_checkpoint: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the engine directory of the tiny llama; do not change the files."""
    from tiny_engines import build_tiny

    return build_tiny(tiny_checkpoint("llama"), tmp_path_factory.mktemp("engine") / "llama")
