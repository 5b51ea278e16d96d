"""Dims of values: what leaves a token's columns where they are, and what does not."""

from __future__ import annotations

import pytest
from plansmith.builder.targets.cpu.values import ROWS_AXIS as T
from plansmith.builder.targets.cpu.values import reshape, squeeze, transpose, unsqueeze, width_of
from plansmith.runtime.errors import BuildError


@pytest.mark.parametrize(
    ("dims", "target", "wanted"),
    [
        ((T, 128), (0, 4, 32), (T, 4, 32)),
        ((T, 128), (-1, 4, 32), (T, 4, 32)),
        ((T, 128), (0, -1, 32), (T, 4, 32)),
        ((T, 4, 32), (0, 128), (T, 128)),
        ((T, 4, 32), (0, -1), (T, 128)),
        ((T, 4, 32), (1, -1, 128), (1, T, 128)),
        ((1, T, 128), (-1, 4, 32), (T, 4, 32)),
        ((T, 128), (-1, 64), None),  # two rows of each
        ((T, 128), (0, 4, 16), None),
        ((T, 128), (4, -1, 32), None),  # heads first: rows would be cut
        ((1, 4, T, 32), (1, 4, -1, 32), None),  # its memory is not in that order
    ],
)
def test_reshape(dims: tuple[int, ...], target: tuple[int, ...], wanted: tuple[int, ...] | None) -> None:
    assert reshape(dims, target) == wanted


def test_transpose_moves_the_rows_axis_alone() -> None:
    assert transpose((1, T, 4, 32), (0, 2, 1, 3)) == (1, 4, T, 32)
    assert transpose((1, 4, T, 32), (0, 2, 1, 3)) == (1, T, 4, 32)
    assert transpose((T, 4, 32), (0, 2, 1)) is None


def test_axes_of_size_one() -> None:
    assert unsqueeze((T, 128), [0]) == (1, T, 128) and unsqueeze((T, 128), [-1, 0]) == (1, T, 128, 1)
    assert squeeze((1, T, 128), [0]) == (T, 128)
    with pytest.raises(BuildError, match="only axes of size 1"):
        squeeze((T, 128), [1])
    assert width_of((1, T, 4, 32)) == 128
