"""What a supervisor tells: to its log and, for `status` and `stop`, in state.json."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Mapping
from typing import Any

from . import processes
from .options import SupervisorOptions
from .ports import Ports
from .process import ServerProcess
from .state import State, boot_id, write_state

log = logging.getLogger("plansmith.triton")


class StateReport:
    """The state of one supervisor, written at each change. The main thread alone.

    state : what state.json holds; change it by the methods
    """

    def __init__(self, options: SupervisorOptions) -> None:
        self._folder = options.state_dir
        self._is_failing = False
        me = processes.look_up(os.getpid())
        self.state = State(
            repositories=[str(one) for one in options.repositories],
            host=options.host,
            exit_timeout_s=options.exit_timeout_s,
            boot_id=boot_id(),
            started_at=time.time(),
            supervisor_pid=os.getpid(),
            supervisor_ticks=me.start_ticks if me else 0,
        )

    def say(self, phase: str, text: str) -> None:
        """Tell what is being done, or what went wrong."""
        log.info("%s: %s", phase, text)
        self.note(phase, text)

    def note(self, phase: str, text: str) -> None:
        """Write it down without a line in the log."""
        self.state.phase, self.state.message = phase, text
        self.write()

    def announce(self, ports: Ports, token: str) -> None:
        """Write down a server that is about to be started: whoever finds that can find its processes."""
        state = self.state
        state.http_port, state.grpc_port, state.metrics_port = ports.http, ports.grpc, ports.metrics
        state.token = token
        self.write()

    def name_server(self, process: ServerProcess | None) -> None:
        """Note which process is the server; None = there is none, so no model is ready."""
        state = self.state
        if process is not None:
            state.server_pid, state.server_ticks = process.pid, process.start_ticks
            return
        state.server_pid = state.server_ticks = 0
        for one in state.models.values():
            one["ready"] = False

    def show_models(self, models: Mapping[str, dict[str, Any]]) -> None:
        """Take over how the models are; `write` writes it."""
        self.state.models = dict(models)

    def ready_models(self) -> frozenset[str]:
        """Return the models that the server last called ready."""
        return frozenset(name for name, one in self.state.models.items() if one["ready"])

    def write(self) -> None:
        """Write the state; a full disk costs the view from outside, not the server."""
        self.state.updated_at = time.time()
        try:
            write_state(self._folder, self.state)
        except OSError as error:
            if not self._is_failing:
                log.warning("the state cannot be written: %s", error)
            self._is_failing = True
            return
        self._is_failing = False
