"""kv_write in numpy float64, one token at a time."""

from __future__ import annotations

from typing import Literal

import numpy as np

from ..paged_attention.reference import AnyFloat, FloatArray, IntArray, Pool, quantize_kv


def kv_write(
    k: AnyFloat,
    v: AnyFloat,
    k_pool: Pool,
    v_pool: Pool,
    cu_query_lens: IntArray,
    kv_lens: IntArray,
    block_table: IntArray,
    *,
    kv: Literal["float", "fp8", "int8"] = "float",
    k_scale: float = 1.0,
    v_scale: float = 1.0,
) -> tuple[Pool, Pool]:
    """Return copies of the pools with a step's K and V written, as kernels.py says; rotated K is an argument.

    k, v : (T, KVH*D)
    k_pool, v_pool : (NB, KVH, BS, D); with kv "fp8" and "int8" they hold the codes' numbers, in any type that can
    cu_query_lens : (B+1,), kv_lens : (B,), 0 = padding, of which nothing is written; block_table : (B, MB)
    """
    k_pool, v_pool = k_pool.copy(), v_pool.copy()
    _blocks, kv_num_heads, block_size, head_dim = k_pool.shape
    for b, kv_len in enumerate(kv_lens.tolist()):
        first, last = int(cu_query_lens[b]), int(cu_query_lens[b + 1])
        for row in range(first, last) if kv_len else ():
            block, offset = divmod(kv_len - last + row, block_size)
            for rows, pool, one_scale in ((k, k_pool, k_scale), (v, v_pool, v_scale)):
                held = quantize_kv(rows[row], one_scale, kv)
                pool[block_table[b, block], :, offset] = held.reshape(kv_num_heads, head_dim)
    return k_pool, v_pool


def rotate(
    x: AnyFloat, cos: AnyFloat, sin: AnyFloat, position_ids: IntArray, head_dim: int, rotary_dim: int
) -> FloatArray:
    """Return x (T, heads*D) with each head's first rotary_dim columns rotated as two halves.

    cos, sin : (P, rotary_dim / 2)
    """
    half = rotary_dim // 2
    out = x.astype(np.float64).reshape(x.shape[0], -1, head_dim)
    c, s = (table[position_ids].astype(np.float64)[:, None, :] for table in (cos, sin))
    low, high = out[..., :half].copy(), out[..., half:rotary_dim].copy()
    out[..., :half] = low * c - high * s
    out[..., half:rotary_dim] = high * c + low * s
    return out.reshape(x.shape)
