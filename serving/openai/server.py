"""Runs the server in this process: sockets, signals, and the end."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import uvicorn

from ...runtime.async_engine import AsyncEngine
from ...runtime.errors import InvalidArgumentError
from .app import make_app
from .context import Context
from .protocol_http import guarded
from .settings import Settings

_BACKLOG = 2048
_SEND_BUFFER_BYTES = (
    128 << 10
)  # of the kernel's memory for a client that reads slowly; it would take megabytes


class _Server(uvicorn.Server):  # type: ignore[misc]
    """uvicorn's server without its signal handlers: it would end the process by the signal it got."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


def listen(host: str, port: int) -> list[socket.socket]:
    """Return a listening socket on the first address of a host; port 0 = any free one.

    raises InvalidArgumentError for a host that has no address, or a port that is taken
    """
    try:
        family, kind, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        sock = socket.socket(family, kind)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _SEND_BUFFER_BYTES)
        sock.bind(address)
        sock.listen(_BACKLOG)
    except OSError as error:
        raise InvalidArgumentError(
            f"cannot listen on {host}:{port}: {error.strerror or error}; give another --host or --port"
        ) from error
    sock.setblocking(False)
    return [sock]


def listen_unix(path: Path) -> list[socket.socket]:
    """Return a listening socket at a path, in the place of one that nobody listens at any more."""
    if path.is_socket():
        with socket.socket(socket.AF_UNIX) as probe, contextlib.suppress(ConnectionError):
            probe.connect(str(path))
            raise InvalidArgumentError(f"somebody listens at {path}; give another --uds")
        path.unlink()
    sock = socket.socket(socket.AF_UNIX)
    try:
        sock.bind(str(path))
        sock.listen(_BACKLOG)
    except OSError as error:
        raise InvalidArgumentError(
            f"cannot listen at {path}: {error.strerror or error}; give another --uds"
        ) from error
    sock.setblocking(False)
    return [sock]


async def serve(
    engine: AsyncEngine,
    settings: Settings,
    sockets: list[socket.socket],
    ready: Callable[[Callable[[], None]], None],
) -> None:
    """Answer requests until a signal ends it: SIGTERM and SIGINT drain, the second one ends at once.

    sockets : listening; closed at the end
    ready : called when requests are answered, with what a signal would do, for the loop's thread
    """
    ctx = Context(engine, settings)
    config = uvicorn.Config(
        make_app(ctx),
        http=guarded(settings),
        ws="none",
        lifespan="on",
        log_config=None,
        log_level="warning",
        access_log=False,
        server_header=False,
        timeout_keep_alive=max(1, round(settings.keep_alive_s)),
        timeout_graceful_shutdown=1,
    )
    server = _Server(config)
    watch = asyncio.ensure_future(ctx.lifecycle.watch())
    ender = _Ender(ctx, server)
    try:
        with ender.on_signals():
            asyncio.get_running_loop().call_soon(_when_started, server, lambda: ready(ender.end))
            await server.serve(sockets)
    finally:
        watch.cancel()
        ctx.close()
        await engine.aclose()


def _when_started(server: _Server, ready: Callable[[], None]) -> None:
    if server.started:
        ready()
    elif not server.should_exit:
        asyncio.get_running_loop().call_later(0.01, _when_started, server, ready)


def _requests(count: int) -> str:
    return "1 request" if count == 1 else f"{count} requests"


def _tell(text: str) -> None:
    """Say something on standard error, where somebody still reads it; the end goes on without."""
    with contextlib.suppress(OSError):
        print(f"plansmith: {text}", file=sys.stderr, flush=True)


class _Ender:
    """Ends the server once its requests are answered."""

    def __init__(self, ctx: Context, server: _Server) -> None:
        self._ctx = ctx
        self._server = server
        self._task: asyncio.Future[None] | None = None

    @contextlib.contextmanager
    def on_signals(self) -> Iterator[None]:
        """Listen to SIGTERM and SIGINT inside the block."""
        loop = asyncio.get_running_loop()
        is_main = threading.current_thread() is threading.main_thread()
        numbers = (signal.SIGTERM, signal.SIGINT) if is_main else ()
        for number in numbers:
            loop.add_signal_handler(number, self.signalled, number)
        try:
            yield
        finally:
            for number in numbers:
                loop.remove_signal_handler(number)

    def signalled(self, number: int) -> None:
        """Drain, or at the second signal end at once."""
        if self._task is None:
            self.end()
            return
        _tell("ended at once")
        os._exit(128 + number)  # threads of the engine may be inside a long step

    def end(self) -> None:
        """Drain, then stop serving."""
        if self._task is None:
            _tell(
                f"draining, {_requests(self._ctx.lifecycle.num_open)} running; a second signal ends at once"
            )
            self._task = asyncio.ensure_future(self._drain())

    async def _drain(self) -> None:
        if not await self._ctx.lifecycle.drain():
            left = self._ctx.lifecycle.num_open
            _tell(f"{_requests(left)} did not end in time: cancelled")
            self._ctx.engine.cancel_all()
            await self._ctx.lifecycle.wait_idle(1.0)
        self._server.should_exit = True
