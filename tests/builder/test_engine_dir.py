"""An engine directory is there whole or not at all: kills, full disks, two builds at once."""

from __future__ import annotations

import errno
import os
import pathlib
import signal
import subprocess
import sys
import textwrap
import time

import pytest
from plansmith.builder import engine_dir
from plansmith.runtime.errors import BuildError, InvalidArgumentError, OutOfMemoryError
from plansmith.runtime.manifest import MANIFEST_NAME


def write(out: pathlib.Path, text: str) -> None:
    with engine_dir.replacing(out) as work:
        (work.path / MANIFEST_NAME).write_text(text)
        (work.path / "targets").mkdir()
        (work.path / "targets" / "plan").write_text(text)


def test_keep_old(tmp_path: pathlib.Path) -> None:
    out = tmp_path / "engine"
    write(out, "1")
    with engine_dir.replacing(out) as work:
        (work.path / MANIFEST_NAME).write_text("2")
        work.keep_old()
    assert (out / MANIFEST_NAME).read_text() == "1"
    assert litter(out) == []


def litter(out: pathlib.Path) -> list[str]:
    return [path.name for path in out.parent.iterdir() if path != out]


def test_new_then_replaced(tmp_path: pathlib.Path) -> None:
    out = tmp_path / "deep" / "engine"
    write(out, "1")
    assert (out / "targets" / "plan").read_text() == "1"
    reader = (out / "targets" / "plan").open()
    write(out, "2")
    assert (out / "targets" / "plan").read_text() == "2"
    assert reader.read() == "1"  # who has it open keeps it
    assert litter(out) == []


def test_replaced_without_exchange(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine_dir, "_exchange", lambda one, two: False)
    out = tmp_path / "engine"
    write(out, "1")
    write(out, "2")
    assert (out / MANIFEST_NAME).read_text() == "2"
    assert litter(out) == []


def test_killed_between_two_renames_is_mended(tmp_path: pathlib.Path) -> None:
    out = tmp_path / "engine"
    write(out, "1")
    out.rename(tmp_path / ".engine.plansmith-old")
    with pytest.raises(RuntimeError, match="stop"), engine_dir.replacing(out):
        raise RuntimeError("stop")
    assert (out / MANIFEST_NAME).read_text() == "1"


def test_error_leaves_the_old_one(tmp_path: pathlib.Path) -> None:
    out = tmp_path / "engine"
    write(out, "1")
    with pytest.raises(KeyError), engine_dir.replacing(out) as work:
        (work.path / MANIFEST_NAME).write_text("2")
        raise KeyError("a failing target")
    assert (out / MANIFEST_NAME).read_text() == "1"
    assert litter(out) == []


def test_what_is_no_engine_is_never_replaced(tmp_path: pathlib.Path) -> None:
    (tmp_path / "thesis.tex").write_text("years of work")
    with pytest.raises(InvalidArgumentError, match="holds files but no manifest"):
        write(tmp_path, "1")
    with pytest.raises(InvalidArgumentError, match="is a file"):
        write(tmp_path / "thesis.tex", "1")
    assert (tmp_path / "thesis.tex").read_text() == "years of work"
    with pytest.raises(InvalidArgumentError, match=r"mount point.*inside it"):
        write(pathlib.Path("/dev/shm" if os.path.ismount("/dev/shm") else "/"), "1")
    with pytest.raises(InvalidArgumentError, match="is no directory"):
        write(tmp_path / "thesis.tex" / "below" / "engine", "1")


def test_a_link_keeps_pointing(tmp_path: pathlib.Path) -> None:
    write(tmp_path / "v1", "1")
    (tmp_path / "current").symlink_to("v1")
    write(tmp_path / "current", "2")
    assert (tmp_path / "current").is_symlink()
    assert (tmp_path / "v1" / MANIFEST_NAME).read_text() == "2"


def test_two_builds_at_once(tmp_path: pathlib.Path) -> None:
    out = tmp_path / "engine"
    with engine_dir.replacing(out) as work:
        (work.path / MANIFEST_NAME).write_text("1")
        with pytest.raises(BuildError, match=f"another build .process {os.getpid()}. is writing"):
            write(out, "2")
        write(tmp_path / "other", "3")
    assert (out / MANIFEST_NAME).read_text() == "1"


def test_free_space_is_checked_first(tmp_path: pathlib.Path) -> None:
    refused = pytest.raises(OutOfMemoryError, match=r"1000000000000 MB needed.*MB free .checked before")
    with refused, engine_dir.replacing(tmp_path / "engine") as work:
        work.reserve(10**18)
    assert list(tmp_path.iterdir()) == []


KILLED = """
import sys, pathlib
from plansmith.builder import engine_dir
out = pathlib.Path(sys.argv[1])
while True:
    with engine_dir.replacing(out) as work:
        (work.path / "targets").mkdir()
        for n in range(20):
            (work.path / "targets" / str(n)).write_bytes(b"x" * 5000)
        (work.path / "manifest.json").write_text("20")
    print("done", flush=True)
"""


