"""plansmith warm: files in memory before a server comes, kept there, and what is refused."""

from __future__ import annotations

import ctypes
import json
import os
import resource
import select
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from plansmith.cli._warming import open_files
from plansmith.runtime.errors import OutOfMemoryError
from plansmith.runtime.page_cache import MappedFile, check_system

Run = Callable[..., Any]

pytestmark = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="the page cache of Linux")


@pytest.fixture
def copy(engine_dir: Path, tmp_path: Path) -> Path:
    """Return a copy of the tiny engine, to be evicted and damaged."""
    return shutil.copytree(engine_dir, tmp_path / "copy")


def plan_of(engine: Path) -> Path:
    return engine / "targets" / "cpu" / "model.plan"


def resident(path: Path) -> int:
    with MappedFile(path) as file:
        there = file.resident_bytes()
    assert there is not None
    return there


def evict(path: Path) -> None:
    """Have a file leave the page cache; skips the test where its file system is memory itself."""
    with path.open("rb") as file:
        os.fsync(file.fileno())
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    if resident(path) > path.stat().st_size // 2:
        pytest.skip("this file system does not let its pages go")


def report(result: Any) -> dict[str, Any]:
    assert result.status == 0, result.err
    (one,) = json.loads(result.out)["engines"]
    loaded: dict[str, Any] = one
    return loaded


def test_files_are_in_memory_afterwards(plansmith: Run, copy: Path) -> None:
    evict(plan_of(copy))
    size = plan_of(copy).stat().st_size
    first = report(plansmith("warm", copy, "--json"))
    assert resident(plan_of(copy)) == size
    assert first["target"] == "cpu" and first["bytes"] > size
    assert first["resident_before_bytes"] <= first["bytes"] - size // 2 and first["bytes_per_s"] > 0
    again = report(plansmith("warm", copy, "--json"))
    assert again["resident_before_bytes"] == again["bytes"] == first["bytes"] and again["bytes_per_s"] is None
    assert "all of it was there already" in plansmith("warm", copy).out


def test_several_engines_and_a_draft(plansmith: Run, engine_dir: Path, copy: Path) -> None:
    result = plansmith("warm", engine_dir, copy, "--draft", copy, "--json")
    one, other = json.loads(result.out)["engines"]
    assert one["engine"] == str(engine_dir) and other["engine"] == str(copy)
    without = report(plansmith("warm", copy, "--json"))
    assert other["files"] == without["files"] + 1
    assert other["bytes"] == without["bytes"] + plan_of(copy).stat().st_size


def test_run_opens_the_engine_and_warms_it(plansmith: Run, copy: Path) -> None:
    run = report(plansmith("warm", copy, "--run", "--max-batch-size", "2", "--threads", "1", "--json"))["run"]
    assert run["batch_sizes"] == [1, 2] and run["num_requests"] > 3 and run["num_steps"] > 3
    assert "requests at batch sizes 1, 2 in" in plansmith("warm", copy, "--run", "--max-batch-size", "2").out


def test_what_is_no_engine_or_damaged_is_refused(plansmith: Run, copy: Path, tmp_path: Path) -> None:
    assert "is not an engine directory" in plansmith("warm", tmp_path).err
    assert "has no target 'sm89', only cpu" in plansmith("warm", copy, "--target", "sm89").err
    with plan_of(copy).open("r+b") as file:
        file.seek(-1, os.SEEK_END)
        last = file.read(1)
        file.seek(-1, os.SEEK_END)
        file.write(bytes([last[0] ^ 1]))
    assert plansmith("warm", copy).status == 0  # sizes alone are looked at
    refused = plansmith("warm", copy, "--check-hashes", "--json")
    assert refused.status == 1 and json.loads(refused.out)["error"]["kind"] == "EngineFileError"
    assert "its contents changed after the build" in refused.err
    os.truncate(plan_of(copy), 1000)
    assert "it was cut short or replaced" in plansmith("warm", copy).err


def test_a_file_that_is_cut_while_it_is_read_is_an_error(copy: Path) -> None:
    with open_files([copy], "cpu", None, None, check_hashes=False) as warming:
        os.truncate(plan_of(copy), 4096)
        with pytest.raises(Exception, match=r"has 4096 bytes, it had .* it was cut while it was read"):
            warming.read_in(warming.engines[0])


