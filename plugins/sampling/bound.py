"""Sampling, third pass: how far from the best a token of top_k or of the nucleus can be at most.

The k-th best of the blocks' bests is no better than the k-th best token; and the first level whose sum of weights
reaches top_p of the whole holds the nucleus. Little is read: limited by latency. One program a row.
"""

# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator, attr-defined"
from __future__ import annotations

import triton
import triton.language as tl

from .arithmetic import FARTHEST, distance_key
from .narrow import cuts, narrowed
from .rows import INF, STATE, float_word, is_cut_k, is_cut_p, is_greedy, largest, row_notes
from .weigh import level

_BLOCKS = tl.constexpr(1024)  # looked at together
_CHUNKS = tl.constexpr(64)


@triton.jit
def _blocks_within(block_best, blocks, best, temperature, cut_keys):
    """Return how many blocks have a token within each of 16 distances, int32."""
    counts = tl.zeros([16], tl.int32)
    for begin in range(0, blocks, _BLOCKS):
        at = begin + tl.arange(0, _BLOCKS)
        x = tl.load(block_best + at, mask=at < blocks, other=-INF)
        key = distance_key(x, best, temperature)
        counts += tl.sum((key[:, None] <= cut_keys[None, :]).to(tl.int32), axis=0)
    return counts


@triton.jit
def sum_levels(level_sums, row, chunks, LEVELS: tl.constexpr):
    """Return the row's sums of weights at each level, int64 units; the last is the whole."""
    sums = tl.zeros([LEVELS], tl.int64)
    for begin in range(0, chunks, _CHUNKS):
        at = begin + tl.arange(0, _CHUNKS)
        places = ((row * chunks + at) * LEVELS)[:, None] + tl.arange(0, LEVELS)[None, :]
        sums += tl.sum(tl.load(level_sums + places, mask=(at < chunks)[:, None], other=0), axis=0)
    return sums


@triton.jit
def wanted_units(top_p, total):
    """Return the least whole number >= top_p * total (rounded to float64, as the core does), at least 1."""
    wanted = top_p.to(tl.float64) * total.to(tl.float64)
    whole = wanted.to(tl.int64)
    return tl.maximum(whole + (whole.to(tl.float64) < wanted).to(tl.int64), 1)


@triton.jit
def behind_levels(sums, wanted, LEVELS: tl.constexpr):
    """Return the first distance key behind the levels that hold too little."""
    index = tl.arange(0, LEVELS)
    is_short = (sums < wanted) & (index < LEVELS - 1)
    return tl.max(tl.where(is_short, level(index).to(tl.int32, bitcast=True) + 1, 0), axis=0)


@triton.jit
def bound(
    rows,
    block_best,
    chunk_best,
    chunk_notes,
    level_sums,
    state,
    vocab_size,
    CHUNK: tl.constexpr,
    BLOCK: tl.constexpr,
    LEVELS: tl.constexpr,
):
    """Bound one row's candidates. Arguments: spec.py."""
    row = tl.program_id(0)
    words = rows + row * 12
    chunks = tl.cdiv(vocab_size, CHUNK)
    cut_k = is_cut_k(words, vocab_size)
    if ~is_greedy(words) & (cut_k | is_cut_p(words)):
        best = largest(chunk_best + (row * 2 + 1) * chunks, chunks)
        if (row_notes(chunk_notes, row, chunks) == 0) & (best > -INF):
            high = row * 0 + FARTHEST
            if cut_k:
                low = row * 0
                blocks = chunks * (CHUNK // BLOCK)
                top_k = tl.load(words + 6)
                while low < high:
                    counts = _blocks_within(
                        block_best + row * blocks, blocks, best, float_word(words, 3), cuts(low, high)
                    )
                    low, high = narrowed(low, high, counts, top_k)
            else:
                sums = sum_levels(level_sums, row, chunks, LEVELS)
                index = tl.arange(0, LEVELS)
                total = tl.max(sums, axis=0)
                short = (sums < wanted_units(float_word(words, 4), total)).to(tl.int32)
                reached = tl.sum(short, axis=0)
                if reached < LEVELS - 1:
                    high = tl.max(
                        tl.where(index == reached, level(index).to(tl.int32, bitcast=True), 0), axis=0
                    )
            tl.store(state + row * STATE + 3, tl.minimum(high, FARTHEST - 1))