def test_kill_at_random_moments(tmp_path: pathlib.Path) -> None:
    """After each kill: a whole engine or none, and the next build clears the rest."""
    out = tmp_path / "engine"
    for n in range(12):
        child = subprocess.Popen([sys.executable, "-c", KILLED, str(out)], stdout=subprocess.PIPE)
        assert child.stdout is not None
        child.stdout.readline()
        time.sleep(0.0037 * n)
        child.send_signal(signal.SIGKILL)
        child.wait()
        child.stdout.close()
        assert len(list((out / "targets").iterdir())) == 20
        assert (out / MANIFEST_NAME).read_text() == "20"
    write(out, "after")
    assert (out / MANIFEST_NAME).read_text() == "after"
    assert litter(out) == []


FULL = """
import resource, sys, pathlib
from plansmith.builder import engine_dir
from plansmith.runtime.errors import OutOfMemoryError
out = pathlib.Path(sys.argv[1])
if len(sys.argv) > 2:
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000))
try:
    with engine_dir.replacing(out) as work:
        work.reserve(1000)
        (work.path / "manifest.json").write_text("{}")
        (work.path / "plan").write_bytes(b"x" * 8_000_000)
except OutOfMemoryError as error:
    print("refused:", error)
"""


def run_full(out: pathlib.Path, *arguments: str) -> str:
    done = subprocess.run(
        [sys.executable, "-c", FULL, str(out), *arguments], capture_output=True, text=True, check=True
    )
    return done.stdout


def test_file_too_large(tmp_path: pathlib.Path) -> None:
    assert "does not fit on the disk" in run_full(tmp_path / "engine", "limited")
    assert list(tmp_path.iterdir()) == []


def test_disk_full(tmp_path: pathlib.Path) -> None:
    mount = ["mount", "-t", "tmpfs", "-o", "size=2m", "tmpfs", str(tmp_path)]
    if os.geteuid() != 0 or subprocess.run(mount, capture_output=True).returncode != 0:
        pytest.skip("mounting a small disk takes root; test_file_too_large checks the same path")
    try:
        text = run_full(tmp_path / "engine")
        assert "0 MB needed" in text and "No space left" in text
        assert list(tmp_path.iterdir()) == []
    finally:
        subprocess.run(["umount", str(tmp_path)], check=True)


def test_no_room_for_the_lock(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "pwrite", full)
    with pytest.raises(OutOfMemoryError, match="MB free"):
        write(tmp_path / "engine", "1")
    assert list(tmp_path.iterdir()) == []


def test_parents_are_made_for_a_whole_engine_only(tmp_path: pathlib.Path) -> None:
    (tmp_path / "a").mkdir()
    out = tmp_path / "a" / "b" / "c" / "engine"
    with pytest.raises(KeyboardInterrupt), engine_dir.replacing(out):
        raise KeyboardInterrupt
    assert list((tmp_path / "a").iterdir()) == []
    with pytest.raises(BuildError), engine_dir.replacing(out):
        (out.parent / "engine.sm89.log").write_text("kept")
        raise BuildError("no")
    assert [path.name for path in out.parent.iterdir()] == ["engine.sm89.log"]
    write(out, "1")
    assert out.is_dir()


def test_destinations_that_lead_nowhere(tmp_path: pathlib.Path) -> None:
    loop, file = tmp_path / "loop", tmp_path / "file"
    loop.symlink_to(loop)
    file.write_text("x")
    for out, words in (
        (loop, "leads to itself"),
        (loop / "engine", "loop is no directory"),
        (file / "engine", "file is no directory"),
        (tmp_path / "\udcff", "is not UTF-8"),
        (tmp_path / ("x" * 300), "File name too long"),
        (tmp_path / ("x" * 250), "files beside it have longer ones"),
        (pathlib.Path("/proc/engine"), "/proc cannot be written to"),
    ):
        with pytest.raises(InvalidArgumentError, match=words):
            engine_dir.destination(out)


def test_carry_over(tmp_path: pathlib.Path) -> None:
    old, new = tmp_path / "old", tmp_path / "new"
    (old / "targets").mkdir(parents=True)
    new.mkdir()
    (old / "targets" / "plan").write_text("data")
    entry = engine_dir.describe_file(old, old / "targets" / "plan")
    assert (entry.path, entry.size) == ("targets/plan", 4)
    engine_dir.carry_over(entry.path, old, new)
    assert (new / "targets" / "plan").read_text() == "data"


def test_sources_are_importable_by_children() -> None:
    """The children above must run this plansmith."""
    code = textwrap.dedent("import plansmith.builder.engine_dir as e; print(e.__file__)")
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert pathlib.Path(done.stdout.strip()).samefile(engine_dir.__file__)
