"""Which model is ill: without its process, answering with errors alone, or silent."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Collection

from .canary import Canary, Outcome
from .server import Server

_DEAD_S = 5.0  # the server calls a process dead that was starved for a second
_REFUSALS = 3  # in a row, of a model that has answered before
_STUB_NAME = re.compile(r"Stub process '(.+)_\d+_\d+'")


@dataclasses.dataclass(frozen=True)
class Finding:
    """A model that must be loaded again, and why."""

    model: str
    reason: str


class Diagnosis:
    """Looks at one server after another. The main thread alone.

    hang_s : how long a model may be silent while nothing else comes out of it
    """

    def __init__(self, hang_s: float) -> None:
        self._hang_s = hang_s
        self._short: frozenset[str] = frozenset()

    def forget(self) -> None:
        """Begin anew, with another server or other processes."""
        self._short = frozenset()

    def find(self, server: Server, ready: Collection[str]) -> Finding | None:
        """Return the first ill model of those that count as ready, None when all are well.

        raises : NoAnswer when the server is asked and silent
        """
        return self._without_process(server, ready) or self._by_canary(server, ready)

    def _without_process(self, server: Server, ready: Collection[str]) -> Finding | None:
        living = server.living_stubs()
        short = frozenset(
            one for one in server.names if one in ready and server.is_short_of_stubs(one, living)
        )
        for name in sorted(short & self._short):  # twice: it was not looked at in the middle of a change
            server.refresh(name)
            if server.is_short_of_stubs(name, server.living_stubs()):
                return Finding(name, "its process died")
        self._short = short
        return None

    def _by_canary(self, server: Server, ready: Collection[str]) -> Finding | None:
        for name, canary in server.canaries.items():
            found = self._illness(name, canary) if name in ready else None
            if found is not None:
                return found
        return None

    def _illness(self, name: str, canary: Canary) -> Finding | None:
        last = canary.last
        if last is None:
            return None
        if last.outcome is Outcome.DEAD and canary.unwell_s >= min(_DEAD_S, self._hang_s):
            named = _STUB_NAME.search(last.error)  # an ensemble tells which of its steps it is
            return Finding(named.group(1) if named else name, last.error)
        if canary.num_refused >= _REFUSALS and canary.has_answered:
            return Finding(name, f"it answers with errors: {last.error}")
        if last.outcome is Outcome.SILENT and canary.unwell_s >= self._hang_s:
            return Finding(name, f"it has been silent for {canary.unwell_s:.0f} s")
        return None
