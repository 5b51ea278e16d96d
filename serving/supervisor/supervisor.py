"""The supervisor: starts a server, watches, heals, drains."""

from __future__ import annotations

import contextlib
import ctypes
import logging
import signal
import time
from collections.abc import Callable

from ...runtime.errors import UnsupportedError
from .api import NoAnswer, TritonError
from .diagnosis import Diagnosis
from .draining import drain
from .keeper import ServerKeeper
from .loading import LoadError, StartError
from .log_files import put_aside
from .options import SupervisorOptions
from .orphans import end_orphans
from .report import StateReport
from .server import Server
from .state import locked
from .stop_signals import Stop, StopSignals

_TICK_S = 0.25
_LOOK_S = 1.0  # between looks at stubs and models, and writes of the state
_MOST_HEALS = 3  # of one model in the window, then the server is started anew
_LONGEST_PAUSE_S = 30.0
_PR_SET_CHILD_SUBREAPER = 36

log = logging.getLogger("plansmith.triton")


class Supervisor:
    """Runs one server until it is told to stop. Made and used on the main thread, for it takes the signals."""

    def __init__(self, options: SupervisorOptions) -> None:
        self._options = options
        self._signals = StopSignals()
        self._report = StateReport(options)
        self._keeper = ServerKeeper(options, self._report, self._signals)
        self._diagnosis = Diagnosis(options.hang_s)
        self._restarts: list[float] = []  # when, monotonic seconds
        self._heals: dict[str, list[float]] = {}

    def run(self, when_ready: Callable[[], None]) -> int:
        """Supervise until a signal comes, and return the exit status: 0 when the stop was asked for.

        when_ready : called once, when all models are loaded
        raises : Error when the server does not come up the first time, or too often not again
        """
        with locked(self._options.state_dir), self._signals.taken():
            end_orphans(self._options.state_dir)
            ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1)  # orphaned stubs come to us
            try:
                with self._signals.interruptible():
                    self._keeper.start_first()
                when_ready()
                return self._watch()
            except Stop:
                return self._drain()
            except Exception as error:
                self._keeper.end()
                self._report.note("failed", str(error) or repr(error))
                raise
            finally:
                self._keeper.end()

    @property
    def _server(self) -> Server:
        assert self._keeper.server is not None
        return self._keeper.server

    # ------------------------------------------------------------ watching

    def _watch(self) -> int:
        next_look = 0.0
        while not self._signals.num_stops:
            time.sleep(_TICK_S)
            self._keeper.reap()
            with contextlib.suppress(Stop), self._signals.interruptible():
                status = self._server.process.poll()
                if status is not None:
                    self._restart(f"tritonserver ended with {_status_text(status)}")
                elif time.monotonic() >= next_look:
                    self._look()
                    next_look = time.monotonic() + _LOOK_S
        return self._drain()

    def _look(self) -> None:
        server = self._server
        if not self._options.is_foreground:
            put_aside(self._options.state_dir / "triton.log", self._options.log_bytes)
        if server.answers is not None and server.answers.unwell_s > self._options.hang_s:
            self._restart(f"tritonserver has not answered for {server.answers.unwell_s:.0f} s")
            return
        try:
            self._look_at_models()
            found = self._diagnosis.find(server, self._report.ready_models())
            if found is not None:
                self._heal(found.model, found.reason)
        except (NoAnswer, TritonError) as error:
            log.warning("%s", error)  # its process is there: the canary of the server decides
        self._report.write()

    def _look_at_models(self) -> None:
        num_heals = {name: len(times) for name, times in self._heals.items()}
        self._report.show_models(self._server.describe(num_heals))

    # ------------------------------------------------------------ healing

    def _heal(self, name: str, reason: str) -> None:
        """Load one model anew; start the whole server anew where that is asked for or does not help."""
        server = self._server
        recent = self._recent(self._heals.get(name, []))
        text = f"the model {name}: {reason}"
        if self._options.restart_on_dead_stub or len(recent) >= _MOST_HEALS or server.is_ensemble(name):
            self._restart(text)
            return
        log.warning("%s; loading it again", text)
        self._report.say("healing", text)
        self._heals[name] = [*recent, time.monotonic()]
        try:
            callers = server.reload(name)
        except (TritonError, NoAnswer) as error:
            self._restart(f"{text}; loading it again failed: {error}")
            return
        self._report.state.heals += 1
        self._diagnosis.forget()
        also = f", and {', '.join(callers)}, whose requests waited for it," if callers else ""
        self._report.say("running", f"the model {name}{also} was loaded again ({reason})")
        self._look_at_models()

    def _restart(self, reason: str) -> None:
        """Start the server anew, again and again with growing pauses, until it runs or there were too many."""
        state = self._report.state
        while True:
            self._keeper.end()
            self._diagnosis.forget()
            self._restarts = self._recent(self._restarts)
            if len(self._restarts) >= self._options.max_restarts:
                raise UnsupportedError(
                    f"given up after {len(self._restarts)} restarts within {self._options.restart_window_s:g} s; "
                    f"the last reason: {reason}"
                )
            pause_s = min(_LONGEST_PAUSE_S, 0.5 * 2 ** len(self._restarts)) if self._restarts else 0.0
            log.warning("%s; starting the server again in %g s", reason, pause_s)
            self._report.say("healing", reason)
            self._restarts.append(time.monotonic())
            state.restarts += 1
            time.sleep(pause_s)
            state.phase = "healing"
            try:
                self._keeper.start_again()
                return
            except (StartError, LoadError, UnsupportedError) as error:
                reason = str(error)

    def _recent(self, times: list[float]) -> list[float]:
        return [one for one in times if time.monotonic() - one < self._options.restart_window_s]

    # ------------------------------------------------------------ ending

    def _drain(self) -> int:
        """Let running requests finish, then end everything."""
        server = self._keeper.server
        if server is None:
            text = "no server was running"
        elif not server.is_loaded:
            text = "it was still loading models"  # and would finish that before it takes notice
        elif server.process.poll() is not None:
            text = f"tritonserver had ended with {_status_text(server.process.poll())}"
        else:
            text = self._drained(server)
        self._keeper.end()
        self._report.say("stopped", text)
        return 0

    def _drained(self, server: Server) -> str:
        server.stop_canaries()
        self._report.say("draining", f"running requests have {self._options.exit_timeout_s} s to end")
        stops = self._signals.num_stops

        def must_end() -> bool:
            self._keeper.reap()
            return self._signals.num_stops > stops

        is_over = drain(server, self._options.exit_timeout_s, must_end)
        status = server.process.kill()
        if status == 0:
            return "every running request had come to its end"
        cut = "connections without a running request" if is_over else "open connections"
        return f"tritonserver ended with {_status_text(status)}, {cut} were cut"


def _status_text(status: int | None) -> str:
    if status is None or status >= 0:
        return f"status {status}"
    with contextlib.suppress(ValueError):  # real-time signals have no names
        return f"signal {signal.Signals(-status).name}"
    return f"signal {-status}"
