"""Sampling, last pass: what top_k, top_p and min_p keep of a row's candidates, and who wins the race among them.

Exact selection, the core's: tokens in the order of their distance from the best, equal ones by id; top_p sums whole
units. Reads some hundred candidates a row some ten times: limited by latency. A row with more of them than there is
room for is read itself. One program a row.
"""

# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator, attr-defined"
from __future__ import annotations

import triton
import triton.language as tl

from .arithmetic import FARTHEST, distance_key, weight, weight_units
from .bound import behind_levels, sum_levels, wanted_units
from .narrow import cuts, narrowed
from .refine import is_wide
from .rows import (
    BAD_LOGITS,
    FINE_COUNT,
    FINE_HIGH,
    FINE_LOW,
    INF,
    NO_ID,
    STATE,
    float_word,
    is_cut_k,
    is_cut_p,
    is_greedy,
    largest,
    load_key,
    load_logits,
    race,
    row_notes,
)

_CHUNKS = tl.constexpr(128)


@triton.jit
def _best_id(chunk_best, chunk_notes, row, chunks, best):
    """Return the lowest id of the best logit."""
    token = row * 0 + NO_ID
    for begin in range(0, chunks, _CHUNKS):
        at = begin + tl.arange(0, _CHUNKS)
        value = tl.load(chunk_best + (row * 2 + 1) * chunks + at, mask=at < chunks, other=-INF)
        ids = tl.load(chunk_notes + row * 2 * chunks + at, mask=at < chunks, other=NO_ID)
        token = tl.minimum(token, tl.min(tl.where(value == best, ids, NO_ID), axis=0))
    return token


@triton.jit
def _first_of_chunks(race_times, race_ids, row, chunks):
    """Return (time, winner) of a race that was run chunk by chunk."""
    time = tl.full([], INF, tl.float64)
    winner = row * 0 + NO_ID
    for begin in range(0, chunks, _CHUNKS):
        at = begin + tl.arange(0, _CHUNKS)
        times = tl.load(race_times + row * chunks + at, mask=at < chunks, other=INF)
        ids = tl.load(race_ids + row * chunks + at, mask=at < chunks, other=NO_ID)
        least = tl.min(times, axis=0)
        token = tl.min(tl.where(times == least, ids, NO_ID), axis=0)
        winner = tl.where((least < time) | ((least == time) & (token < winner)), token, winner)
        time = tl.minimum(time, least)
    return time, winner


@triton.jit
def _candidates(
    keys, ids, logits, adjusted, words, place, best, begin, count, is_row, vocab_size, TILE: tl.constexpr
):
    """Return a tile of (key, id): of the list, or of the row itself; behind the last FARTHEST and NO_ID."""
    at = begin + tl.arange(0, TILE)
    if is_row:
        x = load_logits(logits, adjusted, words, place, at, vocab_size)
        key = distance_key(x, best, float_word(words, 3))
        token = tl.where(at < count, at, NO_ID)
    else:
        key = tl.load(keys + at, mask=at < count, other=FARTHEST)
        token = tl.load(ids + at, mask=at < count, other=NO_ID)
    return key, token


@triton.jit
def _up_to(number, units, at_most, BY_WEIGHT: tl.constexpr):
    """Return of a tile how many numbers are at most each of 16, int32, or the sums of their units, int64."""
    is_within = number[:, None] <= at_most[None, :]
    if BY_WEIGHT:
        sums = tl.sum(tl.where(is_within, units[:, None], 0), axis=0)
    else:
        sums = tl.sum(is_within.to(tl.int32), axis=0)
    return sums


