"""What the server knows of a request besides its body. Kept in the ASGI scope."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from .errors import bad_request

KEY = "plansmith"
_MAX_SALT = 256


@dataclasses.dataclass
class Identity:
    """One request of HTTP.

    request_id : the client's x-request-id, or a new one
    session_id : the client's x-session-id, which is given back for gateways that route by it
    tenant : which API key it came with, "" without keys
    header_salt : of x-cache-salt
    num_prompt_tokens, num_output_tokens : for the access log
    """

    request_id: str
    session_id: str | None = None
    tenant: str = ""
    header_salt: str | None = None
    num_prompt_tokens: int = 0
    num_output_tokens: int = 0


def identity_of(scope: Mapping[str, Any]) -> Identity:
    """Return what the gate has noted of a request."""
    found: Identity = scope[KEY]
    return found


def cache_salt(identity: Identity, body_salt: str | None, *, by_key: bool) -> str | None:
    """Return the salt of a request's cached prefixes: the body's or the header's, behind the key's where that counts.

    raises ApiError 400 for an empty one or one that is too long
    """
    salt = body_salt if body_salt is not None else identity.header_salt
    if salt is not None and not 0 < len(salt) <= _MAX_SALT:
        raise bad_request(
            f"cache_salt has {len(salt)} characters, it must have 1 to {_MAX_SALT}",
            "cache_salt",
            "invalid_value",
        )
    if by_key and identity.tenant:
        return f"{identity.tenant}\n{salt or ''}"
    return salt
