"""PagedAttention over pools of pages: `decode` and `combine` for few query rows a sequence, `prefill` for many.

Operation: out[t, h] = sum over p of softmax(scale * k_scale * q[t, h].K[p]) * V[p] * v_scale, over the positions p
that row t of its sequence sees: all up to its own (the last row is at kv_len - 1), at most `reach` of them. Products
are of fp16 or bf16, all else is float32. With softcap, s -> softcap * tanh(s / softcap) before the softmax.

    q, out        [T, H*D] fp16 or bf16
    pools         [NB, KVH, BS, D] of that type, or E4M3 codes (uint8) or int8, with k_scale and v_scale (device memory)
    cu_query_lens [B+1], kv_lens [B], block_table [B, MB] int32; a sequence with kv_len 0 or no rows is left alone
    partials      [B, QR, H, S, D] float32: a split's sum; stats [B, QR, H, S, 2]: its largest score (base 2) and weight
    num_tokens, num_blocks  T and NB: then lengths that no step has end a program, and blocks that no pool has are
                  taken for others; None: every step is a real one

`decode` takes the sequences with 1..query_rows rows, `prefill` those with more, so one launch of each covers any mixed
step, with grids that follow from shapes alone. Limits: decode reads each K and V once for all heads of a group and all
rows of a sequence (bytes); prefill does 4*D operations a pair of row and position (arithmetic).

What holds exactly. Tiles of N positions begin at multiples of N and are taken in ascending order; splits begin at
multiples of split_len; a position that a row does not see adds exact zeros. So a row's bits depend on its own q, the
K and V that it sees, its position, the kernel (its tile) and, in `decode`, split_len: not on the other sequences, on
the blocks that hold its context, on the other rows of its step, on the number of splits launched, nor on how the
prompt was cut into chunks of more than query_rows rows. `decode` and `prefill` add in a different order and agree
within rounding only: a chunk of query_rows rows or fewer is `decode`'s. With query_rows = 0 everything is `prefill`'s
and no chunking shows. A NaN or infinity in V at a position that a row does not see may reach it (0 * NaN) if it is a
position of its own sequence that another row of the step sees; nothing else can.
"""

# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator, attr-defined"
from __future__ import annotations

import os

import triton
import triton.language as tl

from ..small_floats import e4m3_words_to_halves, int8_words_to_halves

LOG2E = tl.constexpr(1.4426950408889634)
INTERPRETED = tl.constexpr(os.environ.get("TRITON_INTERPRET") == "1")


@triton.jit
def _dot(a, b, acc):
    """Return acc + a b in float32."""
    if INTERPRETED:  # which multiplies the bits of bfloat16 as integers
        a, b = a.to(tl.float32), b.to(tl.float32)
    return tl.dot(a, b, acc)