def test_files_that_would_not_stay_are_refused(copy: Path) -> None:
    with open_files([copy], "auto", None, None, check_hashes=False) as warming:
        warming.check_memory(warming.num_bytes)
        with pytest.raises(
            OutOfMemoryError, match=f"take {warming.num_bytes} bytes, and this .* has 1000 for them"
        ):
            warming.check_memory(1000)
        warming.check_memory()


class Locking:
    """A running `plansmith warm --lock`."""

    def __init__(self, engine: Path, prepare: Callable[[], None] | None = None) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", "plansmith.cli", "warm", str(engine), "--lock", "--json"],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            preexec_fn=prepare,
        )

    def line(self) -> str:
        """Return the line that says that it is locked; "" where it ended instead."""
        assert self._process.stdout is not None
        assert select.select([self._process.stdout], [], [], 60)[0]
        return self._process.stdout.readline()

    def locked_kib(self) -> int:
        """Return what the kernel counts as locked."""
        status = Path(f"/proc/{self._process.pid}/status").read_text()
        return int(next(line for line in status.splitlines() if line.startswith("VmLck:")).split()[1])

    def end(self, number: int | None = None) -> tuple[int, str]:
        """Send a signal, if any, and return the exit code and standard error."""
        if number is not None:
            self._process.send_signal(number)
        _, err = self._process.communicate(timeout=60)
        return self._process.returncode, err

    def kill(self) -> None:
        """End it if it still runs."""
        if self._process.poll() is None:
            self._process.kill()
        self._process.communicate()


@pytest.fixture
def lock(copy: Path) -> Iterator[Callable[..., Locking]]:
    """Return what starts `plansmith warm --lock` on the copy."""
    begun: list[Locking] = []

    def go(prepare: Callable[[], None] | None = None) -> Locking:
        begun.append(Locking(copy, prepare))
        return begun[-1]

    yield go
    for one in begun:
        one.kill()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_locked_files_stay_until_the_signal(lock: Callable[..., Locking], copy: Path, number: int) -> None:
    size = plan_of(copy).stat().st_size
    limit = resource.getrlimit(resource.RLIMIT_MEMLOCK)[1]
    if os.geteuid() != 0 and 0 <= limit < 2 * size:
        pytest.skip("this user may not lock so much")
    process = lock()
    said = json.loads(process.line())
    assert said["locked"] is True and said["bytes"] > size
    assert process.locked_kib() >= said["bytes"] // 1024
    with plan_of(copy).open("rb") as file:
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    assert resident(plan_of(copy)) == size  # it would have gone
    code, err = process.end(number)
    assert code == 0 and err == ""


def _without_the_right() -> None:
    """Lock at most 64 KiB, and lose the capability to lock more at the exec that follows."""
    resource.setrlimit(resource.RLIMIT_MEMLOCK, (65536, 65536))
    drop_from_bounding_set, ipc_lock = 24, 14
    if os.geteuid() == 0:
        assert ctypes.CDLL(None).prctl(drop_from_bounding_set, ipc_lock, 0, 0, 0) == 0


def test_too_low_a_limit_is_told(lock: Callable[..., Locking]) -> None:
    process = lock(_without_the_right)
    assert json.loads(process.line())["error"]["kind"] == "UnsupportedError"
    code, err = process.end()
    assert code == 1
    assert "this process may lock 65536 bytes (RLIMIT_MEMLOCK), and the files take" in err
    assert "capability IPC_LOCK" in err


def test_other_systems_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "platform", "darwin")
    with pytest.raises(Exception, match="on Linux alone, and this is darwin"):
        check_system()


def test_serve_is_warm_before_it_is_ready(engine_dir: Path) -> None:
    words = ["serve", str(engine_dir), "--port", "0", "--threads", "1", "--warm-up", "2"]
    process = subprocess.Popen(
        [sys.executable, "-m", "plansmith.cli", *words], stderr=subprocess.PIPE, text=True
    )
    try:
        assert process.stderr is not None
        assert select.select([process.stderr], [], [], 120)[0]
        lines = [process.stderr.readline(), process.stderr.readline()]
    finally:
        process.terminate()
        _, rest = process.communicate(timeout=60)
    assert lines[0].startswith("plansmith: warm after 6 requests in ")
    assert lines[1].startswith("plansmith: ready, ")
    assert process.returncode == 0, rest
