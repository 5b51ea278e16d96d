"""The body of a request, read within limits of size and time."""

from __future__ import annotations

import asyncio
from typing import Any

from .errors import ApiError, bad_request
from .settings import Settings
from .stream import ClientGone, Receive

# What is still read of a body that was refused, so that the client is not cut off before it sees why.
_MOST_DRAINED = 64 << 20
_MOST_DRAIN_S = 2.0


async def read_body(scope: Any, receive: Receive, settings: Settings) -> bytes:
    """Return the whole body; raises ApiError 413 as soon as it is too long, 408 when it is too slow, ClientGone."""
    length = _length(scope)
    if length is not None and length > settings.max_body_bytes:
        raise _too_long(f"{length} bytes", settings)
    try:
        return await asyncio.wait_for(_read(receive, settings), settings.body_timeout_s)
    except (TimeoutError, asyncio.TimeoutError):  # two classes before Python 3.11
        raise ApiError(
            408,
            f"the body was not complete within {settings.body_timeout_s:g} s; send it faster",
            code="body_timeout",
            headers={"Connection": "close"},
        ) from None


async def _read(receive: Receive, settings: Settings) -> bytes:
    parts: list[bytes] = []
    size = 0
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise ClientGone
        part = message.get("body", b"")
        size += len(part)
        if size > settings.max_body_bytes:
            raise _too_long(f"more than {settings.max_body_bytes} bytes", settings)
        parts.append(part)
        if not message.get("more_body", False):
            return b"".join(parts)


async def discard_body(receive: Receive) -> None:
    """Read what a client still sends and throw it away, for a short time."""

    async def discard() -> None:
        size = 0
        while size < _MOST_DRAINED:
            message = await receive()
            size += len(message.get("body", b""))
            if message["type"] == "http.disconnect" or not message.get("more_body", False):
                return

    try:
        await asyncio.wait_for(discard(), _MOST_DRAIN_S)
    except (TimeoutError, asyncio.TimeoutError):
        return


def check_json(scope: Any) -> None:
    """Raise ApiError 415 for a body that says it is something else than JSON."""
    kind = header(scope, b"content-type")
    if (
        kind is not None
        and kind.split(";")[0].strip().lower() not in ("", "application/json")
        and "json" not in kind
    ):
        raise ApiError(
            415,
            f"the content-type is {kind[:80]!r}, it must be application/json: send the header "
            "'content-type: application/json', with curl -H",
            code="unsupported_media_type",
        )


def header(scope: Any, name: bytes) -> str | None:
    """Return a header's first value as text, None without; name in lower case."""
    for key, value in scope["headers"]:
        if key == name:
            return str(value.decode("latin-1"))
    return None


def _length(scope: Any) -> int | None:
    text = header(scope, b"content-length")
    if text is None:
        return None
    if not text.isdigit():
        raise bad_request(f"content-length is {text[:40]!r}, it must be a number", code="invalid_header")
    return int(text)


def _too_long(what: str, settings: Settings) -> ApiError:
    return ApiError(
        413,
        f"the body has {what}, the most is {settings.max_body_bytes}; send less, or serve with a larger "
        "--max-body-bytes",
        code="body_too_large",
        headers={"Connection": "close"},
    )