@triton.jit
def _reach(
    first_number,
    first_units,
    keys,
    ids,
    logits,
    adjusted,
    words,
    place,
    best,
    count,
    is_row,
    vocab_size,
    weight_shift,
    low,
    high,
    target,
    last,
    BY: tl.constexpr,
    TILE: tl.constexpr,
):
    """Return the smallest number of low..high that reaches the target, which high does.

    BY : "count": keys by the number of tokens up to them; "weight": by their weights' sum; "tie": ids among those whose
        key is `last`, by number
    first_number, first_units : the first tile's; the only one of most rows
    """
    while low < high:
        at_most = cuts(low, high)
        sums = _up_to(first_number, first_units, at_most, BY == "weight")
        for begin in range(TILE, count, TILE):
            number, token = _candidates(
                keys, ids, logits, adjusted, words, place, best, begin, count, is_row, vocab_size, TILE
            )
            units = first_units
            if BY == "weight":
                units = weight_units(weight(number), weight_shift)
            if BY == "tie":
                number = tl.where(number == last, token, NO_ID)
            sums += _up_to(number, units, at_most, BY == "weight")
        low, high = narrowed(low, high, sums, target)
    return low


@triton.jit
def _at(key, units, last):
    """Return of a tile the number of tokens nearer than key `last`, their units, and the number at it."""
    is_below = key < last
    num_below = tl.sum(is_below.to(tl.int32), axis=0)
    num_ties = tl.sum((key == last).to(tl.int32), axis=0)
    return num_below, tl.sum(tl.where(is_below, units, 0), axis=0), num_ties


@triton.jit
def _below(
    first_key,
    first_units,
    keys,
    ids,
    logits,
    adjusted,
    words,
    place,
    best,
    count,
    is_row,
    vocab_size,
    weight_shift,
    last,
    TILE: tl.constexpr,
):
    """Return the number of tokens nearer than key `last`, their weights' sum in units, and the number at it."""
    num_below, units_below, num_ties = _at(first_key, first_units, last)
    for begin in range(TILE, count, TILE):
        key, _ = _candidates(
            keys, ids, logits, adjusted, words, place, best, begin, count, is_row, vocab_size, TILE
        )
        below, units, ties = _at(key, weight_units(weight(key), weight_shift), last)
        num_below += below
        units_below += units
        num_ties += ties
    return num_below, units_below, num_ties


@triton.jit
def _is_kept(key, token, w, last, last_tie, min_p):
    """Return which tokens may be drawn."""
    is_kept = (key < last) | ((key == last) & (token <= last_tie))
    return is_kept & (key < FARTHEST) & (w >= min_p)


