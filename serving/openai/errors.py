"""What a client gets instead of an answer: OpenAI's error object with the status that its clients act on."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ...runtime.errors import (
    Error,
    InvalidArgumentError,
    NotFoundError,
    OutOfMemoryError,
    QueueFullError,
    ShapeError,
    ShutdownError,
    UnsupportedError,
)

# The official clients try again after 408, 409, 429 and 5xx, and wait for as long as Retry-After says.
_TYPES = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    405: "invalid_request_error",
    408: "timeout_error",
    413: "invalid_request_error",
    429: "rate_limit_error",
    503: "service_unavailable_error",
    504: "timeout_error",
}


class ApiError(Exception):
    """A request that is answered with an error.

    status : of HTTP
    message : what, got, wanted, next step
    param : the field of the request, None where it is none of them
    code : a word for programs
    headers : further headers of the answer
    """

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.param = param
        self.code = code
        self.headers = dict(headers or {})

    def body(self) -> dict[str, Any]:
        """Return the JSON of the answer."""
        kind = _TYPES.get(self.status, "server_error" if self.status >= 500 else "invalid_request_error")
        return {"error": {"message": self.message, "type": kind, "param": self.param, "code": self.code}}


def bad_request(message: str, param: str | None = None, code: str | None = None) -> ApiError:
    """Return the error of a request that cannot be answered as it is."""
    return ApiError(400, message, param=param, code=code)


def of_error(error: Error, *, retry_after_s: int = 1, submitted: bool = False) -> ApiError:
    """Return what an error of the engine is to a client.

    retry_after_s : when a full queue may have room again
    submitted : the request was accepted, so that what is wrong now is not the client's
    """
    text = str(error)
    wait = {"Retry-After": str(retry_after_s)}
    if isinstance(error, QueueFullError):
        return ApiError(429, text, code="queue_full", headers=wait)
    if isinstance(error, ShutdownError):
        return ApiError(503, text, code="shutting_down", headers=wait)
    if isinstance(error, ShapeError) and not submitted:
        return bad_request(text, code="context_length_exceeded")
    if isinstance(error, OutOfMemoryError):
        status = 503 if submitted else 400
        return ApiError(status, text, code="out_of_memory", headers=wait if submitted else None)
    if isinstance(error, InvalidArgumentError):
        return bad_request(text, param=_param_of(text), code="invalid_value")
    if isinstance(error, NotFoundError):
        return ApiError(404, text, code="not_found")
    if isinstance(error, UnsupportedError) and not submitted:
        return bad_request(text, code="unsupported")
    return ApiError(500, text, code="engine_error")


def _param_of(text: str) -> str | None:
    """Return the parameter that a message of SamplingParams begins with."""
    from .protocol import FIELD_NAMES

    first = text.split(" ", 1)[0].split(".", 1)[0]
    return first if first in FIELD_NAMES else None
