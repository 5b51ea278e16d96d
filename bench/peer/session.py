"""One engine in a process of its own that is told over stdin what to run, and answers over stdout: both ends.

The child's end is `serve`; it needs the standard library alone, because it runs in the environment of a peer. The
parent's end is `Session`. Lines of JSON:

    parent  {"cmd": "run", "requests": [{"prompt_ids": [..], "output_len": n}, ..]}
            or {"cmd": "version"} or {"cmd": "quit"}
    child   {"load_s": s}, once, then for each run
            {"wall_s", "ttft_s": [..], "end_s": [..], "token_ids": [[..], ..], "peak_rss_bytes", "cpu_s"}
            and for the version {"version": text}; or {"error": text}

All requests of a run are sent to the engine at once, at second 0 of the run. They generate exactly `output_len` tokens,
greedily, whatever tokens come. Times are seconds since then: `ttft_s` when the first token of a request was there,
`end_s` when its last one was.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import select
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

# {"prompt_ids": list of int, "output_len": int}
Request = dict[str, Any]
# record(request index, token ids that are new): the child calls it as soon as it sees them.
Record = Callable[[int, Sequence[int]], None]
# run(requests, record) returns when all requests have ended.
Run = Callable[[list[Request], Record], None]

# ---------------------------------------------------------------- the child


def serve(
    load: Callable[[], Run], version: Callable[[], str], pids: Callable[[], list[int]] | None = None
) -> None:
    """Load an engine by `load()` and run what comes over stdin, until "quit" or the end of stdin.

    version : returns that of the engine that runs; called when it is asked for, so a start does not wait for it
    pids    : whose memory and CPU time count; this process and all below it where None
    What the engine prints to stdout goes to stderr, which the parent writes to the peer's log.
    """
    end_with_parent()
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    count = pids or (lambda: process_tree(os.getpid()))
    begin = time.perf_counter()
    run = load()
    print(json.dumps({"load_s": time.perf_counter() - begin}), file=answers)
    for line in sys.stdin:
        command = json.loads(line)
        if command["cmd"] == "quit":
            break
        try:
            asked = command["cmd"] == "version"
            answer = {"version": version()} if asked else _timed(run, command["requests"], count)
        except Exception as error:  # the parent decides what a failed run means
            traceback.print_exc()
            answer = {"error": f"{type(error).__name__}: {error}"}
        print(json.dumps(answer), file=answers)


def installed(package: str, otherwise: str) -> str:
    """Return the version of an installed package, `otherwise` where its metadata are not there."""
    from importlib import metadata  # asked for once a session has started: not part of its start

    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return otherwise


def _timed(run: Run, requests: list[Request], pids: Callable[[], list[int]]) -> dict[str, Any]:
    ttft_s = [0.0] * len(requests)
    end_s = [0.0] * len(requests)
    token_ids: list[list[int]] = [[] for _ in requests]

    def record(idx: int, ids: Sequence[int]) -> None:
        if not ids:
            return
        now = time.perf_counter() - begin
        if not token_ids[idx]:
            ttft_s[idx] = now
        end_s[idx] = now
        token_ids[idx] += [int(i) for i in ids]

    cpu_s = cpu_seconds(pids())
    begin = time.perf_counter()
    run(requests, record)
    wall_s = time.perf_counter() - begin
    return {
        "wall_s": wall_s,
        "ttft_s": ttft_s,
        "end_s": end_s,
        "token_ids": token_ids,
        "peak_rss_bytes": peak_rss_bytes(pids()),
        "cpu_s": cpu_seconds(pids()) - cpu_s,
    }


def end_with_parent() -> None:
    """Ask Linux to kill this process when its parent ends; also fit as `preexec_fn` of a child's own children."""
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG


def process_tree(pid: int) -> list[int]:
    """Return `pid` and the processes below it."""
    found = [pid]
    with contextlib.suppress(OSError):
        for task in Path(f"/proc/{pid}/task").iterdir():
            for child in (task / "children").read_text().split():
                found += process_tree(int(child))
    return found


def peak_rss_bytes(pids: Sequence[int]) -> int:
    """Return the sum of the processes' largest resident sizes: the kernel's VmHWM, with the mapped pages of files."""
    total = 0
    for pid in pids:
        with contextlib.suppress(OSError):
            for line in Path(f"/proc/{pid}/status").read_text().splitlines():
                if line.startswith("VmHWM:"):
                    total += 1024 * int(line.split()[1])
    return total


