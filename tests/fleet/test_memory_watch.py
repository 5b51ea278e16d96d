"""What a process and those it started hold together."""

from __future__ import annotations

import mmap
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from plansmith.fleet.memory_watch import MemoryWatch, held_bytes, tree_bytes

SIZE = 64 << 20
# Holds memory in a grandchild, and says when it does.
HOLDER = """
import subprocess, sys
if sys.argv[1] == "child":
    held = bytearray(b"x") * {size}
    print("held", flush=True)
    sys.stdin.read()
else:
    subprocess.run([sys.executable, "-c", sys.argv[2], "child"])
"""


@pytest.fixture
def holder() -> Iterator[subprocess.Popen[str]]:
    code = HOLDER.replace("{size}", str(SIZE))
    arguments = [sys.executable, "-c", code, "parent", code]
    with subprocess.Popen(arguments, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "held\n"
        yield process
        process.communicate("")


def test_descendants_count(holder: subprocess.Popen[str]) -> None:
    assert held_bytes(holder.pid) < SIZE
    assert tree_bytes(holder.pid) >= SIZE
    assert tree_bytes(os.getpid()) >= held_bytes(os.getpid()) + SIZE


def test_pages_of_files_do_not_count(tmp_path: Path) -> None:
    with (tmp_path / "large").open("w+b") as file:
        file.write(b"x" * SIZE)
        file.flush()
        with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as mapped:
            before = held_bytes(os.getpid())
            assert sum(mapped[:: mmap.PAGESIZE]) > 0
            assert held_bytes(os.getpid()) < before + SIZE // 2


def test_a_process_that_is_gone() -> None:
    done = subprocess.Popen([sys.executable, "-c", ""])
    done.wait()
    assert held_bytes(done.pid) == 0 and tree_bytes(done.pid) == 0


def test_the_peak_outlives_what_was_held() -> None:
    with MemoryWatch(interval_s=0.001) as watch:
        before = held_bytes(os.getpid())
        held = bytearray(b"x") * SIZE
        deadline = time.monotonic() + 60
        while watch.peak_bytes < before + SIZE // 2 and time.monotonic() < deadline:
            time.sleep(0.001)
        del held
    assert watch.peak_bytes >= before + SIZE // 2
