"""Which units a command is about: --only and --shard."""

from __future__ import annotations

import difflib
import fnmatch
import re
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from ..runtime.errors import InvalidArgumentError

if TYPE_CHECKING:
    from .units import Unit

_SHOWN = 12  # names in an error
_WILD = re.compile(r"[*?\[]")


def select(names: Mapping[str, Sequence[str]], only: Sequence[str]) -> set[str]:
    """Return the units that patterns choose: those whose name, or that of a member, one of them matches.

    names : unit -> its members
    only : patterns with * ? [abc], several in one with commas between; * goes over / too; () = all units
    raises InvalidArgumentError for a pattern that matches nothing
    """
    patterns = [word.strip() for text in only for word in text.split(",")]
    if only and not all(patterns):
        raise InvalidArgumentError("--only has an empty pattern; give e.g. 'smol/*', '*/int8/l4' or '*/sm89'")
    chosen: set[str] = set()
    for pattern in patterns:
        found = {
            unit
            for unit, members in names.items()
            if any(fnmatch.fnmatchcase(name, pattern) for name in (unit, *members))
        }
        if not found:
            raise InvalidArgumentError(_no_match(pattern, names))
        chosen |= found
    return chosen if patterns else set(names)


def _no_match(pattern: str, names: Mapping[str, Sequence[str]]) -> str:
    known = list(dict.fromkeys([*names, *(one for members in names.values() for one in members)]))
    near = _near(pattern, known)
    meant = f"did you mean {near}? " if near else ""
    more = f" and {len(known) - _SHOWN} more" if len(known) > _SHOWN else ""
    if near:  # those that it chooses come first
        known.sort(key=lambda name: not fnmatch.fnmatchcase(name, near))
    return f"--only {pattern!r} matches no unit and no member; {meant}There are {', '.join(known[:_SHOWN])}{more}"


def _near(pattern: str, known: Sequence[str]) -> str:
    """Return the pattern that was meant, which matches something; "" where none is near.

    Its words are taken for the nearest ones between the slashes of the names; what has * ? [ stays.
    """
    whole = difflib.get_close_matches(pattern, known, n=1, cutoff=0.6)
    if not _WILD.search(pattern):
        return whole[0] if whole else ""
    spoken = {part: None for name in known for part in name.split("/")}
    words = []
    for word in pattern.lower().split("/"):
        near = [] if _WILD.search(word) else difflib.get_close_matches(word, spoken, n=1, cutoff=0.6)
        words.append(near[0] if near else word)
    meant = "/".join(words)
    return meant if any(fnmatch.fnmatchcase(name, meant) for name in known) else ""


def parse_shard(text: str) -> tuple[int, int]:
    """Return (i, n) of "i/n", 1 <= i <= n."""
    found = re.fullmatch(r"\s*([0-9]{1,6})\s*/\s*([0-9]{1,6})\s*", text)
    if found is None or not 1 <= int(found[1]) <= int(found[2]):
        raise InvalidArgumentError(
            f"--shard is {text!r}, wanted i/n with i from 1 to n; give e.g. 1/3, 2/3 and 3/3 to three jobs"
        )
    return int(found[1]), int(found[2])


def shard(units: Sequence[Unit], i: int, n: int) -> list[Unit]:
    """Return the i-th of n parts of the units, 1 <= i <= n: parts of about the same bytes of weights.

    The same units give the same parts, and units of one key, which are compiled once, are in one part.
    """
    weights: dict[str, int] = {}
    for unit in units:
        weights.setdefault(unit.key, unit.weight_bytes)
    loads = [0] * n
    part_of: dict[str, int] = {}
    # The heaviest first, each to the part with the least so far.
    for key, weight in sorted(weights.items(), key=lambda item: (-item[1], item[0])):
        part = min(range(n), key=lambda idx: (loads[idx], idx))
        loads[part] += weight
        part_of[key] = part
    return [unit for unit in units if part_of[unit.key] == i - 1]
