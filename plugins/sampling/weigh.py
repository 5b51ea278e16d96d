"""Sampling, second pass: the weights e^((x - best) / temperature), where a row needs them all.

Rows without top_k and top_p race here; of rows with top_p alone the weights are summed, all and those
within some distances
of the best; of rows with num_logprobs e^(x - best) of the raw logits. Reads such rows once more, from L2
if they fit there: limited by arithmetic of about 60 operations a logit. One program a chunk of a row.
"""

# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator, attr-defined"
from __future__ import annotations

import triton
import triton.language as tl

from .arithmetic import FARTHEST, distance_key, weight, weight_units
from .rows import INF, float_word, is_cut_k, is_cut_p, is_greedy, largest, load_logits, race_chunk, row_notes


@triton.jit
def level(index):
    """Return how far below the best the level reaches, fp32: 1/8, 4/8, 9/8, ... in nats."""
    return (index + 1).to(tl.float32) * (index + 1).to(tl.float32) * 0.125


@triton.jit
def weigh(
    logits,
    rows,
    adjusted,
    chunk_best,
    chunk_notes,
    state,
    race_times,
    race_ids,
    log_sums,
    level_sums,
    vocab_size,
    weight_shift,
    CHUNK: tl.constexpr,
    LEVELS: tl.constexpr,
):
    """Weigh one chunk of one row. Arguments: spec.py."""
    chunk, row, chunks = tl.program_id(0), tl.program_id(1), tl.num_programs(0)
    words = rows + row * 12
    place = row.to(tl.int64) * vocab_size
    ids = chunk * CHUNK + tl.arange(0, CHUNK)
    is_drawn = ~is_greedy(words)
    is_drawn &= ~is_cut_k(words, vocab_size)
    has_logprobs = tl.load(words + 7) > 0
    if is_drawn | has_logprobs:
        best = largest(chunk_best + (row * 2 + 1) * chunks, chunks)
        if (row_notes(chunk_notes, row, chunks) == 0) & (best > -INF):
            if is_drawn:
                x = load_logits(logits, adjusted, words, place, ids, vocab_size)
                key = distance_key(x, best, float_word(words, 3))
                w = weight(key)
                if is_cut_p(words):
                    units = weight_units(w, weight_shift)
                    at = level_sums + (row * chunks + chunk) * LEVELS
                    for i in tl.static_range(LEVELS - 1):
                        bits = level(row * 0 + i).to(tl.int32, bitcast=True)
                        tl.store(at + i, tl.sum(tl.where(key <= bits, units, 0), axis=0))
                    tl.store(at + LEVELS - 1, tl.sum(units, axis=0))
                else:
                    race_chunk(ids, w, key < FARTHEST, words, state, race_times, race_ids, row, chunk, chunks)
            if has_logprobs:
                raw_best = largest(chunk_best + row * 2 * chunks, chunks)
                x = tl.load(logits + place + ids, mask=ids < vocab_size, other=-INF)
                w = weight(distance_key(x, raw_best, 1.0))
                tl.store(log_sums + row * chunks + chunk, tl.sum(w.to(tl.float64), axis=0))
