"""Errors as answers, and endpoints that answer with them."""

from __future__ import annotations

import functools
import logging
from collections.abc import Awaitable, Callable
from typing import Any

from starlette.responses import JSONResponse, Response

from ...runtime.errors import Error
from .errors import ApiError, of_error
from .limits import discard_body
from .stream import ClientGone, Receive, Send

_log = logging.getLogger("plansmith.openai")


class ErrorResponse(JSONResponse):  # type: ignore[misc]
    """An error. Where the connection ends with it, what the client still sends is read for a while.

    A socket that is closed with unread bytes is reset, and the client might never see the answer.
    """

    def __init__(self, error: ApiError) -> None:
        super().__init__(error.body(), error.status, headers=error.headers)
        self._closes = error.headers.get("Connection") == "close"

    async def __call__(self, scope: Any, receive: Receive, send: Send) -> None:
        """Send it."""
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        await send({"type": "http.response.body", "body": self.body, "more_body": self._closes})
        if self._closes:
            await discard_body(receive)
            await send({"type": "http.response.body", "body": b"", "more_body": False})


class NoResponse(Response):  # type: ignore[misc]
    """What a client gets that is not there any more."""

    async def __call__(self, scope: Any, receive: Receive, send: Send) -> None:
        """Send nothing."""


def answering(endpoint: Callable[..., Awaitable[Response]]) -> Callable[..., Awaitable[Response]]:
    """Return the endpoint with its errors as answers; one that nobody expected is logged."""

    @functools.wraps(endpoint)
    async def answer(*arguments: Any, **values: Any) -> Response:
        try:
            return await endpoint(*arguments, **values)
        except ApiError as error:
            return ErrorResponse(error)
        except Error as error:
            return ErrorResponse(of_error(error, submitted=True))
        except ClientGone:
            return NoResponse()
        except Exception:
            _log.exception("a request failed")
            return ErrorResponse(ApiError(500, "the server failed; its log says why", code="internal_error"))

    return answer
