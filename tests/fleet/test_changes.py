"""What a list of inputs that differ says to people."""

from __future__ import annotations

import pytest
from plansmith.fleet.changes import Change, Pair, explain

ONE, TWO = "1" * 64, "2" * 64


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"limits.max_batch_size": ("32", "64")}, ["limits.max_batch_size: 32 -> 64"]),
        ({"compiler_version": ("1.7", "1.8")}, ["compiler_version: 1.7 -> 1.8"]),
        ({"checkpoint": (ONE, TWO), "spec": (ONE, TWO)}, ["checkpoint: weights or config changed"]),
        ({"spec": (ONE, TWO)}, ["spec: what is read of the config changed"]),
        (
            {"sources": (ONE, TWO), "kernels.sources": (ONE, TWO), "kernels.key": (ONE, TWO)},
            ["sources: plansmith's builder changed"],
        ),
        (
            {"kernels.sources": (ONE, TWO), "kernels.key": (ONE, TWO)},
            ["kernels.sources: plansmith's device kernels changed"],
        ),
        ({"kernels.triton": ("3.6", "3.7"), "kernels.key": (ONE, TWO)}, ["kernels.triton: 3.6 -> 3.7"]),
        ({"kernels.key": ("", TWO), "kernels.triton": ("", "3.6")}, ["kernels.triton: nothing -> 3.6"]),
        ({"tokenizer": (ONE, TWO)}, ["tokenizer: its files changed"]),
        (
            {"precision.name": ("int8", "int4"), "precision.weight_bits": ("8", "4"), "compute": ("a", "b")},
            ["precision.name: int8 -> int4"],
        ),
        ({"precision.group_size": ("null", "64")}, ["precision.group_size: none -> 64"]),
        ({"precision.quantization": (ONE, TWO)}, ["precision.quantization: 111111111111… -> 222222222222…"]),
        # The same change of a draft is told once.
        (
            {"limits.max_batch_size": ("1", "2"), "draft.limits.max_batch_size": ("1", "2")},
            ["limits.max_batch_size: 1 -> 2"],
        ),
        (
            {"sources": (ONE, TWO), "draft.sources": (ONE, TWO), "draft.precision.kv_format": ("a", "b")},
            ["draft.precision.kv_format: a -> b", "sources: plansmith's builder changed"],
        ),
        # A draft that comes or goes is one change.
        ({"draft.precision.name": (None, "int4"), "draft.checkpoint": (None, ONE)}, ["draft: none -> int4"]),
        ({"draft.precision.name": ("int4", None), "draft.checkpoint": (ONE, None)}, ["draft: int4 -> none"]),
        (
            {"draft.precision.name": ("int8", "int4"), "draft.precision.weight_bits": ("8", "4")},
            ["draft.precision.name: int8 -> int4"],
        ),
        ({"new_input": (None, "x")}, ["new_input: none -> x"]),
        ({}, []),
    ],
)
def test_what_is_told(changes: dict[str, Pair], told: list[str]) -> None:
    assert [str(one) for one in explain(changes)] == told


def test_nothing_is_explained_away() -> None:
    """Whatever differs, something is told."""
    for name in ("spec", "kernels.key", "compute", "target.sm", "draft.spec", "precision.kv_format"):
        assert explain({name: ("a", "b")}) == (Change(name, "a", "b"),)