def cpu_seconds(pids: Sequence[int]) -> float:
    """Return the CPU time of the processes so far, user and system."""
    ticks = 0
    for pid in pids:
        with contextlib.suppress(OSError):
            fields = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
            ticks += int(fields[11]) + int(fields[12])
    return ticks / os.sysconf("SC_CLK_TCK")


# ---------------------------------------------------------------- the parent


class PeerError(RuntimeError):
    """An engine that did not start, answer in time or run what it was asked to; the text names its log."""


class Session:
    """A child process that runs `command`, in a process group of its own.

    The group is stopped (SIGSTOP) whenever the parent waits for nothing from it, so that an idle engine takes no CPU
    time from the one that is measured, even if its threads spin. One thread may use a session.
    """

    def __init__(self, command: Sequence[str], log: Path, env: Mapping[str, str], timeout_s: float) -> None:
        """Start the child and wait until it is ready; PeerError where it is not within `timeout_s`."""
        self.log = log
        self._buffer = b""
        log.parent.mkdir(parents=True, exist_ok=True)
        begin = time.perf_counter()
        with log.open("ab") as stderr:
            self._process = subprocess.Popen(
                list(command),
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=stderr,
                cwd=Path(__file__).resolve().parent.parent,
                env=dict(env),
                start_new_session=True,
            )
        try:
            self.load_s = float(self._answer(timeout_s)["load_s"])
        except BaseException:
            self.kill()
            raise
        self.start_s = time.perf_counter() - begin

    def run(self, requests: Sequence[Request], timeout_s: float) -> dict[str, Any]:
        """Return the child's answer to a run; PeerError where it fails or takes longer, and then the child is gone."""
        return self._ask({"cmd": "run", "requests": list(requests)}, timeout_s)

    def version(self, timeout_s: float) -> str:
        """Return the version that the engine says it has; raises as `run`."""
        return str(self._ask({"cmd": "version"}, timeout_s)["version"])

    def _ask(self, message: dict[str, Any], timeout_s: float) -> dict[str, Any]:
        try:
            self.wake()
            self._send(message)
            answer = self._answer(timeout_s)
        except BaseException:
            self.kill()
            raise
        self.sleep()
        if "error" in answer:
            raise PeerError(f"{answer['error']}; see {self.log}")
        return answer

    def sleep(self) -> None:
        """Stop the child's processes until the next run."""
        self._signal(signal.SIGSTOP)

    def wake(self) -> None:
        """Let them go on."""
        self._signal(signal.SIGCONT)

    def close(self, timeout_s: float = 10.0) -> None:
        """Ask the child to end, and end it where it does not."""
        try:
            self.wake()
            with contextlib.suppress(PeerError, subprocess.TimeoutExpired):
                self._send({"cmd": "quit"})
                self._process.wait(timeout_s)
        finally:
            self.kill()

    def kill(self) -> None:
        """End all processes of the child's group now."""
        self._signal(signal.SIGKILL)
        self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None:
                with contextlib.suppress(OSError):
                    pipe.close()

    def _signal(self, number: int) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, number)

    def _send(self, message: dict[str, Any]) -> None:
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps(message).encode() + b"\n")
            self._process.stdin.flush()
        except (OSError, ValueError) as error:
            raise PeerError(f"the engine's process has ended; see {self.log}") from error

    def _answer(self, timeout_s: float) -> dict[str, Any]:
        """Return the next line of the child."""
        assert self._process.stdout is not None
        deadline = time.monotonic() + timeout_s
        while b"\n" not in self._buffer:
            left = deadline - time.monotonic()
            if left <= 0 or not select.select([self._process.stdout], [], [], left)[0]:
                raise PeerError(f"no answer within {timeout_s:.0f} s; see {self.log}")
            read = os.read(self._process.stdout.fileno(), 1 << 16)
            if not read:
                raise PeerError(f"the engine's process ended before it answered; see {self.log}")
            self._buffer += read
        line, self._buffer = self._buffer.split(b"\n", 1)
        answer: dict[str, Any] = json.loads(line)
        return answer
