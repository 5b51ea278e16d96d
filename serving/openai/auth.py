"""API keys."""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Sequence
from pathlib import Path

from ...runtime.errors import InvalidArgumentError
from .errors import ApiError

ENVIRONMENT = "PLANSMITH_API_KEY"


def read_keys(given: Sequence[str], environment: str | None, file: Path | None) -> tuple[str, ...]:
    """Return the keys of the command line, the environment (several with commas) and a file (one a line, # comments).

    raises InvalidArgumentError for a key that no header can hold, and for a file without any
    """
    keys = [*given, *(key for key in (environment or "").split(",") if key.strip())]
    if file is not None:
        lines = [line.strip() for line in file.read_text(encoding="utf-8").splitlines()]
        own = [line for line in lines if line and not line.startswith("#")]
        if not own:
            raise InvalidArgumentError(f"--api-key-file {file} has no keys; write one a line")
        keys += own
    keys = [key.strip() for key in keys]
    for key in keys:
        if not key or not key.isascii() or not key.isprintable() or " " in key:
            raise InvalidArgumentError(
                "an API key is empty or has characters that a header cannot hold; use letters and digits"
            )
    return tuple(dict.fromkeys(keys))


class KeyRing:
    """The keys that are accepted."""

    def __init__(self, keys: Sequence[str]) -> None:
        self._digests = [hashlib.sha256(key.encode()).digest() for key in keys]

    def tenant_of(self, authorization: str | None) -> str:
        """Return a name of the key in an Authorization header, "" where none is asked for.

        Every key is compared, each in the same time whatever it is. raises ApiError 401
        """
        if not self._digests:
            return ""
        if authorization is None:
            raise _refused(
                "there is no API key; send the header Authorization: Bearer KEY", "missing_api_key"
            )
        scheme, _, key = authorization.partition(" ")
        digest = hashlib.sha256(key.strip().encode("utf-8", "surrogatepass")).digest()
        found = -1
        for i, known in enumerate(self._digests):
            if hmac.compare_digest(digest, known):
                found = i
        if found < 0 or scheme.lower() != "bearer":
            raise _refused(
                "the API key is wrong; send the header Authorization: Bearer KEY", "invalid_api_key"
            )
        return self._digests[found].hex()[:16]


def _refused(message: str, code: str) -> ApiError:
    return ApiError(401, message, code=code, headers={"WWW-Authenticate": "Bearer"})
