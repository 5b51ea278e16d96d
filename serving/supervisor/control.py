"""Starting a supervisor as a daemon, stopping it, asking how it is."""

from __future__ import annotations

import contextlib
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

from ...runtime.errors import UnsupportedError
from . import processes
from .options import SupervisorOptions
from .orphans import drain_orphan
from .process import KILL_MARGIN_S
from .state import State, locked, read_state, write_state

_STALE_S = 30.0  # a running supervisor writes its state every second or two, slower only while it heals
_END_S = 10.0  # for killing what is left, after a server's time to end


def start_daemon(options: SupervisorOptions, show: Callable[[str], None]) -> State:
    """Start a supervisor that outlives this process, wait until its server is ready, and return its state.

    show : gets its lines meanwhile
    raises : UnsupportedError with what went wrong
    """
    child = subprocess.Popen(
        [sys.executable, "-m", f"{__package__}"],
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        start_new_session=True,
        text=True,
    )
    assert child.stdin is not None
    assert child.stderr is not None
    try:
        with contextlib.suppress(BrokenPipeError):
            child.stdin.write(options.to_json())
            child.stdin.close()
        error = ""
        for line in child.stderr:  # it closes its end when the server is ready
            if error or line.startswith("error: "):
                error += line.removeprefix("error: ")
            else:
                show(line.rstrip())
        state = read_state(options.state_dir)
        if (
            not error
            and state is not None
            and state.supervisor_pid == child.pid
            and _has_started(child, state)
        ):
            return state
    except BaseException:
        child.terminate()  # Ctrl-C: it is not wanted any more
        with contextlib.suppress(subprocess.TimeoutExpired):
            child.wait(options.exit_timeout_s + KILL_MARGIN_S + _END_S)
        raise
    status = child.wait()
    if status == 0:
        raise UnsupportedError("it was stopped while it started; start it again when it is wanted")
    raise UnsupportedError(
        error.rstrip()
        or f"the supervisor ended with status {status}; see {options.state_dir / 'supervisor.log'}"
    )


def _has_started(child: subprocess.Popen[str], state: State) -> bool:
    """Whether the supervisor let go of its standard error because its server is ready, not because it ended."""
    return state.phase in ("running", "healing") and child.poll() is None


def stop(state_dir: Path, is_forced: bool = False) -> str:
    """Stop the supervisor and the server of a state directory, and return a sentence about it.

    is_forced : do not wait for running requests
    raises : UnsupportedError when it does not end
    """
    state = read_state(state_dir)
    if state is None or not (state.is_supervised or state.token):
        return "nothing is running"
    if state.is_supervised:
        return _stop_supervisor(state_dir, state, is_forced)
    if state.phase == "stopped" and not state.has_server:
        return "nothing is running"
    with locked(state_dir):
        state = read_state(state_dir) or state  # another may have started or stopped one meanwhile
        had_server = state.has_server
        was_cut = drain_orphan(state, is_forced)
        state.phase, state.message = "stopped", "stopped without its supervisor, which was gone"
        state.server_pid = state.server_ticks = 0
        write_state(state_dir, state)
    if not had_server:
        return "nothing was running"
    return "stopped a server without supervisor" + (", running requests were cut" if was_cut else "")


def _stop_supervisor(state_dir: Path, state: State, is_forced: bool) -> str:
    _tell_to_stop(state)
    deadline = time.monotonic() + state.exit_timeout_s + KILL_MARGIN_S + _END_S
    if is_forced:
        time.sleep(0.3)
        _tell_to_stop(state)  # the second one ends the wait
    while state.is_supervised:
        if time.monotonic() > deadline:
            raise UnsupportedError(
                f"the supervisor, pid {state.supervisor_pid}, does not end; kill it with kill -9 and run "
                "`plansmith triton stop` again"
            )
        time.sleep(0.05)
    after = read_state(state_dir)
    return f"stopped: {after.message}" if after is not None else "stopped"


def _tell_to_stop(state: State) -> None:
    processes.send_signal(state.supervisor_pid, state.supervisor_ticks, signal.SIGTERM)


def verdict(state: State | None) -> tuple[str, int]:
    """Return one word about a server and the exit status of `status`: 0 healthy, 1 not, 3 not running."""
    if state is None:
        return "stopped", 3
    if not state.is_supervised:
        if state.has_server:
            return "unsupervised", 1
        return (state.phase, 3) if state.phase in ("stopped", "failed") else ("lost", 3)
    if state.phase == "running" and time.time() - state.updated_at > _STALE_S:
        return "stuck", 1
    if state.phase != "running":
        return state.phase, 1
    return ("running", 0) if all(map(_is_well, state.models.values())) else ("degraded", 1)


def _is_well(model: dict[str, object]) -> bool:
    canary = model.get("canary")
    tried = not isinstance(canary, dict) or canary.get("outcome") in ("answered", "busy")
    return bool(model.get("ready")) and tried
