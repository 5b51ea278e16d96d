"""What the kernels of sampling share: a row's parameters, its logits, its best, the race.

The words of a psm_sampling_row (plansmith.h): 0-1 seed, 2 output_idx, 3 temperature, 4 top_p, 5 min_p, 6 top_k,
7 num_logprobs, 8-9 edits, 10 mask.
"""

# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator, attr-defined"
from __future__ import annotations

import triton
import triton.language as tl

from .arithmetic import arrival, draw_bits, upper_bits

INF = tl.constexpr(float("inf"))
NO_ID = tl.constexpr(0x7FFFFFFF)
BAD_LOGITS = tl.constexpr(1)  # notes of a chunk: the logits have NaN or +inf
OVERFLOW = tl.constexpr(2)  # the edits made some
STATE = tl.constexpr(8)  # words of a row's state: spec.py
FINE_COUNT, FINE_LOW, FINE_HIGH = tl.constexpr(4), tl.constexpr(5), tl.constexpr(6)
_CHUNKS = tl.constexpr(128)  # chunks looked at together


@triton.jit
def float_word(words, index):
    """Return a word of a row that is a float32."""
    return tl.load(words + index).to(tl.float32, bitcast=True)


@triton.jit
def is_greedy(words):
    """Return whether the row takes its best token."""
    return (float_word(words, 3) == 0.0) | (tl.load(words + 6) == 1)


@triton.jit
def is_cut_k(words, vocab_size):
    """Return whether top_k takes tokens away."""
    top_k = tl.load(words + 6)
    return (top_k > 0) & (top_k < vocab_size)


@triton.jit
def is_cut_p(words):
    """Return whether top_p may take tokens away."""
    return float_word(words, 4) < 1.0


@triton.jit
def is_adjusted(words):
    """Return whether a mask or edits change the row's logits."""
    return (tl.load(words + 10) >= 0) | (tl.load(words + 8) < tl.load(words + 9))


@triton.jit
def load_logits(logits, adjusted, words, place, ids, vocab_size):
    """Return the logits that tokens are drawn by, fp32; -inf behind the vocabulary. place : the row's first."""
    is_changed = is_adjusted(words)
    num_changed = tl.where(is_changed, vocab_size, 0)
    raw = tl.load(logits + place + ids, mask=ids < vocab_size - num_changed, other=-INF)
    changed = tl.load(adjusted + place + ids, mask=ids < num_changed, other=-INF)
    return tl.where(is_changed, changed, raw)


@triton.jit
def largest(values, count):
    """Return the largest of count fp32 numbers in memory, -inf of none."""
    found = -INF
    for begin in range(0, count, _CHUNKS):
        at = begin + tl.arange(0, _CHUNKS)
        found = tl.maximum(found, tl.max(tl.load(values + at, mask=at < count, other=-INF), axis=0))
    return found


@triton.jit
def row_notes(chunk_notes, row, chunks):
    """Return the notes of all chunks of a row, or-ed: 0 if the row can be drawn."""
    notes = row * 0
    for begin in range(0, chunks, _CHUNKS):
        at = begin + tl.arange(0, _CHUNKS)
        note = tl.load(chunk_notes + (row * 2 + 1) * chunks + at, mask=at < chunks, other=0)
        notes |= tl.max(note & BAD_LOGITS, axis=0) | tl.max(note & OVERFLOW, axis=0)
    return notes


@triton.jit
def race(ids, w, may_win, key_0, key_1, time, winner):
    """Return (time, winner) after these tokens entered the race too: the earliest, the lower id of equal ones.

    ids : int32, each once where may_win; w : fp32 weights. time : fp64, inf at first; winner : int32, NO_ID at first
    The upper half of a token's random bits bounds its time from below (u < -log(1 - u)); the logarithm, in
    float64, is for
    those alone that can still be first: one or two of a chunk. 1.0001 for what rounding takes.
    """
    upper = upper_bits(key_0, key_1, ids).to(tl.int32).to(tl.float32) * 1.52587890625e-05
    limit = w * 1.0001
    can_win = may_win & (w > 0.0) & ~(upper > time.to(tl.float32) * limit)
    early = tl.where(can_win, tl.div_rn(upper + 1.52587890625e-05, w), INF)
    least = tl.min(early, axis=0)
    while least < INF:
        token = tl.min(tl.where(early == least, ids, NO_ID), axis=0)
        token_w = tl.max(tl.where(may_win & (ids == token), w, 0.0), axis=0)
        token_time = arrival(draw_bits(key_0, key_1, token), token_w)
        is_first = (token_time < time) | ((token_time == time) & (token < winner))
        time = tl.where(is_first, token_time, time)
        winner = tl.where(is_first, token, winner)
        early = tl.where((ids == token) | (upper > time.to(tl.float32) * limit), INF, early)
        least = tl.min(early, axis=0)
    return time, winner


@triton.jit
def load_key(state, row):
    """Return the two words of the row's draw, uint32."""
    key_0 = tl.load(state + row * STATE + 1).to(tl.uint32, bitcast=True)
    key_1 = tl.load(state + row * STATE + 2).to(tl.uint32, bitcast=True)
    return key_0, key_1


@triton.jit
def race_chunk(ids, w, may_win, words, state, race_times, race_ids, row, chunk, chunks):
    """Run the race of a chunk's tokens that may win and reach min_p, and store who is first in it."""
    key_0, key_1 = load_key(state, row)
    never = tl.full([], INF, tl.float64)
    time, winner = race(ids, w, may_win & (w >= float_word(words, 5)), key_0, key_1, never, row * 0 + NO_ID)
    tl.store(race_times + row * chunks + chunk, time)
    tl.store(race_ids + row * chunks + chunk, winner)
