"""Sampling, fourth pass: the candidates of top_k and top_p, in no order.

Reads rows with top_k or top_p once more: limited by L2's bytes. One program a chunk of a row.
"""

# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator, attr-defined"
from __future__ import annotations

import triton
import triton.language as tl

from .arithmetic import distance_key
from .rows import INF, STATE, float_word, is_cut_k, is_cut_p, is_greedy, largest, load_logits, row_notes


@triton.jit
def chunk_keys(logits, adjusted, words, best, row, chunk, vocab_size, CHUNK: tl.constexpr):
    """Return (ids, their distance keys) of one chunk of a row."""
    ids = chunk * CHUNK + tl.arange(0, CHUNK)
    x = load_logits(logits, adjusted, words, row.to(tl.int64) * vocab_size, ids, vocab_size)
    return ids, distance_key(x, best, float_word(words, 3))


@triton.jit
def list_candidates(key, ids, is_candidate, counter, keys, listed_ids, CAPACITY: tl.constexpr):
    """Add a chunk's candidates to a row's list, whose length is counter; it goes on where there is no room."""
    count = tl.sum(is_candidate.to(tl.int32), axis=0)
    if count > 0:
        begin = tl.atomic_add(counter, count)
        at = begin + tl.cumsum(is_candidate.to(tl.int32), axis=0) - 1
        is_stored = is_candidate & (at < CAPACITY)
        tl.store(keys + at, key, mask=is_stored)
        tl.store(listed_ids + at, ids, mask=is_stored)


@triton.jit
def gather(
    logits,
    rows,
    adjusted,
    chunk_best,
    chunk_notes,
    state,
    candidate_keys,
    candidate_ids,
    vocab_size,
    CHUNK: tl.constexpr,
    CAPACITY: tl.constexpr,
):
    """Gather one chunk's candidates. Arguments: spec.py."""
    chunk, row, chunks = tl.program_id(0), tl.program_id(1), tl.num_programs(0)
    words = rows + row * 12
    if ~is_greedy(words) & (is_cut_k(words, vocab_size) | is_cut_p(words)):
        best = largest(chunk_best + (row * 2 + 1) * chunks, chunks)
        if (row_notes(chunk_notes, row, chunks) == 0) & (best > -INF):
            ids, key = chunk_keys(logits, adjusted, words, best, row, chunk, vocab_size, CHUNK)
            list_candidates(
                key, ids, key <= tl.load(state + row * STATE + 3), state + row * STATE,
                candidate_keys + row * CAPACITY, candidate_ids + row * CAPACITY, CAPACITY,
            )  # fmt: skip
