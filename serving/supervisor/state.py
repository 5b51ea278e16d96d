"""What a supervisor writes about itself, for `status`, `stop` and the next `start`."""

from __future__ import annotations

import contextlib
import dataclasses
import fcntl
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from ...runtime.errors import InvalidArgumentError, UnsupportedError
from . import processes

_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


def default_state_dir(repository: Path) -> Path:
    """Return where the supervisor of a repository keeps its state: beside it."""
    absolute = repository.absolute()
    return absolute.with_name(f"{absolute.name}.run")


@dataclasses.dataclass
class State:
    """The content of state.json.

    phase : starting, running, healing, draining, stopped or failed
    message : what it does or what went wrong, for people
    supervisor_pid, supervisor_ticks, server_pid, server_ticks : who they are, see processes.Process; 0 = none
    boot_id : of the machine's start that these hold for
    token : in the environment of the server's processes
    models : name -> {"ready", "canary": {"at", "latency_ms", "error"} or None, "heals"}
    restarts, heals : of the server, and of single models, since the start
    started_at, updated_at : seconds since 1970
    """

    phase: str = "starting"
    message: str = ""
    supervisor_pid: int = 0
    supervisor_ticks: int = 0
    server_pid: int = 0
    server_ticks: int = 0
    boot_id: str = ""
    token: str = ""
    repositories: list[str] = dataclasses.field(default_factory=list)
    host: str = ""
    http_port: int = 0
    grpc_port: int = 0
    metrics_port: int = 0
    exit_timeout_s: int = 0
    models: dict[str, dict[str, Any]] = dataclasses.field(default_factory=dict)
    restarts: int = 0
    heals: int = 0
    started_at: float = 0.0
    updated_at: float = 0.0

    @property
    def is_supervised(self) -> bool:
        """Whether the supervisor that wrote this is still running."""
        return self.boot_id == boot_id() and processes.is_same(self.supervisor_pid, self.supervisor_ticks)

    @property
    def has_server(self) -> bool:
        """Whether its server is still running."""
        return self.boot_id == boot_id() and processes.is_same(self.server_pid, self.server_ticks)


def boot_id() -> str:
    """Return what names this start of the machine; process numbers mean nothing after another."""
    try:
        return _BOOT_ID.read_text().strip()
    except OSError:
        return ""


def read_state(folder: Path) -> State | None:
    """Return the state in a folder, or None when no supervisor ever ran there.

    raises : InvalidArgumentError when the file is not what a supervisor writes
    """
    path = folder / "state.json"
    try:
        fields = json.loads(path.read_text(encoding="utf-8"))
        known = {field.name for field in dataclasses.fields(State)}
        return State(**{name: value for name, value in fields.items() if name in known})
    except FileNotFoundError:
        return None
    except (ValueError, TypeError, AttributeError):
        raise InvalidArgumentError(
            f"{path} is damaged; end the server by hand if one runs, and remove the file"
        ) from None


def write_state(folder: Path, state: State) -> None:
    """Write the state so that a reader sees the old one or the new one, whole."""
    path = folder / "state.json"
    draft = path.with_name(f".state.{os.getpid()}")
    draft.write_text(json.dumps(dataclasses.asdict(state), indent=1), encoding="utf-8")
    draft.replace(path)


@contextlib.contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Hold the folder for this process; the system lets go when it ends, however it ends.

    raises : UnsupportedError when another process holds it, or the folder cannot be written
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        file = (folder / "lock").open("a")
    except OSError as error:
        raise UnsupportedError(
            f"{folder} cannot be written ({error.strerror}); name another place with --state-dir"
        ) from None
    with file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise UnsupportedError(
                f"a supervisor is already running with {folder}; see `plansmith triton status`, or give another "
                "--state-dir for a second server"
            ) from None
        yield
