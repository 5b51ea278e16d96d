"""The servers that the serving benchmarks measure, started as a user starts them and drained at the end."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import re
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import common

WORK = common.ROOT / "build" / "bench-serving"
TRITON_ENV = Path(os.environ.get("PLANSMITH_TRITON_ENV") or common.ROOT / ".venv-triton")


@dataclasses.dataclass(frozen=True)
class Server:
    """A running server.

    http_url, metrics_url : "http://127.0.0.1:..."
    grpc_address : "127.0.0.1:..."; None = it has no gRPC
    pid : of the process whose session or group the server is
    """

    name: str
    http_url: str
    metrics_url: str
    grpc_address: str | None
    pid: int

    def resident_bytes(self) -> int:
        """Return the resident memory of the server's process and all its descendants, shared pages once.

        The sum of each one's private memory (Private_* of smaps_rollup) and the largest one's shared memory.
        """
        private, shared = 0, 0
        for pid in _descendants(self.pid):
            fields = _smaps(pid)
            private += fields.get("Private_Clean", 0) + fields.get("Private_Dirty", 0)
            shared = max(shared, fields.get("Shared_Clean", 0) + fields.get("Shared_Dirty", 0))
        return private + shared


def _descendants(root: int) -> list[int]:
    children: dict[int, list[int]] = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            pid, rest = stat.read_text().split(" (", 1)
            parent = int(rest.rsplit(") ", 1)[1].split()[1])
            children.setdefault(parent, []).append(int(pid))
    found, pending = [], [root]
    while pending:
        pid = pending.pop()
        found.append(pid)
        pending += children.get(pid, [])
    return found


def _smaps(pid: int) -> dict[str, int]:
    """Return the fields of a process's smaps_rollup in bytes; {} when it has ended."""
    try:
        text = Path(f"/proc/{pid}/smaps_rollup").read_text()
    except OSError:
        return {}
    return {name: int(kib) * 1024 for name, kib in re.findall(r"^(\w+): +(\d+) kB$", text, re.MULTILINE)}


@contextlib.contextmanager
def triton_server(engine_dir: Path, threads: int, *settings: str) -> Iterator[Server]:
    """Serve an engine by a real tritonserver, under `plansmith triton start`.

    settings : further MODEL.KEY=VALUE of `plansmith triton-repo --set`
    """
    repository, state = WORK / "repository", WORK / "triton"
    WORK.mkdir(parents=True, exist_ok=True)
    write = [*common.PLANSMITH, "triton-repo", str(engine_dir), "-o", str(repository), "--force"]
    for setting in (f"tensorrt_llm.num_threads={threads}", *settings):
        write += ["--set", setting]
    subprocess.run(write, check=True, stdout=sys.stderr)
    folder = ["--state-dir", str(state)]
    start = [*common.PLANSMITH, "triton", "start", str(repository), *folder]
    ports = ["--http-port", "0", "--grpc-port", "0", "--metrics-port", "0"]
    out = subprocess.run(
        [*start, *ports, "--triton-env", str(TRITON_ENV), "--json"],
        check=True,
        stdout=subprocess.PIPE,
        text=True,
    ).stdout
    status = json.loads(out)
    try:
        host = "127.0.0.1"
        yield Server(
            "Triton",
            f"http://{host}:{status['http_port']}",
            f"http://{host}:{status['metrics_port']}/metrics",
            f"{host}:{status['grpc_port']}",
            status["server_pid"],
        )
    finally:
        stop = [*common.PLANSMITH, "triton", "stop", str(repository), *folder]
        subprocess.run(stop, check=True, stdout=sys.stderr)


@contextlib.contextmanager
def openai_server(engine_dir: Path, threads: int) -> Iterator[Server]:
    """Serve an engine by `plansmith serve`."""
    WORK.mkdir(parents=True, exist_ok=True)
    log = WORK / "serve.log"
    command = [*common.PLANSMITH, "serve", str(engine_dir), "--port", "0", "--threads", str(threads)]
    command += ["--served-model-name", "default"]
    with log.open("w") as output:
        child = subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT)
    try:
        url = _ready_url(child, log)
        yield Server("plansmith serve", url, f"{url}/metrics", None, child.pid)
    finally:
        child.send_signal(signal.SIGTERM)
        if child.wait(60) != 0:
            raise SystemExit(f"plansmith serve ended with {child.returncode}; see {log}")


def _ready_url(child: subprocess.Popen[bytes], log: Path) -> str:
    """Return the address that the server printed, once it answers."""
    for _ in range(600):
        found = re.search(r"http://127\.0\.0\.1:\d+", log.read_text())
        if found:
            with contextlib.suppress(OSError), urllib.request.urlopen(f"{found[0]}/health/ready", timeout=5):
                return found[0]
        if child.poll() is not None:
            break
        time.sleep(0.1)
    raise SystemExit(f"plansmith serve did not start: {log.read_text()[-2000:]}")
