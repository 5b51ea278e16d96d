"""The HTTP protocol: uvicorn's, with limits of time and size for clients that are slow, silent or wrong."""

from __future__ import annotations

import asyncio
import json
from typing import Any

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from .errors import ApiError
from .settings import Settings
from .upgrades import UpgradeFilter

_MOST_HEAD_BYTES = 64 << 10


class GuardedProtocol(HttpToolsProtocol):  # type: ignore[misc]
    """One connection. Made by a class that `guarded` returns.

    - The head of a request must be there header_timeout_s after the connection, or after its first byte.
    - It may have 64 KiB.
    - One connection more than max_connections is closed at once.
    - A client that takes nothing of what is sent for write_timeout_s is cut off.
    """

    settings: Settings

    def connection_made(self, transport: Any) -> None:
        """Begin to wait for a request."""
        self._head_timer: asyncio.TimerHandle | None = None
        self._write_timer: asyncio.TimerHandle | None = None
        self._num_head_bytes = 0
        self._unsent = 0
        self._upgrades = UpgradeFilter()
        self._in_body = False
        super().connection_made(transport)
        self._expect_head()
        if len(self.connections) > self.settings.max_connections:
            self._refuse(
                ApiError(503, "the server has too many connections; try again later", code="overloaded")
            )

    def connection_lost(self, exc: Exception | None) -> None:
        """Stop waiting."""
        self._head_is_here()
        self._stop_write_timer()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """Take bytes; those of a head are counted."""
        if self.transport.is_closing():
            return
        in_head = self._head_timer is not None
        if not self._in_body:
            data = self._upgrades.feed(data)
        super().data_received(data)
        if self.transport.is_closing():
            return
        if self._head_timer is not None:
            self._num_head_bytes += len(data) if in_head else 0
            if self._num_head_bytes > _MOST_HEAD_BYTES:
                self._refuse(
                    ApiError(
                        431, f"the head of the request has more than {_MOST_HEAD_BYTES} bytes; send less"
                    )
                )
        elif (self.cycle is None or self.cycle.response_complete) and self.timeout_keep_alive_task is None:
            self._expect_head()  # bytes that begin no request yet

    def on_message_begin(self) -> None:
        """Begin a head."""
        super().on_message_begin()
        if self._head_timer is None:
            self._expect_head()

    def on_headers_complete(self) -> None:
        """End a head."""
        self._head_is_here()
        self._in_body = True
        super().on_headers_complete()

    def on_message_complete(self) -> None:
        """End a body, also one that is empty."""
        self._in_body = False
        super().on_message_complete()

    def send_400_response(self, msg: str) -> None:
        """Answer what is no HTTP."""
        self._refuse(ApiError(400, "the request is not valid HTTP; use an HTTP client", code="invalid_http"))

    def pause_writing(self) -> None:
        """Begin to watch whether the client takes anything."""
        super().pause_writing()
        self._unsent = self.transport.get_write_buffer_size()
        self._start_write_timer()

    def resume_writing(self) -> None:
        """Stop watching."""
        self._stop_write_timer()
        super().resume_writing()

    def timeout_keep_alive_handler(self) -> None:
        """Close an idle connection, also when its client never took the answer."""
        if self.transport.get_write_buffer_size():
            self.transport.abort()
        super().timeout_keep_alive_handler()

    def _expect_head(self) -> None:
        self._num_head_bytes = 0
        self._head_timer = self.loop.call_later(self.settings.header_timeout_s, self._head_is_late)

    def _head_is_here(self) -> None:
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None

    def _head_is_late(self) -> None:
        self._head_timer = None
        if not self.transport.is_closing():
            seconds = f"{self.settings.header_timeout_s:g}"
            self._refuse(
                ApiError(408, f"no request came within {seconds} s; send it faster", code="header_timeout")
            )

    def _start_write_timer(self) -> None:
        self._stop_write_timer()
        self._write_timer = self.loop.call_later(self.settings.write_timeout_s, self._look_at_writing)

    def _stop_write_timer(self) -> None:
        if self._write_timer is not None:
            self._write_timer.cancel()
            self._write_timer = None

    def _look_at_writing(self) -> None:
        self._write_timer = None
        unsent = self.transport.get_write_buffer_size()
        if unsent >= self._unsent:
            self.transport.abort()  # close() would wait for the client to take the rest
            return
        self._unsent = unsent
        self._start_write_timer()

    def _refuse(self, error: ApiError) -> None:
        """Answer and close, unless an answer is on its way already."""
        if self.cycle is None or self.cycle.response_complete:
            body = json.dumps(error.body()).encode()
            retry = "retry-after: 1\r\n" if error.status == 503 else ""
            head = (
                f"HTTP/1.1 {error.status} Refused\r\ncontent-type: application/json\r\n"
                f"content-length: {len(body)}\r\nconnection: close\r\n{retry}\r\n"
            )
            self.transport.write(head.encode() + body)
        self.transport.close()


def guarded(settings: Settings) -> type[GuardedProtocol]:
    """Return a protocol class with these settings."""
    return type("Guarded", (GuardedProtocol,), {"settings": settings})
