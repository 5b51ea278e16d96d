"""Events of the core: one token, one position of a prompt, or the end of a sequence."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from ._native import native
from .errors import STATUS_CLASSES, Error, InternalError
from .stats import RequestStats, from_struct

_KIND_TOKEN, _KIND_FAILED, _KIND_CONTEXT = 1, 3, 4
TopLogprobs = tuple[tuple[int, float], ...]
Logits = NDArray[np.float32]


class TokenEvent(NamedTuple):
    """One generated token. `top` holds (id, log-probability), best first; `logits` is (V,) where they were asked for.

    sequence_idx : which of the request's sequences
    """

    request_id: int
    client_id: int
    token_id: int
    output_idx: int
    logprob: float
    cum_logprob: float
    top: TopLogprobs
    sequence_idx: int = 0
    logits: Logits | None = None


class ContextEvent(NamedTuple):
    """One position of the prompt: the token that follows it (-1 at its end) and what the model thought of it."""

    request_id: int
    client_id: int
    token_id: int
    position: int
    logprob: float
    top: TopLogprobs
    sequence_idx: int = 0
    logits: Logits | None = None


class EndEvent(NamedTuple):
    """The last event of a sequence: a finish reason of the C API, or the error it failed with.

    is_final : no more events of the whole request
    """

    request_id: int
    client_id: int
    finish_reason: int
    error: Error | None
    stats: RequestStats
    sequence_idx: int = 0
    is_final: bool = True


Event = TokenEvent | ContextEvent | EndEvent


def event_of(event: Any, vocab_size: int) -> Event:
    """Return a psm_event as what it is; its logits, if any, are freed with the array that shows them."""
    if event.kind in (_KIND_TOKEN, _KIND_CONTEXT):
        return _token_event(event, vocab_size)
    error = None
    if event.kind == _KIND_FAILED:
        text = bytes(native().ffi.string(event.message)).decode("utf-8", "replace")
        error = STATUS_CLASSES.get(event.status, InternalError)(text)
    stats = from_struct(RequestStats, event.stats)
    return EndEvent(
        event.request_id,
        event.client_id,
        event.finish_reason,
        error,
        stats,
        event.sequence_idx,
        bool(event.is_final),
    )


def _token_event(event: Any, vocab_size: int) -> TokenEvent | ContextEvent:
    top = tuple((event.top_ids[i], event.top_logprobs[i]) for i in range(event.num_top_logprobs))
    head = (event.request_id, event.client_id, event.token_id, event.output_idx, event.logprob)
    tail = (top, event.sequence_idx, take_logits(event, vocab_size))
    if event.kind == _KIND_CONTEXT:
        return ContextEvent(*head, *tail)
    return TokenEvent(*head, event.cum_logprob, *tail)


def take_logits(event: Any, vocab_size: int) -> Logits | None:
    """Return the row of a psm_event as an array that owns it, (V,) float32, or None; the event has none afterwards."""
    core = native()
    if not event.logits:
        return None
    owner = core.ffi.gc(event.logits, core.lib.psm_logits_free)
    event.logits = core.ffi.NULL
    return np.frombuffer(core.ffi.buffer(owner, vocab_size * 4), np.float32)
