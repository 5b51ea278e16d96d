"""Events of the core: one token, or the end of a request."""

from __future__ import annotations

from typing import Any, NamedTuple

from ._native import native
from .errors import STATUS_CLASSES, Error, InternalError
from .stats import RequestStats, from_struct

_KIND_TOKEN, _KIND_FAILED = 1, 3


class TokenEvent(NamedTuple):
    """One generated token. `top` holds (id, log-probability), best first."""

    request_id: int
    client_id: int
    token_id: int
    output_idx: int
    logprob: float
    cum_logprob: float
    top: tuple[tuple[int, float], ...]


class EndEvent(NamedTuple):
    """A request's last event: a finish reason of the C API, or the error it failed with."""

    request_id: int
    client_id: int
    finish_reason: int
    error: Error | None
    stats: RequestStats


Event = TokenEvent | EndEvent


def event_of(event: Any) -> Event:
    """Return a psm_event as what it is."""
    if event.kind == _KIND_TOKEN:
        top = tuple((event.top_ids[i], event.top_logprobs[i]) for i in range(event.num_top_logprobs))
        return TokenEvent(
            event.request_id,
            event.client_id,
            event.token_id,
            event.output_idx,
            event.logprob,
            event.cum_logprob,
            top,
        )
    error = None
    if event.kind == _KIND_FAILED:
        text = bytes(native().ffi.string(event.message)).decode("utf-8", "replace")
        error = STATUS_CLASSES.get(event.status, InternalError)(text)
    stats = from_struct(RequestStats, event.stats)
    return EndEvent(event.request_id, event.client_id, event.finish_reason, error, stats)
