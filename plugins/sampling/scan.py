"""Sampling, first pass: masks and edits, the best of each chunk and block, what is wrong with a row.

logits [R, V] fp32 -> adjusted [R, V] (rows with a mask or edits alone), bests and notes of chunks. Reads
every logit once: limited by memory's bytes. One program a chunk of a row.
"""

# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator, attr-defined"
from __future__ import annotations

import triton
import triton.language as tl

from .arithmetic import draw_key
from .rows import BAD_LOGITS, FINE_COUNT, INF, NO_ID, OVERFLOW, STATE

_EDITS = tl.constexpr(128)  # made together


@triton.jit
def _first_edit(edits, begin, end, token):
    """Return the first edit of [begin, end) whose id is at least token; ids ascend."""
    while begin < end:
        middle = (begin + end) // 2
        is_below = tl.load(edits + middle * 4) < token
        begin = tl.where(is_below, middle + 1, begin)
        end = tl.where(is_below, end, middle)
    return begin


@triton.jit
def _edit(edits, begin, end, row_logits):
    """Change the logits of edits [begin, end) in memory."""
    for first in range(begin, end, _EDITS):
        at = first + tl.arange(0, _EDITS)
        is_edit = at < end
        token = tl.load(edits + at * 4, mask=is_edit, other=0)
        factor = tl.load(edits + at * 4 + 1, mask=is_edit, other=0).to(tl.float32, bitcast=True)
        minus = tl.load(edits + at * 4 + 2, mask=is_edit, other=0).to(tl.float32, bitcast=True)
        plus = tl.load(edits + at * 4 + 3, mask=is_edit, other=0).to(tl.float32, bitcast=True)
        x = tl.load(row_logits + token, mask=is_edit, other=0.0)
        x = tl.where(x > 0.0, tl.div_rn(x, factor), x * factor)
        x = x - minus
        tl.store(row_logits + token, x + plus, mask=is_edit)


@triton.jit
def scan(
    logits,
    rows,
    edits,
    masks,
    adjusted,
    block_best,
    raw_block_best,
    chunk_best,
    chunk_notes,
    state,
    vocab_size,
    mask_words,
    CHUNK: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Look at one chunk of one row. Arguments: spec.py."""
    chunk, row, chunks = tl.program_id(0), tl.program_id(1), tl.num_programs(0)
    words = rows + row * 12
    place = row.to(tl.int64) * vocab_size
    ids = chunk * CHUNK + tl.arange(0, CHUNK)
    is_token = ids < vocab_size
    blocks: tl.constexpr = CHUNK // BLOCK
    block_at = (row * chunks + chunk) * blocks + tl.arange(0, blocks)

    x = tl.load(logits + place + ids, mask=is_token, other=-INF)
    is_bad = (x != x) | (x == INF)
    notes = tl.max(is_bad.to(tl.int32), axis=0) * BAD_LOGITS
    best = tl.max(x, axis=0)
    tl.store(chunk_best + row * 2 * chunks + chunk, best)
    if tl.load(words + 7) > 0:
        tl.store(raw_block_best + block_at, tl.max(tl.reshape(x, [blocks, BLOCK]), axis=1))

    mask_idx = tl.load(words + 10)
    edit_begin = tl.load(words + 8)
    edit_end = tl.load(words + 9)
    if (mask_idx >= 0) | (edit_begin < edit_end):
        if mask_idx >= 0:
            mask_at = mask_idx.to(tl.int64) * mask_words + ids // 32
            allowed = tl.load(masks + mask_at, mask=is_token, other=0)
            x = tl.where(((allowed >> (ids % 32)) & 1) == 1, x, -INF)
        tl.store(adjusted + place + ids, x, mask=is_token)
        first = _first_edit(edits, edit_begin, edit_end, chunk * CHUNK)
        last = _first_edit(edits, first, edit_end, (chunk + 1) * CHUNK)
        if first < last:
            tl.debug_barrier()  # the edits' threads are not those that stored the logits
            _edit(edits, first, last, adjusted + place)
            tl.debug_barrier()
            x = tl.load(adjusted + place + ids, mask=is_token, other=-INF)
            is_over = (x != x) | (x == INF)
            notes |= tl.max(is_over.to(tl.int32), axis=0) * OVERFLOW
        best = tl.max(x, axis=0)
    tl.store(block_best + block_at, tl.max(tl.reshape(x, [blocks, BLOCK]), axis=1))
    tl.store(chunk_best + (row * 2 + 1) * chunks + chunk, best)
    tl.store(chunk_notes + row * 2 * chunks + chunk, tl.min(tl.where(x == best, ids, NO_ID), axis=0))
    tl.store(chunk_notes + (row * 2 + 1) * chunks + chunk, notes)
    if chunk == 0:
        seed_0 = tl.load(words).to(tl.uint32, bitcast=True)
        seed_1 = tl.load(words + 1).to(tl.uint32, bitcast=True)
        key_0, key_1 = draw_key(seed_0, seed_1, tl.load(words + 2).to(tl.uint32, bitcast=True))
        tl.store(state + row * STATE, 0)
        tl.store(state + row * STATE + FINE_COUNT, 0)
        tl.store(state + row * STATE + 1, key_0.to(tl.int32, bitcast=True))
        tl.store(state + row * STATE + 2, key_1.to(tl.int32, bitcast=True))
