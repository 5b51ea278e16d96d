"""Real tritonservers for tests: started on free ports, drained at the end, nothing left behind."""

from __future__ import annotations

import dataclasses
import os
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest
from plansmith.serving.supervisor import processes
from plansmith.serving.supervisor.api import TritonApi
from plansmith.serving.supervisor.install import TritonInstall
from plansmith.serving.supervisor.loading import StartError, load_all, load_order
from plansmith.serving.supervisor.ports import choose_ports
from plansmith.serving.supervisor.process import ServerOptions, ServerProcess, shm_prefix

_ROOT = Path(__file__).parents[1]


def find_install() -> TritonInstall:
    """Return the tests' server: of $PLANSMITH_TRITON_ENV, else of .venv-triton, where tests are skipped without it."""
    named = os.environ.get("PLANSMITH_TRITON_ENV")  # as `make test` does: then it must be there
    environment = Path(named or _ROOT / ".venv-triton")
    if not named and not environment.is_dir():
        pytest.skip(f"no tritonserver: {environment} is missing; make it with `make triton-env`")
    return TritonInstall.find(environment)


def server_environ() -> dict[str, str]:
    """Return the environment of the tests' servers.

    Their models import the plansmith of the server's environment, else that of these tests, which is linked
    beside the Python backend; a stub takes no notice of PYTHONPATH, plansmith does of PLANSMITH_LIBRARY.
    """
    return {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}


@dataclasses.dataclass
class RunningTriton:
    """A server with its models loaded. `http`, `grpc` and `metrics` are "host:port"."""

    process: ServerProcess
    api: TritonApi
    log_path: Path
    http: str
    grpc: str
    metrics: str

    def log(self, num_lines: int = 60) -> str:
        """Return the end of the server's and the models' output."""
        return "\n".join(self.log_path.read_text(errors="replace").splitlines()[-num_lines:])


class TritonServers:
    """Makes servers and ends them."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._running: dict[tuple[Path, tuple[str, ...]], RunningTriton] = {}
        self._install: TritonInstall | None = None

    def __call__(
        self,
        repository: Path,
        models: Sequence[str] = (),
        *,
        environ: Mapping[str, str] | None = None,
        arguments: Sequence[str] = (),
        fresh: bool = False,
    ) -> RunningTriton:
        """Return a server of `repository`; the same one for the same repository and models, unless `fresh`.

        models : those to load, () = all
        environ : added to the environment of server and stubs
        arguments : of tritonserver
        fresh : a server for this call alone; end it with `stop`, or leave that to the end of the session
        """
        key = (repository.resolve(), tuple(models))
        if not fresh and key in self._running and self._running[key].process.poll() is None:
            return self._running[key]
        if self._install is None:
            self._install = find_install()
        server = self._start(
            self._install, repository, models, {**server_environ(), **(environ or {})}, arguments
        )
        while key in self._running:
            key = (key[0], (*key[1], "again"))
        self._running[key] = server
        return server

    def stop(self, server: RunningTriton) -> int:
        """Drain a server, check that nothing of it is left, and return its exit status."""
        self._running = {key: one for key, one in self._running.items() if one is not server}
        status = server.process.stop(5.0)
        token = server.process.token
        left = processes.living_of(f"PLANSMITH_TRITON_RUN={token}")
        assert not left, f"processes outlived their server: {left}"
        assert not list(Path("/dev/shm").glob(f"{shm_prefix(token)}*")), "shared memory outlived its server"
        return status

    def stop_all(self) -> None:
        """Drain all servers."""
        for server in list(self._running.values()):
            self.stop(server)

    def logs(self) -> str:
        """Return the ends of the logs of all running servers."""
        return "\n".join(f"--- {one.log_path}\n{one.log()}" for one in self._running.values())

    def _start(
        self,
        install: TritonInstall,
        repository: Path,
        models: Sequence[str],
        environ: Mapping[str, str],
        arguments: Sequence[str],
    ) -> RunningTriton:
        self._folder.mkdir(parents=True, exist_ok=True)
        folder = self._folder / f"server{len(list(self._folder.iterdir()))}"
        folder.mkdir()
        names = load_order([repository], models)
        for tries_left in reversed(range(4)):
            options = ServerOptions(
                repositories=(repository,),
                folder=folder,
                log_path=folder / "triton.log",
                exit_timeout_s=5,
                arguments=tuple(arguments),
                environ=environ,
            )
            ports = choose_ports("127.0.0.1")
            process = ServerProcess.start(install, ports, options)
            server = RunningTriton(
                process=process,
                api=TritonApi("127.0.0.1", ports.http, ports.metrics),
                log_path=folder / "triton.log",
                http=f"127.0.0.1:{ports.http}",
                grpc=f"127.0.0.1:{ports.grpc}",
                metrics=f"127.0.0.1:{ports.metrics}",
            )
            try:
                _wait_until_live(server)
                load_all(server.api, names, timeout_s=120, is_running=lambda p=process: p.poll() is None)
                return server
            except StartError:  # this server may abort while it starts
                process.kill()
                if not tries_left:
                    print(server.log())
                    raise
            except BaseException:
                process.kill()
                print(server.log())
                raise
        raise AssertionError


def _wait_until_live(server: RunningTriton, timeout_s: float = 60.0) -> None:
    deadline = time.monotonic() + timeout_s
    while not server.api.is_live(1.0):
        if server.process.poll() is not None or time.monotonic() > deadline:
            raise StartError(f"the server does not come up:\n{server.log()}")
        time.sleep(0.05)