@triton.jit
def draw(
    logits,
    rows,
    adjusted,
    chunk_best,
    chunk_notes,
    state,
    base_units,
    race_times,
    race_ids,
    level_sums,
    candidate_keys,
    candidate_ids,
    samples,
    vocab_size,
    weight_shift,
    CHUNK: tl.constexpr,
    LEVELS: tl.constexpr,
    WIDE: tl.constexpr,
    CAPACITY: tl.constexpr,
    TILE: tl.constexpr,
):
    """Draw one row's token into its psm_row_sample. Arguments: spec.py."""
    row = tl.program_id(0)
    words = rows + row * 12
    place = row.to(tl.int64) * vocab_size
    chunks = tl.cdiv(vocab_size, CHUNK)
    notes = row_notes(chunk_notes, row, chunks)
    best = largest(chunk_best + (row * 2 + 1) * chunks, chunks)
    cut_k = is_cut_k(words, vocab_size)
    cut_p = is_cut_p(words)
    token = row * 0
    if notes != 0:
        token = tl.where((notes & BAD_LOGITS) != 0, -1, -3)
    elif best == -INF:
        token = row * 0 - 2
    elif is_greedy(words):
        token = _best_id(chunk_best, chunk_notes, row, chunks, best)
    elif ~(cut_k | cut_p):
        _time, token = _first_of_chunks(race_times, race_ids, row, chunks)
    else:
        keys = candidate_keys + row * CAPACITY
        ids = candidate_ids + row * CAPACITY
        found = tl.load(state + row * STATE)
        last = tl.load(state + row * STATE + 3)
        low = row * 0
        # Units of tokens that are nearer than all that are listed, and surely kept.
        base = tl.full([], 0, tl.int64)
        is_part = is_wide(words, state, row, vocab_size, WIDE)
        if is_part:
            num_listed = tl.load(state + row * STATE + FINE_COUNT)
            is_part = num_listed <= CAPACITY
            if is_part:
                found = num_listed
                low = tl.load(state + row * STATE + FINE_LOW)
                last = tl.load(state + row * STATE + FINE_HIGH)
                base = tl.load(base_units + row)
        is_row = found > CAPACITY
        count = tl.where(is_row, vocab_size, found)
        top_k = tl.load(words + 6)
        first_key, first_id = _candidates(
            keys, ids, logits, adjusted, words, place, best, 0, count, is_row, vocab_size, TILE
        )
        first_weight = weight(first_key)
        first_units = weight_units(first_weight, weight_shift)
        num_ties = row * 0
        kept_ties = row * 0
        total = base
        if cut_k:
            if found >= top_k:
                last = _reach(
                    first_key, first_units, keys, ids, logits, adjusted, words, place, best, count, is_row,
                    vocab_size, weight_shift, row * 0, last, top_k, last, "count", TILE,
                )  # fmt: skip
            num_below, units_below, num_ties = _below(
                first_key, first_units, keys, ids, logits, adjusted, words, place, best, count, is_row,
                vocab_size, weight_shift, last, TILE,
            )  # fmt: skip
            kept_ties = tl.minimum(num_ties, top_k - num_below)
            total = units_below + kept_ties * weight_units(weight(last), weight_shift)
        else:
            sums = sum_levels(level_sums, row, chunks, LEVELS)
            total = tl.max(sums, axis=0)
            level_low = behind_levels(sums, wanted_units(float_word(words, 4), total), LEVELS)
            low = tl.maximum(low, level_low)
        if cut_p:
            wanted = wanted_units(float_word(words, 4), total) - base
            last = _reach(
                first_key, first_units, keys, ids, logits, adjusted, words, place, best, count, is_row,
                vocab_size, weight_shift, low, last, wanted, last, "weight", TILE,
            )  # fmt: skip
            _num_below, units_below, num_ties = _below(
                first_key, first_units, keys, ids, logits, adjusted, words, place, best, count, is_row,
                vocab_size, weight_shift, last, TILE,
            )  # fmt: skip
            units = weight_units(weight(last), weight_shift)
            kept_ties = ((wanted - units_below + units - 1) // units).to(tl.int32)
        last_tie = row * 0 + NO_ID
        if kept_ties < num_ties:
            last_tie = _reach(
                tl.where(first_key == last, first_id, NO_ID), first_units, keys, ids, logits, adjusted,
                words, place, best, count, is_row, vocab_size, weight_shift,
                row * 0, row * 0 + vocab_size - 1, kept_ties, last, "tie", TILE,
            )  # fmt: skip
        key_0, key_1 = load_key(state, row)
        time = tl.full([], INF, tl.float64)
        token = row * 0 + NO_ID
        if is_part:
            time, token = _first_of_chunks(race_times, race_ids, row, chunks)
        min_p = float_word(words, 5)
        may_win = _is_kept(first_key, first_id, first_weight, last, last_tie, min_p)
        time, token = race(first_id, first_weight, may_win, key_0, key_1, time, token)
        for begin in range(TILE, count, TILE):
            key, entered = _candidates(
                keys, ids, logits, adjusted, words, place, best, begin, count, is_row, vocab_size, TILE
            )
            w = weight(key)
            may_win = _is_kept(key, entered, w, last, last_tie, min_p)
            time, token = race(entered, w, may_win, key_0, key_1, time, token)
    at = samples + row * 44
    tl.store(at, token)
    tl.store(at + 1, 0)
    tl.store(at + 2, 0)
    tl.store(at + 3, 0)
