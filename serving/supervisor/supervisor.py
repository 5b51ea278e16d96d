"""The supervisor: starts a server, watches, heals, drains."""

from __future__ import annotations

import contextlib
import ctypes
import logging
import os
import re
import signal
import time
from collections.abc import Callable

from ...runtime.errors import Error, UnsupportedError
from . import processes
from .api import NoAnswer, TritonError
from .canary import Outcome
from .draining import DrainWatch, finish_callers
from .install import TritonInstall
from .loading import LoadError, StartError, load_order
from .log_files import put_aside
from .options import SupervisorOptions
from .orphans import end_orphans
from .ports import Ports, choose_ports
from .process import KILL_MARGIN_S, clean_up, new_token
from .server import Server
from .state import State, boot_id, locked, write_state
from .stop_signals import Stop, StopSignals

_TICK_S = 0.25
_LOOK_S = 1.0  # between looks at stubs and models, and writes of the state
_FIRST_TRIES = 4  # of a start, for servers that abort while they start
_DEAD_S = 5.0  # the server calls a process dead that was starved for a second
_MOST_HEALS = 3  # of one model in the window, then the server is started anew
_REFUSALS = 3  # in a row, of a model that has answered before
_LEAST_SHM = 128 << 20  # Docker's default is 64 MB; requests and answers go through it
_LONGEST_PAUSE_S = 30.0
_STUB_NAME = re.compile(r"Stub process '(.+)_\d+_\d+'")
_PR_SET_CHILD_SUBREAPER = 36

log = logging.getLogger("plansmith.triton")


