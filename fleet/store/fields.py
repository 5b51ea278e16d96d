"""Reading JSON that came from somewhere else: one error a violated rule, each naming the object."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

from .errors import DamagedError

# Records of a thousand files are below 1 MB; what is larger was not written here.
MAX_JSON_BYTES = 64 << 20

Refuse = Callable[[str], DamagedError]
"""Makes the error of an object from what is wrong with it."""


def dump(value: Any) -> bytes:
    """Return the JSON of a value, the same bytes for equal values. ValueError or TypeError if it is none."""
    text = json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=False, allow_nan=False)
    return text.encode()


def load(raw: bytes, refuse: Refuse) -> dict[str, Any]:
    """Return the JSON object that raw is."""
    try:
        value = json.loads(raw)
    except (ValueError, RecursionError) as error:
        raise refuse(f"is no JSON ({error})") from None
    if not isinstance(value, dict):
        raise refuse("is no JSON object")
    return value


def text(value: dict[str, Any], name: str, refuse: Refuse) -> str:
    """Return a member that has to be text."""
    found = value.get(name)
    if not isinstance(found, str):
        raise refuse(f"has no text {name!r}")
    return found


def number(value: dict[str, Any], name: str, refuse: Refuse) -> int:
    """Return a member that has to be a whole number of at least 0."""
    found = value.get(name)
    if not isinstance(found, int) or isinstance(found, bool) or found < 0:
        raise refuse(f"has no whole number {name!r}")
    return found


def array(value: dict[str, Any], name: str, refuse: Refuse) -> list[Any]:
    """Return a member that has to be an array."""
    found = value.get(name)
    if not isinstance(found, list):
        raise refuse(f"has no array {name!r}")
    return found


def mapping(value: dict[str, Any], name: str, refuse: Refuse) -> dict[str, Any]:
    """Return a member that has to be an object."""
    found = value.get(name)
    if not isinstance(found, dict):
        raise refuse(f"has no object {name!r}")
    return found
