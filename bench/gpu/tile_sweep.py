"""Other constants for a kernel than its spec chooses, one set at a time, to see which should be shipped."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from plansmith.plugins.paged_attention import spec


@contextlib.contextmanager
def tile(function: str, chosen: spec.Tile | None) -> Iterator[None]:
    """Let spec's `decode_tile` or `prefill_tile` return `chosen` within the block; None leaves it as it is."""
    before = getattr(spec, function)
    if chosen is not None:
        setattr(spec, function, lambda *_: chosen)
    try:
        yield
    finally:
        setattr(spec, function, before)


def name(tile: spec.Tile) -> str:
    """Return a tile in words."""
    return f"m{tile.m} n{tile.n} warps {tile.num_warps} stages {tile.num_stages}"