class Supervisor:
    """Runs one server until it is told to stop. Made and used on the main thread, for it takes the signals."""

    def __init__(self, options: SupervisorOptions) -> None:
        self._options = options
        self._state = State(
            repositories=[str(one) for one in options.repositories],
            host=options.host,
            exit_timeout_s=options.exit_timeout_s,
            boot_id=boot_id(),
            started_at=time.time(),
        )
        self._server: Server | None = None
        self._ports: Ports | None = None
        self._signals = StopSignals()
        self._restarts: list[float] = []  # when, monotonic seconds
        self._heals: dict[str, list[float]] = {}
        self._short: set[str] = set()  # models that lacked stubs at the last look

    def run(self, when_ready: Callable[[], None]) -> int:
        """Supervise until a signal comes, and return the exit status: 0 when the stop was asked for.

        when_ready : called once, when all models are loaded
        raises : Error when the server does not come up the first time
        """
        with locked(self._options.state_dir), self._signals.taken():
            end_orphans(self._options.state_dir)
            me = processes.look_up(os.getpid())
            self._state.supervisor_pid = os.getpid()
            self._state.supervisor_ticks = me.start_ticks if me else 0
            ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1)  # orphaned stubs come to us
            try:
                with self._signals.interruptible():
                    self._start_first()
                when_ready()
                return self._watch()
            except Stop:
                return self._drain()
            except Error as error:
                self._fail(str(error))
                raise
            finally:
                self._end()

    # ------------------------------------------------------------ starting

    def _start_first(self) -> None:
        self._say("starting", "looking for tritonserver")
        options = self._options
        self._names = load_order(options.repositories, options.models)
        self._install = TritonInstall.find(options.environment, options.tritonserver)
        self._check_imports()
        free = processes.shm_free_bytes()
        if free < _LEAST_SHM:
            log.warning("/dev/shm has %d MB free; give the container more, e.g. --shm-size 1g", free >> 20)
        for tries_left in reversed(range(_FIRST_TRIES)):
            self._ports = choose_ports(
                options.host, options.http_port, options.grpc_port, options.metrics_port
            )
            try:
                self._start()
                return
            except StartError as error:
                self._end()
                if not tries_left:
                    raise
                log.warning("%s; starting again", error)
                time.sleep(0.5)

    def _check_imports(self) -> None:
        """Refuse at once what would fail in every model: a Python without plansmith."""
        files = [one for repository in self._options.repositories for one in repository.glob("*/*/model.py")]
        if any("plansmith" in one.read_text(encoding="utf-8", errors="replace") for one in files):
            backends = self._install.link_backends(self._options.state_dir / "backends")
            failure = self._install.import_failure("plansmith.runtime.engine", backends)
            if failure:
                raise UnsupportedError(
                    f"the models need plansmith, which {self._install.python} cannot import ({failure}); install "
                    f"it there: {self._install.python} -m pip install plansmith"
                )

    def _start(self) -> None:
        assert self._ports is not None
        state = self._state
        state.http_port, state.grpc_port = self._ports.http, self._ports.grpc
        state.metrics_port = self._ports.metrics
        state.token = new_token()
        self._write()  # before the server is there: whoever finds this state can find its processes
        server = Server.start(self._options, self._install, self._ports, self._names, state.token)
        self._server = server
        state.server_pid, state.server_ticks = server.process.pid, server.process.start_ticks
        phase = state.phase
        self._say(phase, f"tritonserver has pid {server.process.pid}")
        try:
            server.load(lambda text: self._say(phase, text))
            self._look_at_models()
        except (NoAnswer, TritonError) as error:
            raise StartError(f"tritonserver went silent while it started: {error}") from None
        self._short.clear()
        where = f"HTTP {self._ports.http}, gRPC {self._ports.grpc}, metrics {self._ports.metrics}"
        self._say("running", f"{len(self._names)} models on {self._options.host}: {where}")

    # ------------------------------------------------------------ watching

    def _watch(self) -> int:
        next_look = 0.0
        while not self._signals.num_stops:
            time.sleep(_TICK_S)
            self._reap()
            try:
                with self._signals.interruptible():
                    if self._server is not None and self._server.process.poll() is not None:
                        self._restart(f"tritonserver ended with {_status_text(self._server.process.poll())}")
                    elif time.monotonic() >= next_look:
                        self._look()
                        next_look = time.monotonic() + _LOOK_S
            except Stop:
                break
        return self._drain()

    def _look(self) -> None:
        server = self._server
        assert server is not None
        if not self._options.is_foreground:
            put_aside(self._options.state_dir / "triton.log", self._options.log_bytes)
        if server.answers is not None and server.answers.unwell_s > self._options.hang_s:
            self._restart(f"tritonserver has not answered for {server.answers.unwell_s:.0f} s")
            return
        try:
            self._look_at_models()
            self._heal_what_is_dead()
        except NoAnswer as error:
            log.warning("%s", error)  # its process is there: the canary of the server decides
        self._write()

    def _look_at_models(self) -> None:
        """Bring the state's view of the models up to date."""
        server = self._server
        assert server is not None
        num_heals = {name: len(times) for name, times in self._heals.items()}
        self._state.models = server.describe(num_heals)

    def _heal_what_is_dead(self) -> None:
        server = self._server
        assert server is not None
        living = server.living_stubs()
        short = {one for one in self._names if server.is_short_of_stubs(one, living) and self._is_ready(one)}
        for name in short & self._short:  # twice: it was not looked at in the middle of a change
            server.refresh(name)
            if server.is_short_of_stubs(name, server.living_stubs()):
                self._heal(name, "its process died")
                return
        self._short = short
        for name, canary in list(server.canaries.items()):
            if not self._is_ready(name) or canary.last is None:
                continue
            if canary.last.outcome is Outcome.DEAD and canary.unwell_s >= min(_DEAD_S, self._options.hang_s):
                found = _STUB_NAME.search(canary.last.error)
                self._heal(found.group(1) if found else name, canary.last.error)
                return
            if canary.num_refused >= _REFUSALS and canary.has_answered:
                self._heal(name, f"it answers with errors: {canary.last.error}")
                return
            if canary.last.outcome is Outcome.SILENT and canary.unwell_s >= self._options.hang_s:
                self._heal(name, f"it has been silent for {canary.unwell_s:.0f} s")
                return

    def _is_ready(self, name: str) -> bool:
        return bool(self._state.models.get(name, {}).get("ready"))

    # ------------------------------------------------------------ healing

    def _heal(self, name: str, reason: str) -> None:
        """Load one model anew; start the whole server anew where that is asked for or does not help."""
        server = self._server
        assert server is not None
        recent = _recent(self._heals.setdefault(name, []), self._options.restart_window_s)
        text = f"the model {name}: {reason}"
        if self._options.restart_on_dead_stub or len(recent) >= _MOST_HEALS or server.is_ensemble(name):
            self._restart(text)
            return
        log.warning("%s; loading it again", text)
        self._say("healing", text)
        recent.append(time.monotonic())
        self._heals[name] = recent
        try:
            server.reload(name)
        except (TritonError, NoAnswer) as error:
            self._restart(f"{text}; loading it again failed: {error}")
            return
        self._state.heals += 1
        self._short.clear()
        self._look_at_models()
        self._say("running", f"the model {name} was loaded again ({reason})")

    def _restart(self, reason: str) -> None:
        """Start the server anew, again and again with growing pauses, until it runs or there were too many."""
        while True:
            self._end()
            self._restarts = _recent(self._restarts, self._options.restart_window_s)
            if len(self._restarts) >= self._options.max_restarts:
                raise UnsupportedError(
                    f"given up after {len(self._restarts)} restarts within {self._options.restart_window_s:g} s; "
                    f"the last reason: {reason}"
                )
            pause_s = min(_LONGEST_PAUSE_S, 0.5 * 2 ** len(self._restarts)) if self._restarts else 0.0
            log.warning("%s; starting the server again in %g s", reason, pause_s)
            self._say("healing", reason)
            self._restarts.append(time.monotonic())
            self._state.restarts += 1
            time.sleep(pause_s)
            self._state.phase = "healing"
            try:
                self._check_ports()
                self._start()
                return
            except (StartError, LoadError, UnsupportedError) as error:
                reason = str(error)

    def _check_ports(self) -> None:
        """Fail early while another process has one of the ports."""
        assert self._ports is not None
        try:
            choose_ports(self._options.host, self._ports.http, self._ports.grpc, self._ports.metrics)
        except Error as error:
            raise StartError(str(error)) from None

    # ------------------------------------------------------------ ending

    def _drain(self) -> int:
        """Let running requests finish, then end everything."""
        server = self._server
        text = "every running request had come to its end"
        if server is not None and not server.is_loaded:
            text = "it was still loading models"  # and would finish that before it takes notice
        elif server is not None and server.process.poll() is None:
            server.stop_canaries()
            self._say("draining", f"running requests have {self._options.exit_timeout_s} s to end")
            is_over = self._wait_for_end(server)
            status = server.process.kill()
            if status != 0:
                cut = "connections without a running request" if is_over else "open connections"
                text = f"tritonserver ended with {_status_text(status)}, {cut} were cut"
        self._end()
        self._say("stopped", text)
        return 0

    def _wait_for_end(self, server: Server) -> bool:
        """Tell a server to exit, wait for it, and return whether no request runs in it any more."""
        stops = self._signals.num_stops
        drain = DrainWatch(server.api, self._names, server.has_hung)
        deadline = time.monotonic() + self._options.exit_timeout_s

        def must_end() -> bool:
            self._reap()
            late = time.monotonic() > deadline or self._signals.num_stops > stops
            return late or server.process.poll() is not None or drain.is_over()

        finish_callers(server.api, self._names, must_end)
        server.process.terminate()
        deadline += KILL_MARGIN_S
        while server.process.poll() is None:
            if drain.is_over(sum(map(len, server.living_stubs().values()))):
                return True
            if time.monotonic() > deadline or self._signals.num_stops > stops:
                return False
            time.sleep(0.1)
            self._reap()
        return True

    def _end(self) -> None:
        """End the server and all of its processes at once, where there is one."""
        server, self._server = self._server, None
        if server is not None:
            server.stop_canaries()
            server.process.kill()
        elif self._state.token:  # it was interrupted while it started
            clean_up(self._state.token)
        self._state.server_pid = self._state.server_ticks = 0
        for one in self._state.models.values():
            one["ready"] = False
        self._reap()

    def _reap(self) -> None:
        processes.reap(self._server.process.pid if self._server is not None else 0)

    # ------------------------------------------------------------ telling

    def _say(self, phase: str, text: str) -> None:
        log.info("%s: %s", phase, text)
        self._state.phase, self._state.message = phase, text
        self._write()

    def _fail(self, text: str) -> None:
        self._end()
        self._state.phase, self._state.message = "failed", text
        with contextlib.suppress(OSError):
            self._write()

    def _write(self) -> None:
        self._state.updated_at = time.time()
        write_state(self._options.state_dir, self._state)


def _recent(times: list[float], window_s: float) -> list[float]:
    return [one for one in times if time.monotonic() - one < window_s]


def _status_text(status: int | None) -> str:
    if status is not None and status < 0:
        return f"signal {signal.Signals(-status).name}"
    return f"status {status}"
