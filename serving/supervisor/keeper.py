"""The one server that there is: started, written down, and ended with all that it left behind."""

from __future__ import annotations

import logging
import time
from pathlib import Path

from ...runtime.errors import Error, UnsupportedError
from . import processes
from .api import NoAnswer, TritonError
from .install import TritonInstall
from .loading import StartError, load_order
from .options import SupervisorOptions
from .ports import Ports, choose_ports
from .process import clean_up, new_token
from .report import StateReport
from .server import Server
from .stop_signals import StopSignals

_FIRST_TRIES = 4  # of a start, for servers that abort while they start
_LEAST_SHM = 128 << 20  # Docker's default is 64 MB; requests and answers go through it

log = logging.getLogger("plansmith.triton")


class ServerKeeper:
    """Starts servers, one at a time. The main thread alone.

    server : the one that runs or has just ended; None before a start and after `end`
    """

    def __init__(self, options: SupervisorOptions, report: StateReport, signals: StopSignals) -> None:
        self._options = options
        self._report = report
        self._signals = signals
        self._names: list[str] = []
        self.server: Server | None = None

    def start_first(self) -> None:
        """Find the program, choose the ports, and start it.

        raises : Error when it does not come up
        """
        self._report.say("starting", "looking for tritonserver")
        options = self._options
        self._names = load_order(options.repositories, options.models)
        self._install = TritonInstall.find(options.environment, options.tritonserver)
        _check_imports(self._install, options)
        free = processes.shm_free_bytes()
        if free < _LEAST_SHM:
            log.warning("/dev/shm has %d MB free; give the container more, e.g. --shm-size 1g", free >> 20)
        for tries_left in reversed(range(_FIRST_TRIES)):
            ports = choose_ports(options.host, options.http_port, options.grpc_port, options.metrics_port)
            try:
                self._start(ports)
                return
            except StartError as error:
                self.end()
                if not tries_left:
                    raise
                log.warning("%s; starting again", error)
                time.sleep(0.5)

    def start_again(self) -> None:
        """Start it with the ports that it had.

        raises : StartError while another process has one of them, or as it does at first; LoadError for a model
        """
        ports = self._ports
        try:
            choose_ports(self._options.host, ports.http, ports.grpc, ports.metrics)
        except Error as error:
            raise StartError(str(error)) from None
        self._start(ports)

    def _start(self, ports: Ports) -> None:
        self._ports = ports
        token = new_token()
        self._report.announce(ports, token)
        with self._signals.held():  # a child between fork and exec carries no mark yet
            try:
                server = Server.start(self._options, self._install, ports, self._names, token)
            except OSError as error:
                raise StartError(f"tritonserver cannot be started: {error}") from None
            self.server = server
        self._report.name_server(server.process)
        phase = self._report.state.phase
        self._report.say(phase, f"tritonserver has pid {server.process.pid}")
        try:
            server.load(lambda text: self._report.say(phase, text))
            self._report.show_models(server.describe({}))
        except (NoAnswer, TritonError) as error:
            raise StartError(f"tritonserver went silent while it started: {error}") from None
        where = f"HTTP {ports.http}, gRPC {ports.grpc}, metrics {ports.metrics}"
        self._report.say("running", f"{len(self._names)} models on {self._options.host}: {where}")

    def end(self) -> None:
        """End the server and all of its processes at once, where there is one."""
        server, self.server = self.server, None
        if server is not None:
            server.stop_canaries()
            server.process.kill()
        elif self._report.state.token:  # it was interrupted while it started
            clean_up(self._report.state.token)
        self._report.name_server(None)
        self.reap()

    def reap(self) -> None:
        """Take the status of children that nobody else waits for."""
        processes.reap(self.server.process.pid if self.server is not None else 0)


def _check_imports(install: TritonInstall, options: SupervisorOptions) -> None:
    """Refuse at once what would fail in every model: a Python without plansmith."""
    files = [one for repository in options.repositories for one in repository.glob("*/*/model.py")]
    if not any(_mentions_us(one) for one in files):
        return
    backends = install.link_backends(options.state_dir / "backends")
    failure = install.import_failure("plansmith.runtime.engine", backends)
    if failure:
        raise UnsupportedError(
            f"the models need plansmith, which {install.python} cannot import ({failure}); install "
            f"it there: {install.python} -m pip install plansmith"
        )


def _mentions_us(file: Path) -> bool:
    return "plansmith" in file.read_text(encoding="utf-8", errors="replace")
