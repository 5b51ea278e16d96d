"""Supervisors of a real tritonserver, driven through the command line as users do."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from plansmith.serving.supervisor import processes
from plansmith.serving.supervisor.api import TritonApi
from tiny_triton import make_repository
from triton_servers import find_install


@dataclasses.dataclass
class Commands:
    """`plansmith triton` over one repository."""

    repository: Path
    environ: dict[str, str]

    @property
    def state_dir(self) -> Path:
        """Where state and logs are."""
        return self.repository.with_name(f"{self.repository.name}.run")

    def run(self, command: str, *options: str) -> subprocess.CompletedProcess[str]:
        """Run a command to its end."""
        words = [sys.executable, "-m", "plansmith.cli", "triton", command, str(self.repository), *options]
        return subprocess.run(
            words, env=self.environ, capture_output=True, text=True, timeout=90, check=False
        )

    def start(self, *options: str) -> subprocess.CompletedProcess[str]:
        """Start on free ports with quick canaries; `options` come after."""
        return self.run("start", *START, *options)

    def state(self) -> dict[str, Any]:
        """Return what `status --json` says."""
        found: dict[str, Any] = json.loads(self.run("status", "--json").stdout)
        return found

    def api(self) -> TritonApi:
        """Return calls to the server."""
        state = json.loads((self.state_dir / "state.json").read_text())
        return TritonApi("127.0.0.1", state["http_port"], state["metrics_port"])

    def wait_for(self, wanted: Callable[[dict[str, Any]], bool], timeout_s: float = 30.0) -> dict[str, Any]:
        """Return the first state that is as wanted."""
        deadline = time.monotonic() + timeout_s
        while True:
            with contextlib.suppress(FileNotFoundError):
                state: dict[str, Any] = json.loads((self.state_dir / "state.json").read_text())
                if wanted(state):
                    return state
            assert time.monotonic() < deadline, f"{state}\n{self.log()}"
            time.sleep(0.05)

    def stub_pids(self) -> list[int]:
        """Return the pids of the living processes of the model `counter`."""
        model = str(self.repository / "counter")
        return [one.pid for one in self.living() if model in "".join(processes.command_line(one.pid)[1:2])]

    def living(self) -> list[processes.Process]:
        """Return the living processes of the server."""
        token = json.loads((self.state_dir / "state.json").read_text())["token"]
        return processes.living_of(f"PLANSMITH_TRITON_RUN={token}")

    def log(self) -> str:
        """Return both logs."""
        logs = [self.state_dir / name for name in ("supervisor.log", "triton.log")]
        return "\n".join(one.read_text(errors="replace")[-6000:] for one in logs if one.exists())


START = (
    *("--http-port", "0", "--grpc-port", "0", "--metrics-port", "0"),
    *("--canary", 'counter={"COUNT": 1}', "--canary-interval", "0.3", "--canary-timeout", "1"),
    *("--hang-after", "2.5", "--exit-timeout", "5"),
)


@pytest.fixture
def triton(tmp_path: Path) -> Iterator[Commands]:
    """Return the commands over a repository of tests/tiny_triton.py; ends what a test leaves running."""
    environment = find_install().python.parent.parent
    environ = {**os.environ, "PLANSMITH_TRITON_ENV": str(environment)}
    commands = Commands(make_repository(tmp_path / "models"), environ)
    yield commands
    if (commands.state_dir / "state.json").exists():
        state = json.loads((commands.state_dir / "state.json").read_text())
        if processes.is_same(state["supervisor_pid"], state["supervisor_ticks"]):
            os.kill(state["supervisor_pid"], signal.SIGKILL)
        prefix, token = f"plansmith{state['token']}", f"PLANSMITH_TRITON_RUN={state['token']}"
        left = processes.kill_all(token), processes.remove_shared_memory(prefix)
        assert state["phase"] not in ("stopped", "failed") or left == (0, 0), (
            "processes or shared memory were left"
        )
