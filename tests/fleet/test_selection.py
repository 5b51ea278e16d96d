"""--only and --shard."""

from __future__ import annotations

import dataclasses

import pytest
from hypothesis import given
from hypothesis import strategies as st
from plansmith.fleet.selection import parse_shard, select, shard
from plansmith.runtime.errors import InvalidArgumentError

NAMES = {
    "smol/int8/cpu": ["smol/int8/cpu"],
    "smol/int8/sm89": ["smol/int8/l4", "smol/int8/l40"],
    "smol/int8/sm89@l40s": ["smol/int8/l40s"],
    "big/fp16/sm89": ["big/fp16/l4"],
}


@pytest.mark.parametrize(
    ("only", "wanted"),
    [
        ((), list(NAMES)),
        (("smol/*",), list(NAMES)[:3]),
        (("*/int8/l4",), ["smol/int8/sm89"]),
        (("*/sm89",), ["smol/int8/sm89", "big/fp16/sm89"]),
        (("*/sm89*",), list(NAMES)[1:]),
        (("smol/int8/sm89@l40s",), ["smol/int8/sm89@l40s"]),
        (("*/l4, */cpu",), ["smol/int8/cpu", "smol/int8/sm89", "big/fp16/sm89"]),
        (("*/l4", "*/cpu"), ["smol/int8/cpu", "smol/int8/sm89", "big/fp16/sm89"]),
        (("big/*/l[0-9]",), ["big/fp16/sm89"]),
    ],
)
def test_patterns(only: tuple[str, ...], wanted: list[str]) -> None:
    assert select(NAMES, only) == set(wanted)


@pytest.mark.parametrize(
    ("only", "words"),
    [
        (
            ("smol/int8/sm80",),
            ("'smol/int8/sm80' matches no unit", "did you mean smol/int8/sm89?", "big/fp16/l4"),
        ),
        (("smol/*", "SMOL/*"), ("'SMOL/*'",)),
        (("",), ("empty pattern",)),
        (("smol/*,,big/*",), ("empty pattern",)),
    ],
)
def test_patterns_that_match_nothing(only: tuple[str, ...], words: tuple[str, ...]) -> None:
    with pytest.raises(InvalidArgumentError) as error:
        select(NAMES, only)
    for word in words:
        assert word in str(error.value)


@pytest.mark.parametrize(
    ("pattern", "meant"),
    [
        ("*/l4x", "*/l4"),
        ("smoll/*", "smol/*"),
        ("SMOL/*", "smol/*"),
        ("*/int9/l4*", "*/int8/l4*"),
        ("smoll/int88/sm8?", "smol/int8/sm8?"),
        ("smol/int8/l40x", "smol/int8/l40"),
    ],
)
def test_the_pattern_that_was_meant(pattern: str, meant: str) -> None:
    with pytest.raises(InvalidArgumentError) as error:
        select(NAMES, [pattern])
    assert f"did you mean {meant}? " in str(error.value)
    assert select(NAMES, [meant])


@pytest.mark.parametrize("pattern", ["xyzzy/*", "*/qqq", "big/int8/*", "[", "smol/fp16*"])
def test_nothing_was_meant(pattern: str) -> None:
    with pytest.raises(InvalidArgumentError) as error:
        select(NAMES, [pattern])
    assert "did you mean" not in str(error.value)


def test_the_names_that_were_meant_come_first() -> None:
    names = {f"m/r/sm{n}": [f"m/r/g{n}"] for n in range(20)} | {"m/r/sm89": ["m/r/l4"]}
    with pytest.raises(
        InvalidArgumentError, match=r"did you mean \*/l4\? There are m/r/l4, m/r/sm0, .* and 30 more$"
    ):
        select(names, ["*/l4x"])


def test_a_long_list_of_names_is_cut() -> None:
    with pytest.raises(InvalidArgumentError, match=r"and 28 more$"):
        select({f"m/r/{n}": [] for n in range(40)}, ["x"])


@pytest.mark.parametrize("text", ["", "1", "0/3", "4/3", "a/b", "1/2/3", "-1/2", "1.0/2"])
def test_shards_that_there_are_not(text: str) -> None:
    with pytest.raises(InvalidArgumentError, match="wanted i/n"):
        parse_shard(text)


def test_a_shard() -> None:
    assert parse_shard(" 2/3 ") == (2, 3)


@dataclasses.dataclass(frozen=True)
class Piece:
    """As much of a unit as a shard looks at."""

    name: str
    key: str
    weight_bytes: int


@given(st.lists(st.tuples(st.integers(0, 9), st.integers(1, 1000)), max_size=30), st.integers(1, 6))
def test_shards_are_a_balanced_partition(rows: list[tuple[int, int]], n: int) -> None:
    weights = dict(rows)  # units of one key weigh the same
    units = [Piece(f"u{idx}", f"k{key}", weights[key]) for idx, (key, _) in enumerate(rows)]
    parts = [shard(units, i, n) for i in range(1, n + 1)]  # type: ignore[arg-type]
    assert sorted(one.name for part in parts for one in part) == sorted(one.name for one in units)
    keys = [{one.key for one in part} for part in parts]
    assert sum(map(len, keys)) == len({one.key for one in units})  # a key is in one part
    loads = [sum(weights[int(key[1:])] for key in found) for found in keys]
    # The heaviest part was the lightest when its last unit came.
    assert max(loads) - min(loads) <= max(weights.values(), default=0)
    again = [shard(list(reversed(units)), i, n) for i in range(1, n + 1)]  # type: ignore[arg-type]
    assert [{one.name for one in part} for part in again] == [{one.name for one in part} for part in parts]
