"""Ids of requests that a model makes for a client's: no other has them, and the client's own still stops them."""

from __future__ import annotations

import uuid

__all__ = ["inner_id", "stopped_by"]

_MARK = "/inner/"


def inner_id(client_id: str) -> str:
    """Return an id for a request that is made for one of `client_id`, which may be ""."""
    return f"{client_id}{_MARK}{uuid.uuid4().hex}"


def stopped_by(request_id: str) -> tuple[str, ...]:
    """Return the ids that stop a request: its own, and the client's of one that a model made; none for ""."""
    return tuple(name for name in dict.fromkeys((request_id, request_id.partition(_MARK)[0])) if name)
