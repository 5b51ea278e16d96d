"""One request of Triton on its way: its rows, the engine's handles, and where its answers go."""

from __future__ import annotations

import collections
import functools
import threading
from collections.abc import Callable, Collection, Sequence
from typing import Any, Protocol

from numpy.typing import NDArray

from ...runtime.completion import Completion
from .outbox import NOT_YET, Schedule
from .row import Row
from .stream import KeepPrefix, RowStream, last_tokens
from .write import Outputs, Writer

__all__ = ["Reply", "Request"]


class Reply(Protocol):
    """Where the answers of one request go. Calls come from one thread at a time, but `is_cancelled` from any.

    request_id : the client's; "" = it gave none
    output_names : of the outputs it asked for
    """

    @property
    def request_id(self) -> str:
        """The client's name for the request, UTF-8; "" = none."""

    @property
    def output_names(self) -> Collection[str]:
        """The outputs that answers may have, by name."""

    def send(self, outputs: dict[str, NDArray[Any]], final: bool) -> None:
        """Send one answer; with no outputs and `final`, the end alone."""

    def fail(self, error: BaseException) -> None:
        """Send an error, which is the last answer."""

    def acknowledge(self) -> None:
        """Say that the request has been taken, where its sender waits for that."""

    def is_ready(self) -> bool:
        """Return whether the next answer may be sent now; else ask again soon."""

    def is_cancelled(self) -> bool:
        """Return whether the client has gone or cancelled; False once the last answer is out."""


class Handle(Protocol):
    """What a submitted row is to the engine; RequestHandle is one."""

    def cancel(self) -> None:
        """Ask for its end."""


class Request:
    """The rows of one request, sent as one: answers in the order they were made, the final flag with the last.

    wake : called as (request, at_once) when it has something to send
    is_stacked : several outputs of a row are one answer
    keep_prefix : chooses prefix_ids
    on_answered : called once before the last answer goes, when the request's id is free again
    on_end : called once after it, with the completions and the error, if any
    """

    def __init__(
        self,
        rows: Sequence[Row],
        reply: Reply,
        wake: Callable[[Request, bool], None],
        *,
        logits_dtype: str = "float32",
        is_stacked: bool = False,
        keep_prefix: KeepPrefix = last_tokens,
        on_answered: Callable[[Request], None],
        on_end: Callable[[Request, list[Completion], BaseException | None], None],
    ) -> None:
        self.reply = reply
        self.schedule = Schedule(is_streaming=any(row.streaming for row in rows))
        self.is_cancelled = False
        self.adapters: dict[int, str] = {}  # row_idx -> the engine's name of the one it holds
        self._wake = wake
        self._on_answered, self._on_end = on_answered, on_end
        self._lock = threading.Lock()
        self._handles: list[Handle] = []
        self._error: BaseException | None = None
        self._is_ended = False
        self._has_let_go = False
        self._is_gone = False
        self._answers: collections.deque[Outputs] = collections.deque()  # taken of the rows, not yet sent
        self.rows = [
            RowStream(
                row,
                Writer(row, reply.output_names, logits_dtype),
                lambda at_once: wake(self, at_once),
                is_stacked=is_stacked,
                keep_prefix=keep_prefix,
            )
            for row in rows
        ]

    @property
    def id(self) -> str:
        """The client's name for it."""
        return self.reply.request_id

    def started(self, handle: Handle) -> None:
        """Take the handle of a row that was submitted."""
        with self._lock:
            if not self._is_ended:
                self._handles.append(handle)
            is_cancelled = self.is_cancelled
        if is_cancelled:
            handle.cancel()

    def hold(self, row_idx: int, adapter: str) -> bool:
        """Keep a row's adapter until the request ends; False when it has ended."""
        with self._lock:
            if not self._has_let_go:
                self.adapters[row_idx] = adapter
            return not self._has_let_go

    def let_go(self) -> list[str]:
        """Return the adapters that are held; no more will be."""
        with self._lock:
            self._has_let_go = True
            return list(self.adapters.values())

    def fail(self, error: BaseException) -> None:
        """End the request with an error, and with it the rows that run."""
        self._error = self._error or error
        self.cancel()
        for row in self.rows:
            row.abandon()
        self._wake(self, True)

    def cancel(self, *, is_gone: bool = False) -> None:
        """Ask for the end of all rows; their last answers say so. Any thread, more than once.

        is_gone : nobody reads the answers any more
        """
        with self._lock:
            self._is_gone |= is_gone
            self.is_cancelled = True
            handles = list(self._handles)
        for handle in handles:
            handle.cancel()

    def flush(self) -> int:
        """Send the answers that wait and return their number, or NOT_YET when there are more that must wait.

        On a sender's thread, one at a time; does not raise.
        """
        if self._is_ended:
            return 0
        if not self.reply.is_ready():
            return NOT_YET
        is_done = all(row.is_done for row in self.rows)  # read first: what comes later is taken next time
        error = self._error or next((row.error for row in self.rows if row.error is not None), None)
        if error is not None:
            return self._end(functools.partial(self.reply.fail, error), error)
        try:
            self._answers += [one for row in self.rows for one in row.take()]
            if self._is_gone:
                self._answers.clear()
            count = 0
            while len(self._answers) > is_done and self.reply.is_ready():  # the last goes with the final flag
                self.reply.send(self._answers.popleft(), final=False)
                count += 1
        except Exception as failure:  # the server is gone, or an answer cannot be written
            return self._end(functools.partial(self.reply.fail, failure), failure)
        if len(self._answers) > is_done or (is_done and not self.reply.is_ready()):
            return NOT_YET
        if not is_done:
            return count
        last = self._answers.popleft() if self._answers else {}
        return count + self._end(functools.partial(self.reply.send, last, final=True))

    def _end(self, send: Callable[[], None], error: BaseException | None = None) -> int:
        if error is not None:
            self.cancel()
        with self._lock:
            self._is_ended = True
        self._on_answered(self)
        try:
            send()
        except Exception as failure:  # nobody is there to be told
            error = error or failure
        completions = [row.completion for row in self.rows if row.completion is not None]
        with self._lock:  # both know this request: what a cycle holds is freed late, and they may have logits
            self.rows, self._handles = [], []
        self._on_end(self, completions, error)
        return 1
