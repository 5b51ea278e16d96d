"""Checks of parameters that users give, each error with the name, the value and what it can be."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from .errors import InvalidArgumentError

_FLOAT32_MAX = (2 - 2**-23) * 2**127
_PLAIN = frozenset({int, float, bool, str, type(None)})


def plain(value: Any) -> Any:
    """Return a value with numpy's numbers in it as Python's own, and its arrays and lists as tuples."""
    if type(value) in _PLAIN:  # almost always, and a bias may have an entry for each token there is
        return value
    if isinstance(value, np.generic):
        return value.item()
    if isinstance(value, np.ndarray):
        return plain(value.tolist())
    if isinstance(value, (list, tuple)):
        return tuple(map(plain, value))
    if isinstance(value, Mapping):
        return {plain(key): plain(one) for key, one in value.items()}
    return value


def entries(name: str, value: object) -> Sequence[Any]:
    """Return a list parameter; a string is a sequence too, but never what is meant."""
    if isinstance(value, str) or not isinstance(value, Sequence):
        raise InvalidArgumentError(f"{name} has {_shown(value)}, it must be a list")
    return value


def _shown(value: object) -> str:
    """Return a value as Python writes it; of an integer with thousands of digits, which it does not, the bits."""
    try:
        return repr(value)
    except ValueError:
        return f"an integer of {value.bit_length()} bits" if isinstance(value, int) else "no text"


def check_int(name: str, value: object, low: int, high: int) -> None:
    """Refuse what is no integer from low to high, both inclusive."""
    # bool is an int in Python; True as a token count is a caller's slip.
    if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
        raise InvalidArgumentError(
            f"{name} is {_shown(value)}, it must be an integer between {low} and {high}"
        )


def is_finite(value: object) -> bool:
    """Return whether a value is a number that float32, the core's type, holds."""
    return isinstance(value, (int, float)) and not isinstance(value, bool) and abs(value) <= _FLOAT32_MAX


def check_float(name: str, value: object, low: float, high: float, *, above: bool = False) -> None:
    """Refuse what is no number from low (or above it) to high."""
    if not is_finite(value) or not low <= value <= high or (above and value == low):  # type: ignore[operator]
        bounds = f"{'above' if above else 'at least'} {low:g}" if low > -math.inf else "finite"
        bounds += f" and at most {high:g}" if high < math.inf else ""
        raise InvalidArgumentError(f"{name} is {_shown(value)}, it must be a number, {bounds}")


def check_bool(name: str, value: object) -> None:
    """Refuse what is neither True nor False."""
    if not isinstance(value, bool):
        raise InvalidArgumentError(f"{name} is {_shown(value)}, it must be True or False")


def check_key(name: str, value: object) -> None:
    """Refuse what `key64` does not take."""
    if isinstance(value, str) and value:
        return
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value < 2**64:
        raise InvalidArgumentError(
            f"{name} is {_shown(value)}, it must be a text, or an integer from 0 to 2**64 - 1"
        )


def key64(value: str | int) -> int:
    """Return the core's number of a name: an integer as it is, a text hashed to 64 bits (never 0, which is "none")."""
    if isinstance(value, int):
        return value
    digest = hashlib.blake2b(value.encode("utf-8", "surrogatepass"), digest_size=8).digest()
    return int.from_bytes(digest, "little") or 1
