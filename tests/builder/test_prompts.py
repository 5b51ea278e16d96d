"""Sequences for checking an engine: the same for the same arguments, within the vocabulary and the length."""

from __future__ import annotations

import pathlib
from collections.abc import Callable

from plansmith.builder import prompts
from plansmith.builder.checkpoint import open_checkpoint


def test_sequences(tiny_checkpoint: Callable[[str], pathlib.Path]) -> None:
    checkpoint = open_checkpoint(tiny_checkpoint("llama"))
    one, two = (prompts.make_sequences(checkpoint, 12, 50, 3) for _ in range(2))
    assert one == two and len(one) == 12
    assert all(1 <= len(ids) <= 50 and 0 <= min(ids) <= max(ids) < 320 for ids in one)
    assert len({tuple(ids) for ids in one}) == 12
    assert prompts.make_sequences(checkpoint, 1, 5, 0) != prompts.make_sequences(checkpoint, 1, 4, 0)
