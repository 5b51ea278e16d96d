"""kv_write: a step's K and V go into the paged pools; with rope tables q and K are rotated on the way.

Operation: pool[block_table[b, p // BS], h, p % BS] = k[t, h] for token t of sequence b at position p = kv_len - rows
+ its row in the sequence. With RD > 0 the first RD columns of each head of q and k are rotated as two halves before:
(x1, x2) -> (x1 cos - x2 sin, x2 cos + x1 sin) in float32, then rounded to the activations' type.

    q, q_out      [T, H*D]; k, v [T, KVH*D] fp16, bf16 or fp32; q_out may be q
    cos, sin      [P, RD/2], read at position_ids [T] int32
    pools         [NB, KVH, BS, D] of that type, or E4M3 codes (uint8) or int8 of x / scale, a float32 division
    cu_query_lens [B+1], kv_lens [B], block_table [B, MB] int32; rows of a sequence with kv_len 0, and rows behind the
                  last sequence, are neither read nor written
    num_blocks    NB: then what would lie outside of the table or the pools is left out; None: every step is a real one

Limit: bytes; each number is read once and written once. A program is one token times HEADS heads.
"""

# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator, attr-defined"
from __future__ import annotations

import triton
import triton.language as tl

from ..small_floats import float_to_e4m3, float_to_int8


@triton.jit
def kv_write(
    q, k, v, cos, sin, position_ids, cu_query_lens, kv_lens, block_table, k_scale, v_scale, q_out, k_pool, v_pool,
    num_sequences, num_heads, num_kv_heads, block_shift, table_stride, num_blocks,
    HEADS: tl.constexpr, D: tl.constexpr, DP: tl.constexpr, RD: tl.constexpr, HALF: tl.constexpr, REST: tl.constexpr,
    KV: tl.constexpr,
):  # fmt: skip
    """Program (token, part): the first parts are HEADS heads of K and V each, those behind them HEADS heads of q.

    DP, HALF, REST : D, RD / 2 and D - RD up to a power of two; RD = 0 without rope
    """
    token = tl.program_id(0)
    part = tl.program_id(1)
    # Counting the sequences that end at or before this token takes one parallel load, a binary search log2(B) in a row.
    b = 0
    for first in range(0, num_sequences, 256):
        sequence = first + tl.arange(0, 256)
        ends = tl.load(cu_query_lens + sequence + 1, mask=sequence < num_sequences, other=0)
        b += tl.sum(((ends <= token) & (sequence < num_sequences)).to(tl.int32), 0)
    if b >= num_sequences:
        return
    kv_len = tl.load(kv_lens + b)
    if kv_len == 0:
        return
    kv_parts = (num_kv_heads + HEADS - 1) // HEADS
    if part < kv_parts:
        position = kv_len - tl.load(cu_query_lens + b + 1) + token
        if num_blocks is not None:  # noqa: SIM102 - the branch not taken is not compiled
            if (position < 0) | (position >= table_stride << block_shift):
                return
        block = tl.load(block_table + b.to(tl.int64) * table_stride + (position >> block_shift))
        if num_blocks is not None:  # noqa: SIM102
            if (block < 0) | (block >= num_blocks):
                return
        head = part * HEADS + tl.arange(0, HEADS)
        is_head = head < num_kv_heads
        source = token.to(tl.int64) * num_kv_heads * D + head * D
        row = ((block.to(tl.int64) * num_kv_heads + head) << block_shift) + (
            position & ((1 << block_shift) - 1)
        )
        _copy(v, source, v_pool, row * D, is_head, v_scale, 0, D, DP, KV)
        if RD == 0:
            _copy(k, source, k_pool, row * D, is_head, k_scale, 0, D, DP, KV)
        else:
            at = tl.load(position_ids + token)
            _rotate(k, source, k_pool, row * D, is_head, k_scale, cos, sin, at, D, RD, HALF, REST, KV)
    elif RD != 0:
        head = (part - kv_parts) * HEADS + tl.arange(0, HEADS)
        source = token.to(tl.int64) * num_heads * D + head * D
        at = tl.load(position_ids + token)
        _rotate(q, source, q_out, source, head < num_heads, None, cos, sin, at, D, RD, HALF, REST, "same")


@triton.jit
def _encoded(x, scale, KV: tl.constexpr):
    """Return x as a pool holds it."""
    if KV != "same":
        y = tl.div_rn(x.to(tl.float32), tl.full(x.shape, 1.0, tl.float32) * tl.load(scale))
        if KV == "fp8":  # noqa: SIM108 - the branch not taken is not compiled
            x = float_to_e4m3(y)
        else:
            x = float_to_int8(y)
    return x


@triton.jit
def _copy(
    x, source, pool, target, is_head, scale,
    BEGIN: tl.constexpr, END: tl.constexpr, WIDTH: tl.constexpr, KV: tl.constexpr,
):  # fmt: skip
    """Write columns BEGIN..END-1 of heads at x + source [HEADS] to pool + target [HEADS]."""
    column = BEGIN + tl.arange(0, WIDTH)
    mask = is_head[:, None] & (column < END)[None, :]
    numbers = tl.load(x + source[:, None] + column[None, :], mask=mask, other=0.0)
    tl.store(pool + target[:, None] + column[None, :], _encoded(numbers, scale, KV), mask=mask)


@triton.jit
def _rotate(
    x, source, pool, target, is_head, scale, cos, sin, at,
    D: tl.constexpr, RD: tl.constexpr, HALF: tl.constexpr, REST: tl.constexpr, KV: tl.constexpr,
):  # fmt: skip
    """Write heads at x + source [HEADS], rotated to position `at`, to pool + target [HEADS]."""
    column = tl.arange(0, HALF)
    inside = column < RD // 2
    mask = is_head[:, None] & inside[None, :]
    c = tl.load(cos + at.to(tl.int64) * (RD // 2) + column, mask=inside, other=0.0).to(tl.float32)[None, :]
    s = tl.load(sin + at.to(tl.int64) * (RD // 2) + column, mask=inside, other=0.0).to(tl.float32)[None, :]
    low = tl.load(x + source[:, None] + column[None, :], mask=mask, other=0.0)
    high = tl.load(x + source[:, None] + (RD // 2 + column)[None, :], mask=mask, other=0.0)
    first = (low.to(tl.float32) * c - high.to(tl.float32) * s).to(low.dtype)
    second = (high.to(tl.float32) * c + low.to(tl.float32) * s).to(low.dtype)
    tl.store(pool + target[:, None] + column[None, :], _encoded(first, scale, KV), mask=mask)
    tl.store(pool + target[:, None] + (RD // 2 + column)[None, :], _encoded(second, scale, KV), mask=mask)
    if RD < D:
        _copy(x, source, pool, target, is_head, scale, RD, D, REST, KV)