@triton.jit
def _load(
    pool, offsets, held, dtype: tl.constexpr,
    MASKED: tl.constexpr, D: tl.constexpr, DP: tl.constexpr, KV: tl.constexpr,
):  # fmt: skip
    """Return a tile [N, DP] of a pool in dtype, unscaled; zeros beyond the head size and, if MASKED, where not held.

    offsets : [N], of the tile's rows, in numbers
    """
    if KV == "same":
        offs_d = tl.arange(0, DP)
        pointers = pool + offsets[:, None] + offs_d[None, :]
        inside = offs_d < D
    else:
        offs_d = tl.arange(0, DP // 4)
        pointers = pool.to(tl.pointer_type(tl.int32)) + (offsets // 4)[:, None] + offs_d[None, :]
        inside = offs_d < D // 4
    if MASKED and D == DP:
        tile = tl.load(pointers, mask=held[:, None], other=0)
    elif MASKED:
        tile = tl.load(pointers, mask=held[:, None] & inside[None, :], other=0)
    elif D == DP:
        tile = tl.load(pointers)
    else:
        tile = tl.load(pointers, mask=inside[None, :], other=0)
    if KV == "fp8":
        tile = e4m3_words_to_halves(tile)
    elif KV == "int8":
        tile = int8_words_to_halves(tile)
    if KV != "same" and dtype != tl.float16:
        tile = tile.to(tl.float32)  # no instruction makes bfloat16 of float16
    return tile.to(dtype)


@triton.jit
def _is_no_step(first_row, end_row, kv_len, num_tokens, capacity):
    """Return whether no step has such a sequence; num_tokens None: it is not asked."""
    is_none = False
    if num_tokens is not None:
        # Where the difference overflows, one of the first two says so.
        is_none = (
            (first_row < 0) | (end_row > num_tokens) | (kv_len < end_row - first_row) | (kv_len > capacity)
        )
    return is_none


@triton.jit
def _blocks(table, positions, wanted, block_shift, num_blocks):
    """Return the blocks [N] that hold positions, where wanted; elsewhere some block."""
    block = tl.load(table + (positions >> block_shift), mask=wanted, other=0)
    if num_blocks is not None:
        block = tl.minimum(tl.maximum(block, 0), num_blocks - 1)
    return block


@triton.jit
def _tiles(
    q, k_pool, v_pool, table, acc, largest, weight, row_positions, begin, end, start, stop, reach, kv_head,
    num_kv_heads, block_shift, num_blocks, score_scale, cap_scale,
    MASKED: tl.constexpr, N: tl.constexpr, D: tl.constexpr, DP: tl.constexpr, KV: tl.constexpr,
):  # fmt: skip
    """Take the tiles of N positions from start to stop into the online softmax (acc [M, DP], largest [M], weight [M]).

    begin, end : MASKED: positions outside are not loaded, since their blocks may be unused or another's
    score_scale : q.k to base-2 exponents; with softcap: to twice the tanh's argument in base 2
    cap_scale : softcap in base-2 exponents, or None
    """
    offs_n = tl.arange(0, N)
    block_step = (num_kv_heads << block_shift) * D
    k_pool += (kv_head << block_shift) * D
    v_pool += (kv_head << block_shift) * D
    # A tile's blocks are read one tile ahead: the loads of K and V do not wait for them, and can themselves run ahead.
    wanted = start + offs_n < stop
    if MASKED:
        wanted = (start + offs_n >= begin) & (start + offs_n < end)
    block = _blocks(table, start + offs_n, wanted, block_shift, num_blocks)
    # One or two masked tiles gain nothing by loads that run ahead, which cost registers.
    for first in tl.range(start, stop, N, num_stages=1 if MASKED else None):
        positions = first + offs_n
        held = (positions >= begin) & (positions < end)
        in_block = positions & ((1 << block_shift) - 1)
        offsets = block.to(tl.int64) * block_step + in_block * D
        k = _load(k_pool, offsets, held, q.dtype, MASKED, D, DP, KV)
        score = _dot(q, tl.trans(k), None) * score_scale
        if cap_scale is not None:
            # tanh(x) = 1 - 2 / (1 + e^2x): its error is a float32 rounding of 1, the score's is that times the cap.
            score = cap_scale - 2.0 * cap_scale / (1.0 + tl.exp2(score))
        if MASKED:
            # Positions outside begin..end are outside every row's view as well, so this needs no third condition.
            gap = row_positions[:, None] - positions[None, :]
            seen = (gap >= 0) & (gap < reach)
            score = tl.where(seen, score, float("-inf"))
        new_largest = tl.maximum(largest, tl.max(score, 1))
        base = new_largest
        if MASKED:  # nothing seen yet: -inf - -inf would be NaN
            base = tl.where(new_largest == float("-inf"), 0.0, new_largest)
        shrink = tl.exp2(largest - base)
        p = tl.exp2(score - base[:, None])
        weight = weight * shrink + tl.sum(p, 1)
        v = _load(v_pool, offsets, held, q.dtype, MASKED, D, DP, KV)
        acc = _dot(p.to(q.dtype), v, acc * shrink[:, None])
        largest = new_largest
        ahead = positions + N
        block = _blocks(table, ahead, ahead < tl.minimum(stop, end), block_shift, num_blocks)
    return acc, largest, weight


@triton.jit
def _attend(
    q, k_pool, v_pool, table, k_scale, row_positions, begin, end, first_position, last_position, reach, kv_head,
    num_kv_heads, block_shift, num_blocks, scale, softcap,
    M: tl.constexpr, N: tl.constexpr, D: tl.constexpr, DP: tl.constexpr, KV: tl.constexpr,
):  # fmt: skip
    """Return (acc [M, DP], largest [M], weight [M]) of the rows over positions begin..end-1.

    The rows are at first_position..last_position.

    Three runs of tiles in ascending order: those where the window of some row begins, those that every row sees whole,
    and those with the diagonal or the end.
    """
    if k_scale is not None:
        scale = scale * tl.load(k_scale)
    score_scale = scale * LOG2E
    cap_scale = softcap
    if softcap is not None:
        score_scale = score_scale * 2.0 / softcap
        cap_scale = softcap * LOG2E
    row_positions = tl.minimum(
        row_positions, last_position
    )  # rows that fill up the tile see what the last one does
    acc = tl.zeros([M, DP], tl.float32)
    largest = tl.full([M], float("-inf"), tl.float32)
    weight = tl.zeros([M], tl.float32)
    tile_begin = begin // N * N
    tile_end = (end + N - 1) // N * N
    whole_begin = tl.minimum((tl.maximum(begin, last_position - reach + 1) + N - 1) // N * N, tile_end)
    whole_end = tl.maximum(tl.minimum(end, first_position + 1) // N * N, whole_begin)
    acc, largest, weight = _tiles(
        q, k_pool, v_pool, table, acc, largest, weight, row_positions, begin, end, tile_begin, whole_begin, reach,
        kv_head, num_kv_heads, block_shift, num_blocks, score_scale, cap_scale, True, N, D, DP, KV,
    )  # fmt: skip
    acc, largest, weight = _tiles(
        q, k_pool, v_pool, table, acc, largest, weight, row_positions, begin, end, whole_begin, whole_end, reach,
        kv_head, num_kv_heads, block_shift, num_blocks, score_scale, cap_scale, False, N, D, DP, KV,
    )  # fmt: skip
    acc, largest, weight = _tiles(
        q, k_pool, v_pool, table, acc, largest, weight, row_positions, begin, end, whole_end, end, reach,
        kv_head, num_kv_heads, block_shift, num_blocks, score_scale, cap_scale, True, N, D, DP, KV,
    )  # fmt: skip
    return acc, largest, weight


@triton.jit
def _hidden_zero(pointer, value):
    """Return 0, where value was read from pointer, in a way that the compiler cannot know.

    What is worked out with it after the loops is worked out anew: kept through the loops, it costs registers and
    spills.
    """
    return tl.load(pointer, volatile=True) - value


@triton.jit
def _store_rows(out, acc, weight, v_scale, offsets, is_row, D: tl.constexpr, DP: tl.constexpr):
    """Write acc / weight, the rows of a tile, to out at the offsets [M] of their heads."""
    offs_d = tl.arange(0, DP)
    result = acc / weight[:, None]
    if v_scale is not None:
        result = result * tl.load(v_scale)
    mask = is_row[:, None] & (offs_d < D)[None, :]
    tl.store(out + offsets[:, None] + offs_d[None, :], result.to(out.dtype.element_ty), mask=mask)


@triton.jit
def decode(
    q, k_pool, v_pool, cu_query_lens, kv_lens, block_table, k_scale, v_scale, out, partials, stats,
    scale, softcap, reach, query_rows, split_len, num_splits, group, num_kv_heads, block_shift, table_stride,
    num_tokens, num_blocks,
    M: tl.constexpr, N: tl.constexpr, D: tl.constexpr, DP: tl.constexpr, KV: tl.constexpr,
):  # fmt: skip
    """Program (kv head, sequence, split): the group's heads times the sequence's rows are the M rows of the products.

    A sequence whose visible positions lie in one split is finished here; else each split leaves its partial result.
    """
    kv_head = tl.program_id(0)
    b = tl.program_id(1)
    split = tl.program_id(2)
    first_row = tl.load(cu_query_lens + b)
    num_rows = tl.load(cu_query_lens + b + 1) - first_row
    kv_len = tl.load(kv_lens + b)
    past = kv_len - num_rows
    low = tl.maximum(past - reach + 1, 0)
    begin = tl.maximum(split * split_len, low)
    end = tl.minimum(split * split_len + split_len, kv_len)
    is_none = _is_no_step(first_row, first_row + num_rows, kv_len, num_tokens, table_stride << block_shift)
    if (begin >= end) | (num_rows <= 0) | (num_rows > query_rows) | is_none:
        return
    m = tl.arange(0, M)
    row = m // group
    is_row = row < num_rows
    num_heads = num_kv_heads * group
    offs_d = tl.arange(0, DP)
    step = num_heads * D
    offsets = row * step + (kv_head * group + m % group) * D
    q += first_row.to(tl.int64) * step
    out += first_row.to(tl.int64) * step
    mask = is_row[:, None] & (offs_d < D)[None, :]
    queries = tl.load(q + offsets[:, None] + offs_d[None, :], mask=mask, other=0)
    acc, largest, weight = _attend(
        queries, k_pool, v_pool, block_table + b.to(tl.int64) * table_stride, k_scale, past + row, begin, end, past,
        kv_len - 1, reach, kv_head, num_kv_heads, block_shift, num_blocks, scale, softcap, M, N, D, DP, KV,
    )  # fmt: skip
    m = tl.arange(0, M) + _hidden_zero(kv_lens + b, kv_len)
    row = m // group
    head = kv_head * group + m % group
    is_row = row < num_rows
    if low // split_len == (kv_len - 1) // split_len:
        _store_rows(out, acc, weight, v_scale, row * step + head * D, is_row, D, DP)
    else:
        slot = ((b * query_rows + row).to(tl.int64) * num_heads + head) * num_splits + split
        mask = is_row[:, None] & (offs_d < D)[None, :]
        tl.store(partials + slot[:, None] * D + offs_d[None, :], acc, mask=mask)
        tl.store(stats + slot * 2, largest, mask=is_row)
        tl.store(stats + slot * 2 + 1, weight, mask=is_row)


@triton.jit
def combine(
    partials, stats, cu_query_lens, kv_lens, v_scale, out, reach, query_rows, split_len, num_splits, num_tokens,
    N: tl.constexpr, D: tl.constexpr, DP: tl.constexpr,
):  # fmt: skip
    """Program (head, row of a sequence, sequence): one row from the partial results of its splits, N at a time.

    Rows that `decode` finished, and those of `prefill`, are left as they are in out.
    """
    head = tl.program_id(0)
    row = tl.program_id(1)
    b = tl.program_id(2)
    num_heads = tl.num_programs(0)
    first_row = tl.load(cu_query_lens + b)
    num_rows = tl.load(cu_query_lens + b + 1) - first_row
    kv_len = tl.load(kv_lens + b)
    first_split = tl.maximum(kv_len - num_rows - reach + 1, 0) // split_len
    end_split = (kv_len + split_len - 1) // split_len
    is_none = _is_no_step(first_row, first_row + num_rows, kv_len, num_tokens, num_splits * split_len)
    if (row >= num_rows) | (num_rows > query_rows) | (end_split - first_split <= 1) | is_none:
        return
    slot = ((b * query_rows + row).to(tl.int64) * num_heads + head) * num_splits
    offs_n = tl.arange(0, N)
    offs_d = tl.arange(0, DP)
    largest = tl.full([N], float("-inf"), tl.float32)
    for first in range(first_split // N * N, end_split, N):
        split = first + offs_n
        held = (split >= first_split) & (split < end_split)
        largest = tl.maximum(largest, tl.load(stats + (slot + split) * 2, mask=held, other=float("-inf")))
    base = tl.max(largest, 0)
    total = tl.zeros([DP], tl.float32)
    weights = tl.zeros([], tl.float32)
    for first in range(first_split // N * N, end_split, N):
        split = first + offs_n
        held = (split >= first_split) & (split < end_split)
        factor = tl.exp2(tl.load(stats + (slot + split) * 2, mask=held, other=float("-inf")) - base)
        weights += tl.sum(factor * tl.load(stats + (slot + split) * 2 + 1, mask=held, other=0.0), 0)
        mask = held[:, None] & (offs_d < D)[None, :]
        sums = tl.load(partials + (slot + split)[:, None] * D + offs_d[None, :], mask=mask, other=0.0)
        total += tl.sum(sums * factor[:, None], 0)
    result = total / weights
    if v_scale is not None:
        result = result * tl.load(v_scale)
    where = ((first_row + row).to(tl.int64) * num_heads + head) * D + offs_d
    tl.store(out + where, result.to(out.dtype.element_ty), mask=offs_d < D)


@triton.jit
def prefill(
    q, k_pool, v_pool, cu_query_lens, kv_lens, block_table, k_scale, v_scale, out,
    scale, softcap, reach, query_rows, group, num_kv_heads, block_shift, table_stride, num_sequences,
    num_tokens, num_blocks,
    M: tl.constexpr, N: tl.constexpr, D: tl.constexpr, DP: tl.constexpr, KV: tl.constexpr,
):  # fmt: skip
    """Program (kv head, tile): M // group rows of one sequence times the group's heads.

    Sequence b's tiles are numbered from cu[b] // rows + b: at least as many as it needs, and T // rows + B in all. The
    last tiles, which have most positions to see, start first.
    """
    kv_head = tl.program_id(0)
    tile = tl.num_programs(1) - 1 - tl.program_id(1)
    rows = M // group
    # Counting the sequences that begin at or before this tile is one parallel load, a binary search log2(B) in turn.
    b = 0
    for first in range(1, num_sequences, 256):
        sequence = first + tl.arange(0, 256)
        cu = tl.load(cu_query_lens + sequence, mask=sequence < num_sequences, other=0)
        b += tl.sum(((cu // rows + sequence <= tile) & (sequence < num_sequences)).to(tl.int32), 0)
    first_row = tl.load(cu_query_lens + b)
    num_rows = tl.load(cu_query_lens + b + 1) - first_row
    kv_len = tl.load(kv_lens + b)
    tile_row = (tile - first_row // rows - b) * rows
    is_none = _is_no_step(first_row, first_row + num_rows, kv_len, num_tokens, table_stride << block_shift)
    if num_tokens is not None:
        is_none |= tile_row < 0  # lengths that do not ascend
    if (tile_row >= num_rows) | (num_rows <= query_rows) | (kv_len == 0) | is_none:
        return
    m = tl.arange(0, M)
    row = m // group
    is_row = (row < rows) & (tile_row + row < num_rows)
    offs_d = tl.arange(0, DP)
    step = num_kv_heads * group * D
    offsets = row * step + (kv_head * group + m % group) * D
    q += (first_row + tile_row).to(tl.int64) * step
    out += (first_row + tile_row).to(tl.int64) * step
    mask = is_row[:, None] & (offs_d < D)[None, :]
    queries = tl.load(q + offsets[:, None] + offs_d[None, :], mask=mask, other=0)
    first_position = kv_len - num_rows + tile_row
    last_position = kv_len - num_rows + tl.minimum(tile_row + rows, num_rows) - 1
    acc, _largest, weight = _attend(
        queries, k_pool, v_pool, block_table + b.to(tl.int64) * table_stride, k_scale, first_position + row,
        tl.maximum(first_position - reach + 1, 0), last_position + 1, first_position, last_position, reach, kv_head,
        num_kv_heads, block_shift, num_blocks, scale, softcap, M, N, D, DP, KV,
    )  # fmt: skip
    m = tl.arange(0, M) + _hidden_zero(kv_lens + b, kv_len)
    row = m // group
    is_row = (row < rows) & (tile_row + row < num_rows)
    _store_rows(out, acc, weight, v_scale, row * step + (kv_head * group + m % group) * D, is_row, D, DP)
