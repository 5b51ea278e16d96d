"""Sampling, for rows of top_p with more candidates than one program searches quickly: a part of them is listed anew.

refine sums the weights up to 32 distances between the two levels around the nucleus' end. regather then lets the tokens
nearer than the 32th that holds the end race where they are, and lists those in it alone. Read such rows twice more,
from L2 if they fit there: limited by arithmetic of about 60 operations a logit. One program a chunk of a row.
"""

# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator, attr-defined"
from __future__ import annotations

import triton
import triton.language as tl

from .arithmetic import weight, weight_units
from .bound import behind_levels, sum_levels, wanted_units
from .gather import chunk_keys, list_candidates
from .rows import (
    FINE_COUNT,
    FINE_HIGH,
    FINE_LOW,
    STATE,
    float_word,
    is_cut_k,
    largest,
    race_chunk,
)


@triton.jit
def is_wide(words, state, row, vocab_size, WIDE: tl.constexpr):
    """Return whether the row has top_p alone, and more than WIDE candidates."""
    return ~is_cut_k(words, vocab_size) & (tl.load(state + row * STATE) > WIDE)


@triton.jit
def _around_end(level_sums, words, state, row, chunks, LEVELS: tl.constexpr):
    """Return (sums at each level, units that the nucleus has to reach, first and last key of where it does)."""
    sums = sum_levels(level_sums, row, chunks, LEVELS)
    wanted = wanted_units(float_word(words, 4), tl.max(sums, axis=0))
    return sums, wanted, behind_levels(sums, wanted, LEVELS), tl.load(state + row * STATE + 3)


@triton.jit
def _fine_end(low, high, index, FINE: tl.constexpr):
    """Return the last distance key of the index-th part of low..high."""
    return tl.minimum(low + ((high - low) // FINE + 1) * (index + 1) - 1, high)


@triton.jit
def refine(
    logits,
    rows,
    adjusted,
    chunk_best,
    level_sums,
    fine_sums,
    state,
    vocab_size,
    weight_shift,
    CHUNK: tl.constexpr,
    LEVELS: tl.constexpr,
    FINE: tl.constexpr,
    WIDE: tl.constexpr,
):
    """Sum one chunk's weights up to each of FINE distances. Arguments: spec.py."""
    chunk, row, chunks = tl.program_id(0), tl.program_id(1), tl.num_programs(0)
    words = rows + row * 12
    if is_wide(words, state, row, vocab_size, WIDE):
        _sums, _wanted, low, high = _around_end(level_sums, words, state, row, chunks, LEVELS)
        best = largest(chunk_best + (row * 2 + 1) * chunks, chunks)
        _ids, key = chunk_keys(logits, adjusted, words, best, row, chunk, vocab_size, CHUNK)
        units = weight_units(weight(key), weight_shift)
        for i in range(FINE):
            is_within = key <= _fine_end(low, high, i, FINE)
            tl.store(
                fine_sums + (row * chunks + chunk) * FINE + i, tl.sum(tl.where(is_within, units, 0), axis=0)
            )


@triton.jit
def regather(
    logits,
    rows,
    adjusted,
    chunk_best,
    level_sums,
    fine_sums,
    state,
    base_units,
    race_times,
    race_ids,
    candidate_keys,
    candidate_ids,
    vocab_size,
    CHUNK: tl.constexpr,
    LEVELS: tl.constexpr,
    FINE: tl.constexpr,
    WIDE: tl.constexpr,
    CAPACITY: tl.constexpr,
):
    """Run one chunk's race of tokens surely kept, and list those that may be. Arguments: spec.py."""
    chunk, row, chunks = tl.program_id(0), tl.program_id(1), tl.num_programs(0)
    words = rows + row * 12
    if is_wide(words, state, row, vocab_size, WIDE):
        sums, wanted, level_low, level_high = _around_end(level_sums, words, state, row, chunks, LEVELS)
        fine = sum_levels(fine_sums, row, chunks, FINE)
        part = tl.sum((fine < wanted).to(tl.int32), axis=0)
        low = tl.where(part > 0, _fine_end(level_low, level_high, part - 1, FINE) + 1, level_low)
        high = _fine_end(level_low, level_high, part, FINE)
        best = largest(chunk_best + (row * 2 + 1) * chunks, chunks)
        ids, key = chunk_keys(logits, adjusted, words, best, row, chunk, vocab_size, CHUNK)
        race_chunk(ids, weight(key), key < low, words, state, race_times, race_ids, row, chunk, chunks)
        is_candidate = (key >= low) & (key <= high)
        list_candidates(
            key, ids, is_candidate, state + row * STATE + FINE_COUNT,
            candidate_keys + row * CAPACITY, candidate_ids + row * CAPACITY, CAPACITY,
        )  # fmt: skip
        if chunk == 0:
            below = tl.maximum(
                tl.max(tl.where(sums < wanted, sums, 0), axis=0),
                tl.max(tl.where(fine < wanted, fine, 0), axis=0),
            )
            tl.store(base_units + row, below)
            tl.store(state + row * STATE + FINE_LOW, low)
            tl.store(state + row * STATE + FINE_HIGH, high)
