"""A tritonserver as a child: started in a session of its own, drained, and ended with all it left behind."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import signal
import subprocess
import uuid
from collections.abc import Mapping
from pathlib import Path

from . import processes
from .install import TritonInstall
from .ports import Ports

TOKEN_VARIABLE = "PLANSMITH_TRITON_RUN"  # marks the server's processes, which inherit it
KILL_MARGIN_S = 3.0  # beyond the server's own time to exit
_KILL_S = 30.0  # that a killed process may take: one that waits for a device cannot end before
_HTTP_LIMIT_OPTION = "http-max-input-size"  # not in older servers, which have no limit


@dataclasses.dataclass(frozen=True)
class ServerOptions:
    """What a server is started with.

    repositories : model repositories; no model is loaded at the start
    folder : where links to the backends are made, and log_path is
    host : address to listen on
    log_path : the server's output is appended to it; None = it goes where this process's does
    exit_timeout_s : how long running requests have to end, whole seconds
    max_request_bytes : of an HTTP body, where the server has such a limit
    http_threads : threads that serve HTTP; few of them lose events of streams under load
    arguments : further options of tritonserver, as they are
    environ : the environment of server and models
    """

    repositories: tuple[Path, ...]
    folder: Path
    host: str = "127.0.0.1"
    log_path: Path | None = None
    exit_timeout_s: int = 30
    max_request_bytes: int = 256 << 20
    http_threads: int = 8
    arguments: tuple[str, ...] = ()
    environ: Mapping[str, str] = dataclasses.field(default_factory=lambda: dict(os.environ))


class ServerProcess:
    """A running tritonserver. One thread at a time; the process that made it is its parent."""

    def __init__(
        self, child: subprocess.Popen[bytes], ports: Ports, token: str, options: ServerOptions
    ) -> None:
        self._child = child
        self._options = options
        self.ports = ports
        self.token = token
        self.pid = child.pid
        started = processes.look_up(child.pid)
        self.start_ticks = started.start_ticks if started else 0

    @classmethod
    def start(
        cls, install: TritonInstall, ports: Ports, options: ServerOptions, token: str | None = None
    ) -> ServerProcess:
        """Start a server and return it at once; it answers when its ports are open.

        token : of `new_token`, for a caller who writes it down first; its processes are known by it
        """
        token = token or new_token()
        backends = install.link_backends(options.folder / "backends")
        install.compile_models(options.repositories)
        environ = {**install.environ(options.environ), TOKEN_VARIABLE: token}
        words = [str(install.tritonserver), *_flags(install, ports, options, backends, shm_prefix(token))]
        with contextlib.ExitStack() as opened:
            output = None
            if options.log_path is not None:  # appending, so that the file can be cut while it is written
                output = opened.enter_context(options.log_path.open("ab"))
            child = subprocess.Popen(
                words,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT if output is not None else None,
                env=environ,
                start_new_session=True,  # signals of a terminal are ours to handle; one group to end
            )
        return cls(child, ports, token, options)

    def poll(self) -> int | None:
        """Return the exit status, negative for a signal; None while it runs."""
        return self._child.poll()

    def terminate(self) -> None:
        """Ask it to take no new requests, finish the running ones, and exit."""
        if self.poll() is None:
            self._child.send_signal(signal.SIGTERM)

    def wait(self, timeout_s: float) -> int | None:
        """Return the exit status, or None when it still runs after `timeout_s`."""
        try:
            return self._child.wait(timeout_s)
        except subprocess.TimeoutExpired:
            return None

    def stop(self, exit_timeout_s: float | None = None) -> int:
        """Drain, wait, end what is left, and return the exit status: 0 when every request came to its end.

        exit_timeout_s : the options' when None; the server itself waits no longer than these
        """
        self.terminate()
        limit_s = self._options.exit_timeout_s if exit_timeout_s is None else exit_timeout_s
        self.wait(limit_s + KILL_MARGIN_S)
        return self.kill()

    def kill(self) -> int:
        """End the server and its stubs at once, remove their shared memory, and return the server's exit status."""
        if self.poll() is None:
            self._child.kill()
        status = self.wait(_KILL_S)
        clean_up(self.token)
        return -signal.SIGKILL if status is None else status


def new_token() -> str:
    """Return what no other server's processes and shared memory are marked with."""
    return uuid.uuid4().hex[:12]


def shm_prefix(token: str) -> str:
    """Return what the names of a server's shared memory regions begin with."""
    return f"plansmith{token}"


def clean_up(token: str) -> tuple[int, int]:
    """End what is left of a server and return how many processes and shared memory regions there were.

    Stubs outlive a server that crashed, and ignore SIGTERM.
    """
    killed = processes.kill_all(f"{TOKEN_VARIABLE}={token}")
    return killed, processes.remove_shared_memory(shm_prefix(token))


def _flags(
    install: TritonInstall, ports: Ports, options: ServerOptions, backends: Path, prefix: str
) -> list[str]:
    flags = [f"--model-repository={one}" for one in options.repositories]
    flags += [
        "--model-control-mode=explicit",  # none at the start: loaded one by one, over the API
        "--model-load-thread-count=1",
        "--disable-auto-complete-config",  # else every model's stub is started twice
        f"--backend-directory={backends}",
        f"--backend-config=python,shm-region-prefix-name={prefix}",
        f"--exit-timeout-secs={options.exit_timeout_s}",
        "--log-format=ISO8601",
        f"--http-thread-count={options.http_threads}",
    ]
    for name, port in (("http", ports.http), ("grpc", ports.grpc), ("metrics", ports.metrics)):
        flags += [f"--{name}-address={options.host}", f"--{name}-port={port}"]
    if install.caches is not None:
        flags.append(f"--cache-directory={install.caches}")
    if not Path("/dev/nvidiactl").exists():
        flags.append("--allow-gpu-metrics=false")  # else it complains that there is no GPU
    if _HTTP_LIMIT_OPTION in install.options():
        flags.append(f"--{_HTTP_LIMIT_OPTION}={options.max_request_bytes}")
    return [*flags, *options.arguments]
