"""Regular expressions out of a checkpoint's config, which comes from anywhere: those that may never end are not run."""

from __future__ import annotations

import math
import re

_MAX_LENGTH = 1000
_NAME = 64  # characters of a layer's name, about
_MAX_WAYS = 1e7  # of matching, all tried for a name that does not match: half a second at most
_NO_OPERATORS = re.compile(
    r"\\.|\[\^?\]?(?:\\.|[^\]\\])*\]", re.DOTALL
)  # escapes and classes: one character each
_GROUP_STARTS = re.compile(r"\(\?(?:[:=!>]|<[=!]|P?<\w+>)")
_LAZY = re.compile(r"([*+?}])[?+]")


def compile_pattern(text: str) -> re.Pattern[str]:
    """Return a pattern that is quick on every name; ValueError says what is wrong with one that is not."""
    if len(text) > _MAX_LENGTH:
        raise ValueError(f"which has {len(text)} characters, at most {_MAX_LENGTH} are read; shorten it")
    try:
        found = re.compile(text)
    except (re.error, OverflowError, RecursionError) as e:
        raise ValueError(f"which is no regular expression ({e}); correct it") from e
    if _ways(text) > _MAX_WAYS:
        raise ValueError(
            "which may take hours to match; write it without repeated groups, with fewer of * + ? |"
        )
    return found


def _ways(text: str) -> float:
    """Return about how many ways there are to try a pattern on a name; infinite where a group is repeated."""
    plain = _LAZY.sub(r"\1", _GROUP_STARTS.sub("(", _NO_OPERATORS.sub("x", text)))
    if re.search(r"\)[*+{]|\(\?|\\", plain):
        return math.inf
    repeats = len(re.findall(r"[*+{]", plain))
    ways = float(_NAME) ** repeats / math.factorial(min(repeats, 20))
    for alternatives in _alternatives(plain):
        ways *= alternatives
    return ways * 2.0 ** plain.count("?")


def _alternatives(plain: str) -> list[int]:
    """Return how many alternatives each group has, and the whole."""
    open_groups, done = [1], []
    for character in plain:
        if character == "(":
            open_groups.append(1)
        elif character == ")" and len(open_groups) > 1:
            done.append(open_groups.pop())
        elif character == "|":
            open_groups[-1] += 1
    return done + open_groups
