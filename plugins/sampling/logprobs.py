"""Sampling, after the draw: logs of the model's own probabilities, the token's and the best ones.

The next best token is in the first block with the best of all blocks' bests; once taken, its block is looked at again.
Reads a block and the blocks' bests for each of the at most 20: limited by latency. One program a row.
"""

# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator, attr-defined"
from __future__ import annotations

import triton
import triton.language as tl

from .arithmetic import log_of
from .rows import INF, NO_ID, largest

_BLOCKS = tl.constexpr(2048)
_CHUNKS = tl.constexpr(128)


@triton.jit
def _best_block(bests, blocks):
    """Return (best, block): the best of the blocks' bests, the first such block."""
    best = -INF
    block = blocks * 0
    for begin in range(0, blocks, _BLOCKS):
        at = begin + tl.arange(0, _BLOCKS)
        values = tl.load(bests + at, mask=at < blocks, other=-INF)
        value = tl.max(values, axis=0)
        first = tl.min(tl.where(values == value, at, NO_ID), axis=0)
        block = tl.where(value > best, first, block)
        best = tl.maximum(best, value)
    return best, block


@triton.jit
def logprobs(
    logits,
    rows,
    raw_block_best,
    chunk_best,
    log_sums,
    samples,
    vocab_size,
    CHUNK: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Write one row's log-probabilities into its psm_row_sample. Arguments: spec.py."""
    row = tl.program_id(0)
    place = row.to(tl.int64) * vocab_size
    chunks = tl.cdiv(vocab_size, CHUNK)
    blocks = chunks * (CHUNK // BLOCK)
    bests = raw_block_best + row * blocks
    sample = samples + row * 44
    wanted = tl.load(rows + row * 12 + 7)
    token = tl.load(sample)
    if (wanted > 0) & (token >= 0):
        total = tl.full([], 0.0, tl.float64)
        for begin in range(0, chunks, _CHUNKS):
            at = begin + tl.arange(0, _CHUNKS)
            total += tl.sum(tl.load(log_sums + row * chunks + at, mask=at < chunks, other=0.0), axis=0)
        log_sum = log_of(total) + largest(chunk_best + row * 2 * chunks, chunks).to(tl.float64)
        x = tl.load(logits + place + token).to(tl.float64)
        tl.store(sample + 1, (x - log_sum).to(tl.float32).to(tl.int32, bitcast=True))
        num_top = row * 0
        best, block = _best_block(bests, blocks)
        last = row * 0 - 1
        last_x = best
        while (num_top < wanted) & (best > -INF):
            ids = block * BLOCK + tl.arange(0, BLOCK)
            x_block = tl.load(logits + place + ids, mask=ids < vocab_size, other=-INF)
            is_left = (x_block < last_x) | ((x_block == last_x) & (ids > last))
            last = tl.min(tl.where(is_left & (x_block == best), ids, NO_ID), axis=0)
            last_x = best
            tl.store(sample + 4 + num_top, last)
            logprob = (best.to(tl.float64) - log_sum).to(tl.float32)
            tl.store(sample + 24 + num_top, logprob.to(tl.int32, bitcast=True))
            num_top += 1
            is_left = (x_block < last_x) | ((x_block == last_x) & (ids > last))
            tl.store(bests + block, tl.max(tl.where(is_left, x_block, -INF), axis=0))
            tl.debug_barrier()  # the bests are read by other threads than the one that stored
            best, block = _best_block(bests, blocks)
        tl.store(sample + 2, num_top)
