"""What a supervisor that was killed left behind."""

from __future__ import annotations

import logging
import signal
import time
from pathlib import Path

from . import processes
from .api import TritonApi
from .draining import finish_callers
from .process import KILL_MARGIN_S, clean_up
from .state import State, read_state

log = logging.getLogger("plansmith.triton")


def end_orphans(state_dir: Path) -> None:
    """End what is left of the last server of a state directory whose supervisor is gone.

    Only processes that carry that server's mark in their environment are touched.
    """
    state = read_state(state_dir)
    if state is None or not state.token or state.is_supervised:
        return
    killed, regions = clean_up(state.token)
    if killed or regions:
        log.warning("ended %d processes and %d regions of an earlier server", killed, regions)


def drain_orphan(state: State, is_forced: bool) -> bool:
    """Stop a server that has no supervisor any more, as one would; whether requests may have been cut."""
    if state.has_server and not is_forced:
        deadline = time.monotonic() + state.exit_timeout_s + KILL_MARGIN_S
        api = TritonApi(state.host, state.http_port, state.metrics_port)
        finish_callers(api, list(state.models), lambda: time.monotonic() > deadline - KILL_MARGIN_S)
        processes.send_signal(state.server_pid, state.server_ticks, signal.SIGTERM)
        while processes.is_same(state.server_pid, state.server_ticks) and time.monotonic() < deadline:
            time.sleep(0.05)
    was_cut = state.has_server
    if state.token:
        clean_up(state.token)
    return was_cut
