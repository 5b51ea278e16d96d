"""A submitted request as its reader sees it: deltas as they come, or the whole result."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

from .completion import Completion, Delta
from .errors import Error
from .request import RequestState

if TYPE_CHECKING:
    from .engine import Engine


class Mailbox:
    """Where a request's deltas go. It knows no engine: one that is dropped with its handles must be free at once."""

    def __init__(self, on_delta: Callable[[Delta | Error], None] | None) -> None:
        self._on_delta = on_delta
        self.deltas: queue.SimpleQueue[Delta | Error] = queue.SimpleQueue()
        self.finished = threading.Event()

    def put(self, item: Delta | Error) -> None:
        """Take a delta or the error, on the thread that routes events."""
        try:
            (self._on_delta or self.deltas.put)(item)
        finally:  # an on_delta that raises must not leave result() waiting
            if _is_last(item):
                self.finished.set()


class RequestHandle:
    """A submitted request. Iterate it for deltas as they come, or ask for the whole `result`; any thread."""

    def __init__(self, engine: Engine, mailbox: Mailbox, state: RequestState) -> None:
        self._engine = engine
        self._mailbox = mailbox
        self._state = state
        self._exhausted = False  # the reader's own view: the last delta may be out before `finished` is set

    def __iter__(self) -> Iterator[Delta]:
        """Return this handle: its deltas come once, up to the last, which is final."""
        return self

    def __next__(self) -> Delta:
        """Wait for the next delta; raises the request's Error if it failed."""
        if self._exhausted:
            raise StopIteration
        deltas = self._mailbox.deltas
        self._engine._drive(lambda: not deltas.empty())
        item = deltas.get()
        self._exhausted = _is_last(item)
        if isinstance(item, Error):
            raise item
        return item

    def result(self, timeout: float | None = None) -> Completion:
        """Wait for the end and return the whole output.

        timeout : seconds; TimeoutError when it runs out, and the request goes on
        raises the Error the request failed with
        """
        self._engine._drive(self._mailbox.finished.is_set)
        if not self._mailbox.finished.wait(timeout):
            raise TimeoutError(f"the request has not finished within {timeout:g} s; cancel() ends it")
        return self._state.outcome()

    @property
    def request_id(self) -> int:
        """The engine's number of the request, which its deltas also have."""
        assert self._state.request_id is not None
        return self._state.request_id

    @property
    def completion(self) -> Completion | None:
        """The whole output, there before the final delta is delivered; None until then, and of a failed request."""
        return self._state.completion

    @property
    def done(self) -> bool:
        """Whether the last delta is there."""
        return self._mailbox.finished.is_set()

    def cancel(self) -> None:
        """Ask for the end; a final delta with finish_reason "cancelled" follows. Nothing if it has already ended."""
        if not self.done:
            self._engine._cancel(self._state.request_id)

    def __enter__(self) -> RequestHandle:
        """Cancel the request when the block is left early."""
        return self

    def __exit__(self, *_: object) -> None:
        """Cancel the request if it has not ended."""
        self.cancel()


class TextStream(Iterator[Delta]):
    """The deltas of one request, which is cancelled when the stream is closed or dropped before its end."""

    def __init__(self, handle: RequestHandle) -> None:
        self._handle = handle

    def __next__(self) -> Delta:
        """Wait for the next delta."""
        return next(self._handle)

    def close(self) -> None:
        """Cancel the request if it has not ended."""
        self._handle.cancel()

    def __enter__(self) -> TextStream:
        """Close the stream at the end of the block."""
        return self

    def __exit__(self, *_: object) -> None:
        """Close the stream."""
        self.close()

    def __del__(self) -> None:
        """Close a stream that nobody reads any more."""
        self.close()


def _is_last(item: Delta | Error) -> bool:
    return isinstance(item, Error) or item.is_final
