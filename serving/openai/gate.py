"""What every request passes: its id, its key, whether the server takes it, its line in the log."""

from __future__ import annotations

import contextlib
import re
import time
import uuid
from collections.abc import Awaitable, Callable
from typing import Any

from .access_log import AccessLog
from .auth import KeyRing
from .context import Context
from .error_response import ErrorResponse
from .errors import ApiError
from .identity import KEY, Identity
from .limits import header
from .stream import Receive, Send

Application = Callable[[Any, Receive, Send], Awaitable[None]]
_ID = re.compile(r"[\x21-\x7e]{1,128}")
# Probes need no key, and are answered while the server drains.
_OPEN_PATHS = frozenset(("/health", "/health/live", "/health/ready", "/ping"))
GONE = 499  # of a client that left before its answer began
_ALWAYS_PATHS = _OPEN_PATHS | {"/metrics", "/version"}


class Gate:
    """ASGI middleware around the application."""

    def __init__(self, app: Application, ctx: Context, log: AccessLog | None) -> None:
        self._app = app
        self._ctx = ctx
        self._keys = KeyRing(ctx.settings.api_keys)
        self._access_log = log

    async def __call__(self, scope: Any, receive: Receive, send: Send) -> None:
        """Answer one request; lifespan events pass."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        identity = _identity(scope)
        scope[KEY] = identity
        answer = _Answer(send, identity)
        begin_s = time.monotonic()
        is_counted = (
            scope["path"] not in _ALWAYS_PATHS
        )  # a scrape would see itself, probes would hide the rest
        if is_counted:
            self._ctx.metrics.http_started()
        try:
            await self._answer(scope, receive, answer, identity)
        finally:
            if is_counted:
                self._ctx.metrics.http_ended(answer.status or GONE)
            if self._access_log is not None:
                self._access_log.note(_line(scope, identity, answer.status, time.monotonic() - begin_s))

    async def _answer(self, scope: Any, receive: Receive, answer: _Answer, identity: Identity) -> None:
        path = scope["path"]
        try:
            if path not in _OPEN_PATHS:
                identity.tenant = self._keys.tenant_of(header(scope, b"authorization"))
            counted = contextlib.nullcontext() if path in _ALWAYS_PATHS else self._ctx.lifecycle.request()
            with counted:
                await self._app(scope, receive, answer)
        except ApiError as error:
            await ErrorResponse(error)(scope, receive, answer)


class _Answer:
    """Sends an answer with the headers that each has."""

    def __init__(self, send: Send, identity: Identity) -> None:
        self._send = send
        self._identity = identity
        self.status = 0

    async def __call__(self, message: Any) -> None:
        if message["type"] == "http.response.start":
            self.status = message["status"]
            own = [(b"x-request-id", self._identity.request_id.encode())]
            if self._identity.session_id is not None:
                own.append((b"x-session-id", self._identity.session_id.encode()))
            message = {**message, "headers": [*message.get("headers", ()), *own]}
        await self._send(message)


def _identity(scope: Any) -> Identity:
    given = header(scope, b"x-request-id")
    session = header(scope, b"x-session-id")
    return Identity(
        request_id=given if given is not None and _ID.fullmatch(given) else uuid.uuid4().hex,
        session_id=session if session is not None and _ID.fullmatch(session) else None,
        header_salt=header(scope, b"x-cache-salt"),
    )


def _line(scope: Any, identity: Identity, status: int, seconds: float) -> dict[str, Any]:
    client = scope.get("client")
    return {
        "time": round(time.time(), 3),
        "request_id": identity.request_id,
        "session_id": identity.session_id,
        "tenant": identity.tenant or None,
        "client": client[0] if client else None,
        "method": scope["method"],
        "path": scope["path"][:200],
        "status": status or GONE,
        "seconds": round(seconds, 4),
        "prompt_tokens": identity.num_prompt_tokens,
        "output_tokens": identity.num_output_tokens,
    }
