"""What a supervisor is told: options that go to its process as JSON."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ...runtime.errors import InvalidArgumentError


@dataclasses.dataclass(frozen=True)
class SupervisorOptions:
    """Options of `plansmith triton start`; paths are absolute.

    repositories : model repositories
    state_dir : state, lock and logs
    models : those to load; () = all
    environment, tritonserver : where the server is, see TritonInstall.find
    host, http_port, grpc_port, metrics_port : where it listens; port 0 = a free one, kept over restarts
    exit_timeout_s : how long running requests have to end when it stops
    load_timeout_s : how long one model may take to load
    canary_interval_s, canary_timeout_s : how often a model is tried, and how long one try waits
    hang_s : how long a model or the server may be silent, while nothing else comes out of it, before it is ended
    restart_on_dead_stub : start the whole server anew when a model's process dies, not the model alone
    max_restarts, restart_window_s : more restarts than that in that time, and the supervisor gives up
    canaries : model -> inputs to try it with, for models it does not know
    max_request_bytes : of an HTTP body, where the server can limit it
    log_bytes : size at which a log file is put aside; 3 earlier ones are kept
    arguments : further options of tritonserver
    is_foreground : log to standard error instead of files
    """

    repositories: tuple[Path, ...]
    state_dir: Path
    models: tuple[str, ...] = ()
    environment: Path | None = None
    tritonserver: Path | None = None
    host: str = "127.0.0.1"
    http_port: int = 8000
    grpc_port: int = 8001
    metrics_port: int = 8002
    exit_timeout_s: int = 30
    load_timeout_s: float = 600.0
    canary_interval_s: float = 10.0
    canary_timeout_s: float = 10.0
    hang_s: float = 60.0
    restart_on_dead_stub: bool = False
    max_restarts: int = 5
    restart_window_s: float = 600.0
    canaries: Mapping[str, Mapping[str, Any]] = dataclasses.field(default_factory=dict)
    max_request_bytes: int = 256 << 20
    log_bytes: int = 64 << 20
    arguments: tuple[str, ...] = ()
    is_foreground: bool = False

    def to_json(self) -> str:
        """Return the options as JSON, for `from_json` in another process."""
        return json.dumps(dataclasses.asdict(self), default=str)

    @classmethod
    def from_json(cls, text: str) -> SupervisorOptions:
        """Return the options that `to_json` wrote."""
        fields: dict[str, Any] = json.loads(text)
        fields["repositories"] = tuple(Path(one) for one in fields["repositories"])
        for name in ("state_dir", "environment", "tritonserver"):
            fields[name] = Path(fields[name]) if fields[name] is not None else None
        for name in ("models", "arguments"):
            fields[name] = tuple(fields[name])
        return cls(**fields)


def read_canaries(texts: tuple[str, ...]) -> dict[str, dict[str, Any]]:
    """Return model -> inputs, of texts of the form MODEL={"INPUT": value}."""
    found: dict[str, dict[str, Any]] = {}
    for text in texts:
        name, _, inputs = text.partition("=")
        try:
            value = json.loads(inputs)
        except ValueError:
            value = None
        if not name or not isinstance(value, dict):
            raise InvalidArgumentError(
                f"--canary {text!r} is not of the form MODEL={{...}}; write e.g. "
                "--canary 'classifier={\"INPUT\": [1, 2]}'"
            )
        found[name] = value
    return found
