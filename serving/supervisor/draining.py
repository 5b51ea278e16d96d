"""The end of a server's work: what is told first, and whether anything still runs.

A server that was told to exit refuses the steps of ensembles that still run, and their streams hang. So these are
unloaded before, which lets them finish. It also waits by itself until its limit for connections that are merely open,
and for streams whose model died.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

from .api import NoAnswer, TritonApi, TritonError, counter_sum
from .calls import called_by_code, steps
from .canary import progress_of
from .process import KILL_MARGIN_S
from .server import Server

_CALL_S = 5.0
_QUIET_S = 3.0  # longer than the engine's metrics lag behind it
_OURS = frozenset(("tensorrt_llm", "tensorrt_llm_bls", "preprocessing", "postprocessing", "ensemble"))
_ACTIVE = "nv_trt_llm_request_metrics"


class DrainWatch:
    """Asks the server's metrics, which it answers until its end, whether requests still run.

    names : the loaded models; those of others may work without showing it
    has_hung : streams of a model that died wait for it and always will
    """

    def __init__(self, api: TritonApi, names: Sequence[str], has_hung: bool) -> None:
        self._api = api
        self._names = tuple(names)
        self._has_hung = has_hung
        self._seen: tuple[float, int] | None = None
        self._quiet_since = time.monotonic()

    def is_over(self, num_stubs: int = 0) -> bool:
        """Whether nothing has moved for a while, nor will; asks the server, within a second.

        num_stubs : that are left; one less is a move, for ending them takes a while
        """
        try:
            text = self._api.metrics(1.0)
        except NoAnswer:
            return False  # it is about to end
        seen = (progress_of(text, self._names), num_stubs)
        if seen != self._seen or counter_sum(text, _ACTIVE, {"request_type": "active"}) > 0:
            self._seen, self._quiet_since = seen, time.monotonic()
        shows_all = _OURS.issuperset(self._names) and f"\n{_ACTIVE}{{" in text
        return (shows_all or self._has_hung) and time.monotonic() - self._quiet_since > _QUIET_S


def drain(server: Server, exit_timeout_s: float, must_end: Callable[[], bool]) -> bool:
    """Tell a server to exit, wait for it, and return whether no request runs in it any more.

    exit_timeout_s : how long running requests have
    must_end : asked now and then, whether to wait no longer
    """
    watch = DrainWatch(server.api, server.names, server.has_hung)
    deadline = time.monotonic() + exit_timeout_s

    def is_late() -> bool:
        over = time.monotonic() > deadline or server.process.poll() is not None
        return must_end() or over or watch.is_over()

    finish_callers(server.api, server.names, is_late)
    server.process.terminate()
    deadline += KILL_MARGIN_S
    while server.process.poll() is None:
        if watch.is_over(sum(map(len, server.living_stubs().values()))):
            return True
        if must_end() or time.monotonic() > deadline:
            return False
        time.sleep(0.1)
    return True


def finish_callers(api: TritonApi, names: Sequence[str], must_end: Callable[[], bool]) -> None:
    """Let models that call others take no new requests, and wait until their running ones have ended.

    names : the loaded models
    must_end : asked now and then, whether to wait no longer
    """
    try:
        callers = [name for name in names if _calls_others(api, name)]
        for name in callers:
            api.unload(name, _CALL_S)
        while not must_end():
            states = {one.name: one.reason for one in api.index(_CALL_S) if one.name in callers}
            if all(reason == "unloaded" for reason in states.values()):
                return
            time.sleep(0.1)
    except (NoAnswer, TritonError):
        return  # the server is not well; it is told to exit all the same


def _calls_others(api: TritonApi, name: str) -> bool:
    try:
        config = api.config(name, _CALL_S)
        return bool(steps(config) or called_by_code(config))
    except TritonError:
        return False  # someone has unloaded it
