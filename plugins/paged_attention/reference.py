"""PagedAttention in numpy float64, one token and head at a time: slow, plain, what every kernel is held against."""

from __future__ import annotations

from typing import Any, Literal

import numpy as np
import numpy.typing as npt

FloatArray = npt.NDArray[np.float64]
AnyFloat = npt.NDArray[np.floating]
Pool = npt.NDArray[Any]
IntArray = npt.NDArray[np.int32]


def paged_attention(
    q: AnyFloat,
    k: AnyFloat,
    v: AnyFloat,
    k_pool: Pool,
    v_pool: Pool,
    cu_query_lens: IntArray,
    kv_lens: IntArray,
    block_table: IntArray,
    *,
    num_heads: int,
    kv_num_heads: int,
    head_dim: int,
    scale: float,
    softcap: float = 0.0,
    window: int = 0,
    kv: Literal["float", "float16", "fp8", "int8"] = "float",
    k_scale: float = 1.0,
    v_scale: float = 1.0,
) -> tuple[FloatArray, Pool, Pool]:
    """Return (out, k_pool_out, v_pool_out) of one step, as builder/graph/contract.py defines the op.

    q : (T, H*D); k, v : (T, KVH*D), rotated
    k_pool, v_pool : (NB, KVH, BS, D); not changed, the results are copies of the same type. With kv "fp8" and "int8"
        they hold the codes' numbers, round(k / k_scale) saturated, in any type that can
    cu_query_lens : (B+1,), sequence b's rows are cu[b]..cu[b+1]-1
    kv_lens : (B,), positions held after the step; the new ones are the last
    block_table : (B, MB), block of each BS positions; unused entries are never read
    returns : out (T, H*D) float64
    """
    k_pool, v_pool = k_pool.copy(), v_pool.copy()
    block_size = k_pool.shape[2]
    out = np.zeros((q.shape[0], num_heads, head_dim))
    group = num_heads // kv_num_heads
    for b, kv_len in enumerate(kv_lens.tolist()):
        first, last = int(cu_query_lens[b]), int(cu_query_lens[b + 1])
        past = kv_len - (last - first)
        for row in range(first, last):
            block, offset = divmod(past + row - first, block_size)
            for rows, pool, one_scale in ((k, k_pool, k_scale), (v, v_pool, v_scale)):
                held = quantize_kv(rows[row], one_scale, kv)
                pool[block_table[b, block], :, offset] = held.reshape(kv_num_heads, head_dim)
        keys = _gather(k_pool, block_table[b], kv_len) * float(np.float32(k_scale))
        values = _gather(v_pool, block_table[b], kv_len) * float(np.float32(v_scale))
        for row in range(first, last):
            p = past + row - first
            low = max(0, p - window + 1) if window else 0
            for head in range(num_heads):
                query = q[row, head * head_dim : (head + 1) * head_dim].astype(np.float64)
                kv_head = head // group
                score = keys[kv_head, low : p + 1] @ query * scale
                if softcap:
                    score = softcap * np.tanh(score / softcap)
                weight = np.exp(score - score.max())
                out[row, head] = weight / weight.sum() @ values[kv_head, low : p + 1]
    return out.reshape(q.shape[0], -1), k_pool, v_pool


def quantize_kv(x: AnyFloat, scale: float, kv: Literal["float", "float16", "fp8", "int8"]) -> AnyFloat:
    """Return the codes' numbers of x; x / scale is a float32 division, as it is where codes are written.

    x : any shape; float64 is divided as such
    scale : a float32 number above 0
    returns : like x; of "float" x itself. To nearest even: float16 within +-65504, but infinities stay, and without
        `scale`; fp8 (E4M3) within +-448; int8 within -128..127. NaN stays
    """
    if kv == "float":
        return x
    if kv == "float16":
        bound = np.where(np.isfinite(x), np.clip(x, -65504.0, 65504.0), x)
        half: AnyFloat = bound.astype(np.float16).astype(x.dtype)
        return half
    y = x.astype(np.promote_types(x.dtype, np.float32)) / np.float32(scale)
    if kv == "int8":
        whole: AnyFloat = np.clip(np.rint(y), -128.0, 127.0)
        return whole
    y = np.clip(y, -448.0, 448.0)
    # A number of 2^e has 3 bits behind its first; below 2^-6 the steps stay 2^-9.
    step = np.exp2(np.maximum(np.frexp(y)[1] - 1, -6) - 3).astype(y.dtype)
    rounded: AnyFloat = np.rint(y / step) * step
    return rounded


def _gather(pool: Pool, blocks: IntArray, length: int) -> FloatArray:
    """Return the sequence's rows (KVH, length, D) in order."""
    block_size = pool.shape[2]
    pages = [pool[blocks[n]] for n in range(-(-length // block_size))]
    return np.concatenate(pages, axis=1)[:, :length].astype(np.float64)
