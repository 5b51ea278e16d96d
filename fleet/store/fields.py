"""Reading JSON that came from somewhere else: one error a violated rule, each naming the object."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

from .errors import DamagedError

# Records of a thousand files are below 1 MB; what is larger was not written here.
MAX_JSON_BYTES = 64 << 20

# More digits than a number of 64 bits has were not written here either, and make errors long.
_MAX_DIGITS = 20
# How much of a text an error repeats: a sha256 and a little more.
_MAX_QUOTED = 80

# Of texts that have lines, what a terminal would obey.
_CONTROLS = {code: "\ufffd" for code in (*range(0x20), *range(0x7F, 0xA0)) if chr(code) not in "\n\t"}

Refuse = Callable[[str], DamagedError]
"""Makes the error of an object from what is wrong with it."""


def dump(value: Any) -> bytes:
    """Return the JSON of a value, the same bytes for equal values. ValueError or TypeError if it is none."""
    text = json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=False, allow_nan=False)
    return text.encode()


def load(raw: bytes, refuse: Refuse) -> dict[str, Any]:
    """Return the JSON object that raw is: UTF-8, with text that is it too, and no number of many digits."""
    try:
        value = json.loads(raw.decode(), parse_int=_integer, parse_constant=_no_constant)
        if b"\\ud" in raw.lower():  # half of a pair is JSON, and no text
            dump(value)
    except (UnicodeDecodeError, UnicodeEncodeError) as error:
        raise refuse(f"has text that is not UTF-8 ({error.reason})") from None
    except (ValueError, RecursionError) as error:
        raise refuse(f"is no JSON ({error})") from None
    if not isinstance(value, dict):
        raise refuse("is no JSON object")
    return value


def _integer(digits: str) -> int:
    if len(digits) > _MAX_DIGITS:
        raise ValueError(f"a number of {len(digits)} digits")
    return int(digits)


def _no_constant(name: str) -> float:
    raise ValueError(f"{name} is no number")


def quoted(found: str) -> str:
    """Return a text as errors repeat it: cut where it is long, nothing in it that a terminal obeys."""
    return repr(found) if len(found) <= _MAX_QUOTED else f"{found[:_MAX_QUOTED]!r}..."


def shown(value: Any) -> Any:
    """Return a JSON value whose texts may have lines, without what a terminal would obey."""
    if isinstance(value, str):
        return value.translate(_CONTROLS)
    if isinstance(value, dict):
        return {shown(name): shown(one) for name, one in value.items()}
    return [shown(one) for one in value] if isinstance(value, list) else value


def text(value: dict[str, Any], name: str, refuse: Refuse) -> str:
    """Return a member that has to be text of one line, every character of it printable."""
    found = value.get(name)
    if not isinstance(found, str):
        raise refuse(f"has no text {name!r}")
    if not found.isprintable():
        raise refuse(f"has {name} {quoted(found)}, which is not printable")
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
