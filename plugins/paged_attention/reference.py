"""PagedAttention in numpy float64, one token and head at a time: slow, plain, what every kernel is held against."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

FloatArray = npt.NDArray[np.float64]
AnyFloat = npt.NDArray[np.floating]
IntArray = npt.NDArray[np.int32]


def paged_attention(
    q: AnyFloat,
    k: AnyFloat,
    v: AnyFloat,
    k_pool: AnyFloat,
    v_pool: AnyFloat,
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
) -> tuple[FloatArray, AnyFloat, AnyFloat]:
    """Return (out, k_pool_out, v_pool_out) of one step, as builder/graph/contract.py defines the op.

    q : (T, H*D); k, v : (T, KVH*D), rotated
    k_pool, v_pool : (NB, KVH, BS, D); not changed, the results are copies of the same type
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
            k_pool[block_table[b, block], :, offset] = k[row].reshape(kv_num_heads, head_dim)
            v_pool[block_table[b, block], :, offset] = v[row].reshape(kv_num_heads, head_dim)
        keys, values = (_gather(pool, block_table[b], kv_len) for pool in (k_pool, v_pool))
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


def _gather(pool: AnyFloat, blocks: IntArray, length: int) -> FloatArray:
    """Return the sequence's rows (KVH, length, D) in order."""
    block_size = pool.shape[2]
    pages = [pool[blocks[n]] for n in range(-(-length // block_size))]
    return np.concatenate(pages, axis=1)[:, :length].astype(np.float64)
