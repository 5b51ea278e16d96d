"""Directories for the time being: gone behind the block, and after a kill with the next one."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
from plansmith.builder.scratch import MARKER, YOUNG_SECONDS, scratch_directory

HOLD = """
import sys
from plansmith.builder.scratch import scratch_directory

with scratch_directory("held") as folder:
    (folder / "model.plan").write_bytes(b"x")
    print(folder, flush=True)
    sys.stdin.read()
"""


@pytest.fixture(autouse=True)
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Let temporary directories go below tmp_path, in processes that are started as well."""
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr(tempfile, "tempdir", None)
    return tmp_path


def _age(folder: Path) -> None:
    then = folder.stat().st_mtime - 2 * YOUNG_SECONDS
    os.utime(folder, (then, then))


def test_it_is_gone_behind_the_block(place: Path) -> None:
    with pytest.raises(KeyError), scratch_directory("one") as folder:
        (folder / "model.plan").write_bytes(b"x")
        assert folder.parent == place and folder.name.startswith("plansmith-one-")
        raise KeyError
    assert list(place.iterdir()) == []


def test_what_a_killed_process_left_is_removed_and_what_one_holds_is_not(place: Path) -> None:
    held = subprocess.Popen(
        [sys.executable, "-c", HOLD], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert held.stdout is not None
    folder = Path(held.stdout.readline().strip())
    _age(folder)
    with scratch_directory("two"):
        assert (folder / "model.plan").is_file()
    held.send_signal(signal.SIGKILL)
    held.communicate()
    assert folder.is_dir()
    with scratch_directory("two"):
        assert not folder.exists()


KILLED = """
import os, shutil, signal
from plansmith.builder.scratch import scratch_directory

def killed(path, **options):
    os.kill(os.getpid(), signal.SIGKILL)

with scratch_directory("killed") as folder:
    for name in ("a", "b"):
        (folder / name).mkdir()
        (folder / name / "model.plan").write_bytes(b"x")
    shutil.rmtree = killed
"""


def test_what_is_killed_while_it_removes_is_removed_later(place: Path) -> None:
    """Its marker is the last to go."""
    done = subprocess.run([sys.executable, "-c", KILLED], check=False)
    assert done.returncode == -signal.SIGKILL
    (left,) = place.iterdir()
    assert (left / MARKER).is_file() and len(list(left.glob("*/model.plan"))) == 2
    _age(left)
    with scratch_directory("next"):
        assert not left.exists()


@pytest.mark.parametrize("case", ["gone", "stays"])
def test_what_cannot_be_removed_ends_nothing(place: Path, monkeypatch: pytest.MonkeyPatch, case: str) -> None:
    """Whatever happened in the block is what is told; what stays is removed by the next who comes."""
    with pytest.raises(KeyError), scratch_directory("one") as folder:
        (folder / "model.plan").write_bytes(b"x")
        if case == "gone":
            shutil.rmtree(folder)
        else:
            monkeypatch.setattr(Path, "unlink", _refuses)
        raise KeyError
    monkeypatch.undo()
    monkeypatch.setenv("TMPDIR", str(place))
    monkeypatch.setattr(tempfile, "tempdir", None)
    if case == "stays":
        assert {path.name for path in folder.iterdir()} == {MARKER, "model.plan"}
        _age(folder)
    with scratch_directory("next"):
        assert not folder.exists()


def _refuses(*_: object, **__: object) -> None:
    raise OSError("busy")


def test_other_directories_stay(place: Path) -> None:
    users, young = place / "plansmith-my-models", place / "plansmith-eval-young"
    for folder in (users, young):
        folder.mkdir()
    (users / "model.plan").write_bytes(b"x")
    (young / MARKER).touch()
    _age(users)
    with scratch_directory("three"):
        assert (users / "model.plan").is_file() and young.is_dir()
