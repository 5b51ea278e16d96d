"""Ports for a server: those that are given, checked, and free ones for the others."""

from __future__ import annotations

import contextlib
import dataclasses
import socket

from ...runtime.errors import InvalidArgumentError


@dataclasses.dataclass(frozen=True)
class Ports:
    """The three ports of a tritonserver."""

    http: int
    grpc: int
    metrics: int


def choose_ports(host: str, http: int = 0, grpc: int = 0, metrics: int = 0) -> Ports:
    """Return the given ports, and free ones where 0 is given.

    A free port can be taken by another before the server opens it: then start again with new ones.
    raises : InvalidArgumentError, naming the port that is in use or is given twice
    """
    given = [port for port in (http, grpc, metrics) if port]
    if len(set(given)) != len(given):
        raise InvalidArgumentError(
            f"the ports http {http}, gRPC {grpc} and metrics {metrics} must differ; 0 takes a free one"
        )
    with contextlib.ExitStack() as held:  # all at once, or the same one could come twice
        wanted = {"http": http, "grpc": grpc, "metrics": metrics}
        numbers = [_bound(held, host, port, f"--{name}-port") for name, port in wanted.items()]
    return Ports(*numbers)


def _bound(held: contextlib.ExitStack, host: str, port: int, option: str) -> int:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    one = held.enter_context(socket.socket(family, socket.SOCK_STREAM))
    one.setsockopt(
        socket.SOL_SOCKET, socket.SO_REUSEADDR, 1
    )  # connections that were closed lately do not count
    try:
        one.bind((host, port))
    except OSError as error:
        raise InvalidArgumentError(
            f"port {port} of {host} cannot be opened ({error.strerror}); give another with {option} N, or "
            f"{option} 0 for a free one"
        ) from None
    return int(one.getsockname()[1])
