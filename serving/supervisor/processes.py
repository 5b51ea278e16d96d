"""Processes of this machine, from /proc: who they are, whose they are, and how to end a server's."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path

_PROC = Path("/proc")
_SHM = Path("/dev/shm")


@dataclasses.dataclass(frozen=True)
class Process:
    """One process. A pid alone can come again; pid and start_ticks together cannot until the machine restarts.

    state : R, S, D, T, Z ... of proc(5); Z = dead, not yet reaped
    start_ticks : when it started, clock ticks since the machine did
    """

    pid: int
    session: int
    state: str
    start_ticks: int

    @property
    def is_alive(self) -> bool:
        """Whether it was running when it was looked at."""
        return self.state not in ("Z", "X")


def look_up(pid: int) -> Process | None:
    """Return a process, dead ones that are not reaped included; None when there is none."""
    try:
        text = (_PROC / str(pid) / "stat").read_text()
    except (OSError, UnicodeDecodeError):
        return None
    fields = text[text.rindex(")") + 2 :].split()  # the name before it may hold anything
    return Process(pid=pid, state=fields[0], session=int(fields[3]), start_ticks=int(fields[19]))


def is_same(pid: int, start_ticks: int) -> bool:
    """Whether the process that had `pid` when it started at `start_ticks` is still running."""
    found = look_up(pid)
    return found is not None and found.is_alive and found.start_ticks == start_ticks


def send_signal(pid: int, start_ticks: int, number: int) -> bool:
    """Send a signal to the process that had `pid` when it started at `start_ticks`; False when it is gone."""
    with contextlib.suppress(ProcessLookupError):
        if is_same(pid, start_ticks):
            os.kill(pid, number)
            return True
    return False


def all_processes() -> Iterator[Process]:
    """Yield every process that can be seen."""
    for folder in _PROC.iterdir():
        if folder.name.isdigit() and (found := look_up(int(folder.name))) is not None:
            yield found


def command_line(pid: int) -> list[str]:
    """Return a process's words; [] when it is gone or dead."""
    try:
        return [os.fsdecode(word) for word in (_PROC / str(pid) / "cmdline").read_bytes().split(b"\0")[:-1]]
    except OSError:
        return []


def has_environment(pid: int, entry: str) -> bool:
    """Whether a process was started with `entry` ("NAME=text") in its environment."""
    try:
        return os.fsencode(entry) in (_PROC / str(pid) / "environ").read_bytes().split(b"\0")
    except OSError:
        return False


def living_of(entry: str, session: int | None = None) -> list[Process]:
    """Return the living processes that carry `entry` in their environment, of one session where it is given."""
    return [
        one
        for one in all_processes()
        if session in (None, one.session) and one.is_alive and has_environment(one.pid, entry)
    ]


def kill_all(entry: str, wait_s: float = 5.0) -> int:
    """Kill the processes that carry `entry` in their environment, wait for their end, return how many there were."""
    seen: set[int] = set()
    deadline = time.monotonic() + wait_s
    while living := living_of(entry):
        for one in living:
            seen.add(one.pid)
            with contextlib.suppress(ProcessLookupError):
                os.kill(one.pid, signal.SIGKILL)
        if time.monotonic() > deadline:
            break
        time.sleep(0.02)
    return len(seen)


def reap(but: int) -> None:
    """Take the status of dead children: stubs that lost their server, anything when this is process 1.

    but : the pid whose status someone else takes
    """
    with contextlib.suppress(ChildProcessError):
        while (found := os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)) is not None:
            if found.si_pid == but:
                return
            os.waitpid(found.si_pid, 0)


def shm_free_bytes() -> int:
    """Return how much shared memory can still be had."""
    found = os.statvfs(_SHM)
    return found.f_bavail * found.f_frsize


def remove_shared_memory(prefix: str) -> int:
    """Remove the shared memory regions whose names begin with `prefix`, and return how many there were."""
    found = list(_SHM.glob(f"{prefix}*")) if prefix and _SHM.is_dir() else []
    for one in found:
        with contextlib.suppress(FileNotFoundError):
            one.unlink()
    return len(found)
