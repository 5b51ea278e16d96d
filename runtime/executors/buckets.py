"""Buckets of decode runs: a few batch sizes and table widths that all others are padded to."""

from __future__ import annotations

import bisect
import itertools

from .runs import Bucket

_STEP = 8


class Buckets:
    """The buckets of a plan's limits.

    max_batch_size : the largest batch, itself a bucket whatever it is
    max_table_width : blocks of the longest sequence
    """

    def __init__(self, max_batch_size: int, max_table_width: int) -> None:
        sizes = [1, 2, 4, *range(_STEP, max_batch_size, _STEP)]
        self.batch_sizes = (*(n for n in sizes if n < max_batch_size), max_batch_size)
        self.max_table_width = max_table_width

    def of(self, batch_size: int, table_width: int) -> Bucket:
        """Return the smallest bucket that a run of these sizes fits into."""
        size = self.batch_sizes[bisect.bisect_left(self.batch_sizes, batch_size)]
        width = min(1 << (table_width - 1).bit_length(), self.max_table_width)
        return Bucket(size, width)

    @property
    def max_padding(self) -> int:
        """The most sequences that a run is padded with."""
        sizes = (0, *self.batch_sizes)
        return max(int(high) - int(low) - 1 for low, high in itertools.pairwise(sizes))

    def num_reserve_blocks(self, tokens_per_block: int) -> int:
        """Return the blocks beyond the core's that padding writes into, one position for each sequence of it."""
        return -(-self.max_padding // tokens_per_block)
