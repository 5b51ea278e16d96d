"""One row on its way: the engine's deltas in, on its event thread; answers out, on a sender's."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray

from ...runtime.completion import Completion, Delta
from ...runtime.errors import Error
from .row import Row
from .write import PREFIX_LEN, Outputs, Piece, Writer

__all__ = ["RowStream"]

Wake = Callable[[bool], None]
KeepPrefix = Callable[[list[int]], list[int]]
"""Given output tokens that are out, returns the last ones that the text of the next answer takes."""


def last_tokens(token_ids: list[int]) -> list[int]:
    """Return the last PREFIX_LEN tokens, for a model without a tokenizer."""
    return token_ids[-PREFIX_LEN:]


class _Track:
    """What waits of one sequence, and what of it is out.

    waiting, num_tokens : the stream's lock guards them
    The rest is the sender's.
    """

    def __init__(self, keep_prefix: KeepPrefix) -> None:
        self.waiting: list[Delta] = []
        self.num_tokens = 0
        self._keep_prefix = keep_prefix
        self._prefix_ids: list[int] = []
        self._cum_logprob = 0.0

    def put(self, delta: Delta) -> None:
        self.waiting.append(delta)
        self.num_tokens += len(delta.token_ids)

    def piece(self, deltas: Sequence[Delta]) -> Piece:
        """Return what these deltas say, at least one, which are out from here on."""
        token_ids = [token for delta in deltas for token in delta.token_ids]
        logprobs = [one.logprob for delta in deltas for one in delta.logprobs or ()]
        logits = [delta.generation_logits for delta in deltas if delta.generation_logits is not None]
        for one in logprobs:
            self._cum_logprob += one
        prefix_ids, self._prefix_ids = self._prefix_ids, self._keep_prefix(self._prefix_ids + token_ids)
        return Piece(
            token_ids=token_ids,
            logprobs=logprobs,
            cum_logprob=self._cum_logprob,
            prefix_ids=prefix_ids,
            finish_reason=deltas[-1].finish_reason,
            stop_reason=deltas[-1].stop_reason,
            logits=np.concatenate(logits) if logits else None,
        )


class RowStream:
    """Keeps what the engine has made of a row until a sender takes it.

    wake : called as (at_once) when there is something to take; on the event thread, so it must not wait
    is_stacked : several outputs come as one answer, one below the other, as beams always do
    keep_prefix : chooses prefix_ids
    """

    def __init__(
        self,
        row: Row,
        writer: Writer,
        wake: Wake,
        *,
        is_stacked: bool = False,
        keep_prefix: KeepPrefix = last_tokens,
    ) -> None:
        self.row = row
        self.error: Error | None = None
        self.completion: Completion | None = None
        self.is_done = False  # nothing more will come
        self._writer = writer
        self._wake = wake
        num_sequences = row.params.get("n", 1)
        is_ranked = row.params.get("beam_width", 1) > 1
        self._is_single = num_sequences == 1
        self._is_stacked = is_stacked or is_ranked or self._is_single
        self._is_whole = is_ranked or not row.streaming
        self._is_taken = False
        self._max_tokens = row.params.get("max_tokens")
        self._lock = threading.Lock()
        self._tracks = [_Track(keep_prefix) for _ in range(num_sequences)]
        self._context_logits: NDArray[np.float32] | None = None

    def on_delta(self, item: Delta | Error) -> None:
        """Take a delta, or the error that ends the row. On the engine's event thread."""
        if isinstance(item, Error):
            self.error = item
        elif not self._is_whole:
            self._put(item)
            return
        elif item.is_final:
            self.completion = item.completion
        else:
            return
        self.is_done = True
        self._wake(True)

    def abandon(self) -> None:
        """Say that the row will never reach the engine."""
        self.is_done = True

    def take(self) -> list[Outputs]:
        """Return the answers that wait. One thread at a time."""
        if self._is_whole:
            completion = self.completion
            if completion is None or self._is_taken:
                return []
            self._is_taken = True
            return [self._writer.whole(completion)] if self._is_stacked else self._writer.each(completion)
        taken: list[list[Delta]] = []
        with self._lock:  # the event thread waits for it: no more than this
            for track in self._tracks:
                taken.append(track.waiting)
                track.waiting = []
            context_logits, self._context_logits = self._context_logits, None
        return [
            self._writer.partial(
                track.piece(deltas),
                sequence_idx=None if self._is_single else i,
                stats=deltas[-1].stats,
                context_logits=context_logits if i == 0 else None,
            )
            for i, (track, deltas) in enumerate(zip(self._tracks, taken, strict=True))
            if deltas
        ]

    def _put(self, delta: Delta) -> None:
        track = self._tracks[delta.index]
        with self._lock:
            is_first = track.num_tokens == 0
            track.put(delta)
            if delta.context_logits is not None:
                self._context_logits = delta.context_logits
            if delta.is_final:
                self.completion, self.is_done = delta.completion, True
        if delta.finish_reason is not None:
            self._wake(True)
        elif track.num_tokens != self._max_tokens:  # else the end follows at once, and goes with this token
            self._wake(is_first)
