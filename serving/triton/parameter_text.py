"""How the text of a parameter is read. Each reader raises ValueError with what it wants."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping
from typing import Any

Reader = Callable[[str], Any]

_TRUE = ("true", "1", "yes", "on")
_FALSE = ("false", "0", "no", "off")
INT32_MAX = 2**31 - 1
INT64_MAX = 2**63 - 1


def plain(text: str) -> str:
    """Return the text itself."""
    return text


def flag(text: str) -> bool:
    """Return a switch; true, 1, yes or on, in any case, and their opposites."""
    if text.lower() in _TRUE:
        return True
    if text.lower() in _FALSE:
        return False
    raise ValueError("true or false")


def integer(low: int, high: int = INT32_MAX) -> Reader:
    """Return the reader of an integer from low to high."""

    def read(text: str) -> int:
        if re.fullmatch(r"[+-]?[0-9]{1,20}", text) and low <= (value := int(text)) <= high:
            return value
        raise ValueError(f"an integer from {low} to {high}")

    return read


def number(low: float, high: float = math.inf, *, above: bool = False) -> Reader:
    """Return the reader of a number from low (or above it) to high."""

    def read(text: str) -> float:
        try:
            value = float(text)
        except ValueError:
            value = math.nan
        if math.isfinite(value) and low <= value <= high and not (above and value == low):
            return value
        bounds = f"{'above' if above else 'at least'} {low:g}"
        raise ValueError(f"a number, {bounds}" + (f" and at most {high:g}" if high < math.inf else ""))

    return read


def integers(low: int, high: int = INT32_MAX) -> Reader:
    """Return the reader of integers with commas between them."""
    one = integer(low, high)

    def read(text: str) -> tuple[int, ...]:
        try:
            return tuple(one(part.strip()) for part in text.split(","))
        except ValueError:
            raise ValueError(f"integers from {low} to {high} with commas between them") from None

    return read


def device_ids(text: str) -> tuple[str, ...]:
    """Return GPUs, numbers or UUIDs with commas between them; semicolons, which stood between instances, too."""
    found = tuple(part.strip() for part in re.split("[,;]", text))
    if all(re.fullmatch(r"[0-9]{1,4}|GPU-[0-9A-Fa-f-]{1,40}", one) for one in found):
        return found
    raise ValueError("the number of a GPU")


def choice(*words: str, aliases: Mapping[str, str] | None = None) -> Reader:
    """Return the reader of one of several words, in any case; an alias stands for a word."""
    meant = {**{word: word for word in words}, **(aliases or {})}

    def read(text: str) -> str:
        if text.lower() in meant:
            return meant[text.lower()]
        raise ValueError("one of " + ", ".join(words))

    return read


def milliseconds_or_auto(text: str) -> float | None:
    """Return a time in milliseconds; None for auto."""
    if text.lower() == "auto":
        return None
    try:
        value: float = number(0, 3_600_000)(text)
    except ValueError:
        raise ValueError("auto, or milliseconds from 0 to 3600000") from None
    return value
