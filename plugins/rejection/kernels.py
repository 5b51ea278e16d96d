"""Rejection: draft tokens against what the target draws (spec.py has the arguments).

compare and accept read a few numbers a sequence: limited by latency. totals and residual read rows of V
float32 weights: limited by memory's bytes.
"""

# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator, attr-defined"
from __future__ import annotations

import triton
import triton.language as tl

from ..sampling.arithmetic import philox
from ..sampling.rows import INF, NO_ID, race


@triton.jit
def compare(
    drawn,
    drawn_stride,
    draft_tokens,
    cu_draft_lens,
    num_accepted,
    tokens,
    max_draft_len,
    WIDTH: tl.constexpr,
):
    """Accept one sequence's draft tokens up to the first that is not what was drawn."""
    seq = tl.program_id(0)
    first = tl.load(cu_draft_lens + seq)
    count = tl.load(cu_draft_lens + seq + 1) - first
    index = tl.arange(0, WIDTH)
    token = tl.load(drawn + (first + seq + index) * drawn_stride, mask=index <= count, other=-1)
    draft = tl.load(draft_tokens + first + index, mask=index < count, other=-1)
    is_wrong = (index >= count) | (draft != token)  # no draft token is negative, as rows without a token are
    accepted = tl.min(tl.where(is_wrong, index, WIDTH), axis=0)
    tl.store(num_accepted + seq, accepted)
    emitted = tl.where(index <= accepted, token, -1)
    tl.store(tokens + seq * (max_draft_len + 1) + index, emitted, mask=index <= max_draft_len)


@triton.jit
def totals(weights, totals_of, vocab_size, TILE: tl.constexpr):
    """Sum one row of weights in float64."""
    row = tl.program_id(0)
    place = row.to(tl.int64) * vocab_size
    sums = tl.zeros([TILE], tl.float64)
    for begin in range(0, vocab_size, TILE):
        ids = begin + tl.arange(0, TILE)
        sums += tl.load(weights + place + ids, mask=ids < vocab_size, other=0.0).to(tl.float64)
    tl.store(totals_of + row, tl.sum(sums, axis=0))


@triton.jit
def _numbers(rows, row):
    """Return the row's four random uint32: the first accepts, the next two are the key of the residual's race.

    Philox of (output_idx, 1): the draft may have drawn with (output_idx, 0), and must be independent of these.
    """
    words = rows + row * 12
    seed_0 = tl.load(words).to(tl.uint32, bitcast=True)
    seed_1 = tl.load(words + 1).to(tl.uint32, bitcast=True)
    at = tl.load(words + 2).to(tl.uint32, bitcast=True)
    return philox(at, at * 0 + 1, seed_0, seed_1)


@triton.jit
def accept(
    target,
    draft,
    target_totals,
    draft_totals,
    rows,
    draft_tokens,
    cu_draft_lens,
    num_accepted,
    tokens,
    max_draft_len,
    vocab_size,
    WIDTH: tl.constexpr,
):
    """Accept one sequence's draft tokens, each with probability min(1, p / q), up to the first that is not."""
    seq = tl.program_id(0)
    first = tl.load(cu_draft_lens + seq)
    count = tl.load(cu_draft_lens + seq + 1) - first
    index = tl.arange(0, WIDTH)
    is_draft = index < count
    row = first + seq + index
    token = tl.load(draft_tokens + first + index, mask=is_draft, other=0)
    p = tl.load(target + row.to(tl.int64) * vocab_size + token, mask=is_draft, other=0.0).to(tl.float64)
    q = tl.load(draft + (first + index).to(tl.int64) * vocab_size + token, mask=is_draft, other=0.0)
    p_total = tl.load(target_totals + row, mask=is_draft, other=1.0)
    q_total = tl.load(draft_totals + first + index, mask=is_draft, other=1.0)
    words = rows + row * 12
    seed_0 = tl.load(words, mask=is_draft, other=0).to(tl.uint32, bitcast=True)
    seed_1 = tl.load(words + 1, mask=is_draft, other=0).to(tl.uint32, bitcast=True)
    at = tl.load(words + 2, mask=is_draft, other=0).to(tl.uint32, bitcast=True)
    bits, _0, _1, _2 = philox(at, at * 0 + 1, seed_0, seed_1)
    u = (bits.to(tl.float64) + 0.5) * 2.3283064365386963e-10
    is_right = u * q.to(tl.float64) * p_total < p * q_total
    accepted = tl.min(tl.where(is_draft & is_right, WIDTH, index), axis=0)
    tl.store(num_accepted + seq, accepted)
    emitted = tl.where(index < accepted, token, -1)
    tl.store(tokens + seq * (max_draft_len + 1) + index, emitted, mask=index <= max_draft_len)


@triton.jit
def residual(
    target,
    draft,
    target_totals,
    draft_totals,
    rows,
    draft_tokens,
    cu_draft_lens,
    num_accepted,
    tokens,
    max_draft_len,
    vocab_size,
    TILE: tl.constexpr,
):
    """Draw the token behind one sequence's accepted ones: of max(0, p - q), behind the last draft token of p."""
    seq = tl.program_id(0)
    first = tl.load(cu_draft_lens + seq)
    count = tl.load(cu_draft_lens + seq + 1) - first
    accepted = tl.load(num_accepted + seq)
    row = first + seq + accepted
    _0, key_0, key_1, _1 = _numbers(rows, row)
    p_total = tl.load(target_totals + row)
    num_q = tl.where(accepted < count, vocab_size, 0)
    at_q = first + tl.minimum(accepted, tl.maximum(count - 1, 0))
    q_total = tl.load(draft_totals + at_q, mask=accepted < count, other=1.0)
    time = tl.full([], INF, tl.float64)
    winner = row * 0 + NO_ID
    for begin in range(0, vocab_size, TILE):
        ids = begin + tl.arange(0, TILE)
        p = tl.load(target + row.to(tl.int64) * vocab_size + ids, mask=ids < vocab_size, other=0.0)
        q = tl.load(draft + at_q.to(tl.int64) * vocab_size + ids, mask=ids < num_q, other=0.0)
        w = (p.to(tl.float64) / p_total - q.to(tl.float64) / q_total).to(tl.float32)
        time, winner = race(ids, w, w > 0.0, key_0, key_1, time, winner)
    # p and q alike but for rounding, and yet rejected: the draft token is as good a draw.
    spare = tl.load(draft_tokens + at_q, mask=accepted < count, other=0)
    tl.store(tokens + seq * (max_draft_len + 1) + accepted, tl.where(winner == NO_ID, spare, winner))
