"""Server-sent events, and work that ends when its client goes away."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping
from typing import Any, TypeVar

from starlette.responses import Response

from ...runtime.errors import Error
from .context import Context
from .errors import ApiError, of_error

T = TypeVar("T")
_log = logging.getLogger("plansmith.openai")
Receive = Callable[[], Awaitable[Any]]
Send = Callable[[Any], Awaitable[None]]

# A send that takes longer waits for its reader, which says nothing of what sending costs.
_MOST_SEND_S = 0.002
DONE = b"data: [DONE]\n\n"
PING = b": waiting\n\n"


class ClientGone(Exception):
    """The client closed its connection before the answer was complete."""


def event(chunk: Mapping[str, Any]) -> bytes:
    """Return one event of a stream."""
    return (
        b"data: "
        + json.dumps(chunk, ensure_ascii=False, separators=(",", ":")).encode("utf-8", "replace")
        + b"\n\n"
    )


async def unless_gone(receive: Receive, work: Awaitable[T]) -> T:
    """Return what `work` returns; when the client goes away first, cancel it and raise ClientGone.

    receive : of a request whose body has been read
    """
    task = asyncio.ensure_future(work)
    gone = asyncio.ensure_future(_until_gone(receive))
    try:
        await asyncio.wait((task, gone), return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            return task.result()
        raise ClientGone
    finally:
        gone.cancel()
        if not task.done():
            task.cancel()
            with contextlib.suppress(asyncio.CancelledError, Exception):
                await task


async def _until_gone(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


class EventStream(Response):  # type: ignore[misc]
    """An answer of events, each sent when `chunks` yields it.

    run : ended with the answer, also where the client leaves before the first of `chunks` was asked for
    chunks : bytes of whole events; an ApiError it raises becomes the last event, since the status is out already
    """

    def __init__(
        self,
        ctx: Context,
        run: contextlib.AbstractContextManager[Any],
        chunks: AsyncGenerator[bytes, None],
        headers: Mapping[str, str],
    ) -> None:
        super().__init__(
            media_type="text/event-stream",
            headers={**headers, "cache-control": "no-cache", "x-accel-buffering": "no"},
        )
        del self.headers["content-length"]
        self._ctx = ctx
        self._run = run
        self._chunks = chunks

    async def __call__(self, scope: Any, receive: Receive, send: Send) -> None:
        """Send everything, or stop when the client goes away."""
        with self._run, contextlib.suppress(ClientGone):
            await unless_gone(receive, self._send_all(send))

    async def _send_all(self, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
        async with contextlib.aclosing(_with_end(self._chunks)) as chunks:
            async for chunk in chunks:
                begin_s = time.perf_counter()
                await send({"type": "http.response.body", "body": chunk, "more_body": True})
                self._ctx.budget.sent(min(time.perf_counter() - begin_s, _MOST_SEND_S))
        await send({"type": "http.response.body", "body": b"", "more_body": False})


async def _with_end(chunks: AsyncGenerator[bytes, None]) -> AsyncGenerator[bytes, None]:
    """Yield the chunks, an error as one more, and the end."""
    async with contextlib.aclosing(chunks):
        try:
            async for chunk in chunks:
                yield chunk
        except ApiError as error:
            yield event(error.body())
        except Error as error:
            yield event(of_error(error, submitted=True).body())
        except Exception:  # the status is out, and a stream that merely stops would look complete to some
            _log.exception("a stream failed")
            yield event(ApiError(500, "the server failed while it answered", code="internal_error").body())
    yield DONE
