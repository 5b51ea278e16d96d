"""Mixed steps as the runs of a rectangular plan: inputs [B, S], right-aligned, with pool updates ordered by block.

A packed step becomes one decode run of all sequences with one new token (S = 1) and one run for each longer chunk
(B = 1); neither has padding rows. A decode run may be padded to a bucket with sequences of one token each, which go to
blocks behind the pool's own, one position after another, so that no two tokens share a place. `rectangle` makes
one [B, S] run of any sequences, padding rows first, for plans compiled with the "mixed" profile.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import numpy.typing as npt

from ..batch import Int32Array
from ..errors import InvalidArgumentError
from . import runs
from .buckets import Buckets
from .runs import Bucket, Run, Step

_Ints = npt.NDArray[np.intp]


def split(
    step: Step, num_blocks: int, block_size: int, buckets: Buckets | None = None, num_reserve_blocks: int = 0
) -> Iterator[Run]:
    """Yield the runs of a packed step: the decode tokens together, then each longer chunk alone.

    num_blocks : blocks that sequences may have; block_size : BS, positions in a block
    buckets, num_reserve_blocks : pad the decode run to its bucket; the pools then have that many blocks more
    raises : as `rectangle`
    """
    decode = np.flatnonzero(step.query_lens == 1)
    if decode.size:
        yield rectangle(step, decode, num_blocks, block_size, buckets, num_reserve_blocks)
    for b in np.flatnonzero(step.query_lens != 1):
        yield rectangle(step, np.array([b]), num_blocks, block_size, None, num_reserve_blocks)


def num_rows(step: Step, buckets: Buckets) -> int:
    """Return the rows of logits that the runs of a step compute, its decode run padded to its bucket."""
    if step.input_ids.size == step.query_lens.size:  # the usual step: all decode
        return buckets.of(step.query_lens.size, 1).batch_size
    decode = step.query_lens == 1
    count = int(decode.sum())
    if count == 0:
        return int(step.logits_rows.size)
    # The decode run has rows for all, wanted or not.
    own = runs.rows_of(step)[step.cu_query_lens[:-1][decode]]
    return buckets.of(count, 1).batch_size + int(step.logits_rows.size - (own >= 0).sum())


def rectangle(
    step: Step,
    seqs: _Ints,
    num_blocks: int,
    block_size: int,
    buckets: Buckets | None = None,
    num_reserve_blocks: int = 0,
) -> Run:
    """Return one [B, S] run of the sequences `seqs` of a packed step; S is their longest query.

    buckets : pad to the bucket; for sequences with one new token each
    raises : InvalidArgumentError if a sequence has no new token, a position has no block, a block is beyond the
        pool, or two sequences write one block
    """
    lens, kv_lens = step.query_lens[seqs], step.kv_lens[seqs]
    if lens.size == 0 or lens.min() < 1 or np.any(kv_lens < lens):
        raise InvalidArgumentError(
            f"each sequence of a step needs 1 <= query_lens <= kv_lens, got {lens.tolist()} of {kv_lens.tolist()}"
        )
    table = trim_table(step.block_table[seqs], kv_lens, block_size)
    rows = int(lens.max())
    of_seq, flat, packed, at = _tokens(step.cu_query_lens[seqs], lens, kv_lens, rows)
    blocks, in_block = table[of_seq, at // block_size], (at % block_size).astype(np.int32)
    if blocks.max() >= num_blocks:
        raise InvalidArgumentError(
            f"block {blocks.max()} is beyond the pool's {num_blocks} blocks; fix the block table"
        )
    bucket = None if buckets is None else buckets.of(lens.size, table.shape[1])
    size = lens.size if bucket is None else bucket.batch_size
    ids, positions = np.zeros((2, size * rows), np.int32)
    ids[flat] = step.input_ids[packed]
    positions[flat] = step.position_ids[packed]
    wanted = runs.rows_of(step)[packed]
    if bucket is None:
        logits_rows, logits_idx = _wanted_rows(flat, wanted, size * rows)
    else:
        table, kv_lens = _pad(table, kv_lens, bucket, num_blocks)
        extra = np.arange(size - lens.size)
        flat = np.concatenate([flat, lens.size + extra])
        blocks = np.concatenate([blocks, num_blocks + extra // block_size])
        in_block = np.concatenate([in_block, extra % block_size])
        logits_rows = np.arange(size, dtype=np.int32)
        logits_idx = np.concatenate([wanted, np.full(extra.size, -1, np.int32)])
    order, lengths, starts = pool_updates(flat, blocks, in_block, num_blocks + num_reserve_blocks)
    inputs = {
        runs.INPUT_IDS: ids.reshape(size, rows),
        runs.POSITION_IDS: positions.reshape(size, rows),
        runs.KV_LENS: kv_lens,
        runs.BLOCK_TABLE: table,
        runs.LOGITS_ROWS: logits_rows,
        runs.KV_TOKEN_ORDER: order,
        runs.KV_UPDATE_LENGTHS: lengths,
        runs.KV_WRITE_STARTS: starts,
    }
    return Run(inputs, logits_idx, bucket)


def pool_updates(
    flat: npt.NDArray[np.integer],
    blocks: npt.NDArray[np.integer],
    rows: npt.NDArray[np.integer],
    num_blocks: int,
) -> tuple[Int32Array, Int32Array, Int32Array]:
    """Return (kv_token_order [U], kv_update_lengths [NB + 1], kv_write_starts [NB]) of U tokens.

    flat, blocks, rows : (U,) each token's row of the flattened rectangle, its block and its row in that
    num_blocks : NB, above every block
    raises : InvalidArgumentError if the rows of a block do not run on
    """
    by_place = np.lexsort((rows, blocks))
    block, row = blocks[by_place], rows[by_place]
    is_first = np.empty(block.size, bool)
    is_first[0] = True
    np.not_equal(block[1:], block[:-1], out=is_first[1:])
    # Within a block the rows must run on: a gap or a double means that two sequences write it.
    if np.any((row[1:] != row[:-1] + 1) & ~is_first[1:]):
        raise InvalidArgumentError(
            "two sequences of a step write the same block of the KV pool; give each its own copy"
        )
    first = np.flatnonzero(is_first)
    written = block[first]
    starts = np.zeros(num_blocks, np.int32)
    starts[written] = row[first]
    lengths = np.zeros(num_blocks + 1, np.int32)
    lengths[written + 1] = np.diff(first, append=block.size)
    np.cumsum(lengths, out=lengths)
    return flat[by_place].astype(np.int32), lengths, starts


def trim_table(table: Int32Array, kv_lens: Int32Array, block_size: int) -> Int32Array:
    """Return (B, MB) as wide as the longest sequence needs, unused entries replaced by the sequence's first block.

    raises : InvalidArgumentError where a position has no block
    """
    needed = -(-kv_lens // block_size)
    width = int(needed.max())
    if width > table.shape[1]:
        raise InvalidArgumentError(
            f"a sequence holds {int(kv_lens.max())} positions, the block table has {table.shape[1]} blocks of "
            f"{block_size}; give a wider table"
        )
    used = np.arange(width) < needed[:, None]
    trimmed = np.where(used, table[:, :width], table[:, :1]).astype(np.int32, copy=False)
    if trimmed.min() < 0:
        raise InvalidArgumentError(
            "a position of a sequence has no block in its block table; allocate it first"
        )
    return trimmed


def _tokens(
    firsts: Int32Array, lens: Int32Array, kv_lens: Int32Array, rows: int
) -> tuple[_Ints, _Ints, npt.NDArray[np.integer], npt.NDArray[np.integer]]:
    """Return, for each new token of some sequences, its sequence, its row of the flattened rectangle, which of the
    step's tokens it is, and its position.

    firsts : (B,) each sequence's first token of the step; lens, kv_lens : (B,); rows : S
    """
    if rows == 1:  # a decode run: what follows, in a few operations
        of_seq = np.arange(lens.size)
        return of_seq, of_seq, firsts, kv_lens - 1
    of_seq = np.repeat(np.arange(lens.size), lens)
    nth = np.arange(of_seq.size) - (np.cumsum(lens) - lens)[of_seq]
    return (
        of_seq,
        (of_seq + 1) * rows - lens[of_seq] + nth,
        firsts[of_seq] + nth,
        (kv_lens - lens)[of_seq] + nth,
    )


def _wanted_rows(
    flat: npt.NDArray[np.integer], wanted: Int32Array, count: int
) -> tuple[Int32Array, Int32Array]:
    """Return logits_rows and logits_idx of a run: what is wanted, or its last row, which nobody wants."""
    chosen = np.flatnonzero(wanted >= 0)
    if chosen.size == 0:
        return np.array([count - 1], np.int32), np.array([-1], np.int32)
    chosen = chosen[np.argsort(wanted[chosen], kind="stable")]
    return flat[chosen].astype(np.int32), wanted[chosen]


def _pad(
    table: Int32Array, kv_lens: Int32Array, bucket: Bucket, scratch_block: int
) -> tuple[Int32Array, Int32Array]:
    """Return table and kv_lens of a bucket: further columns repeat the first block, further sequences hold a token."""
    padded = np.full((bucket.batch_size, bucket.table_width), scratch_block, np.int32)
    padded[: table.shape[0]] = table[:, :1]
    padded[: table.shape[0], : table.shape[1]] = table
    lens = np.ones(bucket.batch_size, np.int32)
    lens[: kv_lens.size] = kv_lens
    return padded, lens
