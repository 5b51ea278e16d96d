"""From a mixed packed step to the rectangular steps of an RTX plan: what the executor binds.

A packed step (builder/graph/contract.py) is split into one decode step of all sequences with one new token, S = 1,
and one step a prefill chunk, B = 1. None of them has padding rows. `rectangle` makes one [B, S] step of any batch,
with padding, for a plan that was compiled with the "mixed" profile.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence

import numpy as np
import numpy.typing as npt

from ....runtime.errors import InvalidArgumentError
from ...batch import StepBatch
from ...graph import contract as graph_contract
from . import contract

IntArray = npt.NDArray[np.int32]


@dataclasses.dataclass(frozen=True)
class RectangularStep:
    """One run of a plan.

    inputs : name -> array, all of contract.py's inputs but the pools
    logits_idx : for each row of the plan's logits that is wanted, its row in the packed step's logits; fewer than
        the plan's rows (none) when the step wants no logits
    """

    inputs: dict[str, IntArray]
    logits_idx: IntArray


def split(step: StepBatch, num_blocks: int, block_size: int) -> Iterator[RectangularStep]:
    """Yield the rectangular steps of a packed one: the decode tokens together, then each longer chunk alone.

    num_blocks : NB, blocks of each pool; block_size : BS, positions in a block
    raises : as `rectangle`
    """
    lens = np.asarray(step.query_lens)
    decode = np.flatnonzero(lens == 1)
    if decode.size:
        yield rectangle(step, decode.tolist(), num_blocks, block_size)
    for b in np.flatnonzero(lens > 1).tolist():
        yield rectangle(step, [b], num_blocks, block_size)


def rectangle(step: StepBatch, seqs: Sequence[int], num_blocks: int, block_size: int) -> RectangularStep:
    """Return one [B, S] step of the sequences `seqs` of a packed step; S is their longest query.

    raises : InvalidArgumentError if a sequence has no new token, a position has no block, a block is beyond the
        pool, or two sequences write one block
    """
    start = np.concatenate([[0], np.cumsum(step.query_lens)])
    lens = np.asarray(step.query_lens)[list(seqs)]
    kv_lens = np.asarray(step.kv_lens, np.int32)[list(seqs)]
    if lens.size == 0 or lens.min() < 1 or np.any(kv_lens < lens):
        raise InvalidArgumentError(
            f"each sequence of a step needs 1 <= query_lens <= kv_lens, got {lens.tolist()} of {kv_lens.tolist()}"
        )
    rows = int(lens.max())
    ids = np.zeros((len(seqs), rows), np.int32)
    positions = np.zeros_like(ids)
    flat_of: dict[int, int] = {}  # packed row -> row of the flattened rectangle
    for i, (b, n) in enumerate(zip(seqs, lens.tolist(), strict=True)):
        packed = slice(int(start[b]), int(start[b + 1]))
        ids[i, rows - n :] = step.input_ids[packed]
        positions[i, rows - n :] = step.position_ids[packed]
        flat_of.update(
            zip(range(packed.start, packed.stop), range((i + 1) * rows - n, (i + 1) * rows), strict=True)
        )
    table = _table(np.asarray(step.block_table)[list(seqs)], kv_lens, block_size)
    order, lengths, starts = pool_updates(table, lens, kv_lens, rows, num_blocks, block_size)
    wanted = [(r, flat_of[p]) for r, p in enumerate(np.asarray(step.logits_rows).tolist()) if p in flat_of]
    inputs = {
        graph_contract.INPUT_IDS: ids,
        graph_contract.POSITION_IDS: positions,
        graph_contract.KV_LENS: kv_lens,
        graph_contract.BLOCK_TABLE: table,
        graph_contract.LOGITS_ROWS: np.array([f for _, f in wanted] or [ids.size - 1], np.int32),
        contract.KV_TOKEN_ORDER: order,
        contract.KV_UPDATE_LENGTHS: lengths,
        contract.KV_WRITE_STARTS: starts,
    }
    return RectangularStep(inputs, np.array([r for r, _ in wanted], np.int32))


def pool_updates(
    table: IntArray, query_lens: IntArray, kv_lens: IntArray, rows: int, num_blocks: int, block_size: int
) -> tuple[IntArray, IntArray, IntArray]:
    """Return (kv_token_order [U], kv_update_lengths [NB + 1], kv_write_starts [NB]) of right-aligned rows.

    table [B, MB], query_lens and kv_lens [B]; `rows` is S
    raises : InvalidArgumentError as `rectangle`
    """
    flat, blocks, rows_in_block = [], [], []
    for b, (n, held) in enumerate(zip(query_lens.tolist(), kv_lens.tolist(), strict=True)):
        at = np.arange(held - n, held)
        flat.append(np.arange((b + 1) * rows - n, (b + 1) * rows))
        blocks.append(table[b, at // block_size])
        rows_in_block.append(at % block_size)
    block, row = np.concatenate(blocks), np.concatenate(rows_in_block)
    by_place = np.lexsort((row, block))
    block, row = block[by_place], row[by_place]
    if block[-1] >= num_blocks:
        raise InvalidArgumentError(
            f"block {block[-1]} is beyond the pool's {num_blocks} blocks; fix the block table"
        )
    counts = np.bincount(block, minlength=num_blocks)
    first = np.concatenate([[True], block[1:] != block[:-1]])
    # Within a block the rows must run on: a gap or a double means that two sequences write it.
    if np.any(row[1:][~first[1:]] != row[:-1][~first[1:]] + 1):
        raise InvalidArgumentError(
            "two sequences of a step write the same block of the KV pool; give each its own copy"
        )
    starts = np.zeros(num_blocks, np.int32)
    starts[block[first]] = row[first]
    lengths = np.concatenate([[0], np.cumsum(counts)]).astype(np.int32)
    return np.concatenate(flat)[by_place].astype(np.int32), lengths, starts


def _table(table: IntArray, kv_lens: IntArray, block_size: int) -> IntArray:
    """Return the table as wide as the longest sequence needs, unused entries replaced by the sequence's first block."""
    needed = -(-kv_lens // block_size)
    width = int(needed.max())
    if width > table.shape[1]:
        raise InvalidArgumentError(
            f"a sequence holds {int(kv_lens.max())} positions, the block table has {table.shape[1]} blocks of "
            f"{block_size}; give a wider table"
        )
    used = np.arange(width) < needed[:, None]
    table = np.where(used, table[:, :width], table[:, :1]).astype(np.int32)
    if table.min() < 0:
        raise InvalidArgumentError(
            "a position of a sequence has no block in its block table; allocate it first"
        )
    return table
