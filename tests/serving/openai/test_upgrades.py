"""Offers of other protocols are taken out of heads, however these are cut."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from plansmith.serving.openai.upgrades import UpgradeFilter

HEAD = b"POST / HTTP/1.1\r\nHost: x\r\nUpgrade: h2c\r\nX-Upgrade: no\r\nY: upgrade: no\r\nupgrade:\r\nup: 1\r\n\r\n"
WANTED = b"POST / HTTP/1.1\r\nHost: x\r\nX-Upgrade: no\r\nY: upgrade: no\r\nup: 1\r\n\r\n"
BODY = b"upgrade: a\r\nupgrade: b\r\n\r\n"


@pytest.mark.parametrize("size", range(1, 30))
def test_pieces_of_any_size_make_the_same_head(size: int) -> None:
    heads = UpgradeFilter()
    for _ in range(2):
        assert b"".join(heads.feed(HEAD[at : at + size]) for at in range(0, len(HEAD), size)) == WANTED


@given(st.lists(st.integers(1, 20), max_size=30))
def test_what_is_behind_the_head_is_left_alone(sizes: list[int]) -> None:
    heads, out, at = UpgradeFilter(), b"", 0
    for size in sizes:
        if at + size >= len(HEAD):
            break
        out += heads.feed(HEAD[at : at + size])
        at += size
    assert out + heads.feed(HEAD[at:] + BODY) == WANTED + BODY


def test_what_is_no_head_passes_at_once() -> None:
    assert UpgradeFilter().feed(b"\x16\x03\x01") == b"\x16\x03\x01"
