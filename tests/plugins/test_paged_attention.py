"""The float64 reference of PagedAttention against dense attention that knows nothing of pages."""

from __future__ import annotations

import numpy as np
import pytest
from plansmith.plugins.paged_attention.reference import paged_attention

H, KVH, D, BS = 6, 2, 8, 4


def dense(
    q: np.ndarray, k: np.ndarray, v: np.ndarray, scale: float, softcap: float, window: int
) -> np.ndarray:
    """Return attention of a whole sequence at once: q (N, H*D), k and v (N, KVH*D)."""
    n = q.shape[0]
    q3 = q.reshape(n, H, D)
    k3, v3 = (np.repeat(x.reshape(n, KVH, D), H // KVH, axis=1) for x in (k, v))
    score = np.einsum("qhd,khd->hqk", q3, k3) * scale
    if softcap:
        score = softcap * np.tanh(score / softcap)
    gap = np.arange(n)[:, None] - np.arange(n)[None, :]
    seen = (gap >= 0) & (gap < (window or n))
    weight = np.where(seen, np.exp(score), 0.0)
    weight /= weight.sum(axis=2, keepdims=True)
    return np.einsum("hqk,khd->qhd", weight, v3).reshape(n, -1)


@pytest.mark.parametrize("window", [0, 1, 5])
@pytest.mark.parametrize("softcap", [0.0, 1.5])
def test_chunks_over_scattered_blocks_are_dense_attention(window: int, softcap: float) -> None:
    rng = np.random.default_rng(window)
    lengths = [11, 4, 1, 9]
    qkv = [[rng.standard_normal((n, w * D)) for w in (H, KVH, KVH)] for n in lengths]
    free = rng.permutation(12).tolist()
    table = np.full((4, 3), -1, np.int32)
    for b, n in enumerate(lengths):
        used = -(-n // BS)
        table[b, :used] = [free.pop() for _ in range(used)]
    k_pool = np.full((12, KVH, BS, D), np.nan)
    v_pool = k_pool.copy()
    attrs = {
        "num_heads": H,
        "kv_num_heads": KVH,
        "head_dim": D,
        "scale": 0.7,
        "softcap": softcap,
        "window": window,
    }
    done = [0, 0, 0, 0]
    outs: list[list[np.ndarray]] = [[], [], [], []]
    for chunks in ([5, 4, 0, 2], [1, 0, 1, 7], [5, 0, 0, 0]):
        who = [b for b, c in enumerate(chunks) if c]
        parts = [[x[done[b] : done[b] + chunks[b]] for x in qkv[b]] for b in who]
        q, k, v = (np.concatenate(side) for side in zip(*parts, strict=True))
        for b in who:
            done[b] += chunks[b]
        cu = np.cumsum([0] + [chunks[b] for b in who]).astype(np.int32)
        kv_lens = np.array([done[b] for b in who], np.int32)
        before = k_pool.copy()
        out, k_pool_out, v_pool_out = paged_attention(
            q, k, v, k_pool, v_pool, cu, kv_lens, table[who], **attrs
        )
        np.testing.assert_array_equal(k_pool, before)  # the arguments are left alone
        k_pool, v_pool = k_pool_out, v_pool_out
        for row, b in enumerate(who):
            outs[b].append(out[cu[row] : cu[row + 1]])
    for b in range(4):
        np.testing.assert_allclose(np.concatenate(outs[b]), dense(*qkv[b], 0.7, softcap, window), atol=1e-12)
    written = sum(-(-n // BS) * BS for n in lengths) - sum(lengths)
    unwritten_blocks = 12 - (table >= 0).sum()
    assert np.isnan(k_pool[:, 0, :, 0]).sum() == written + unwritten_blocks * BS
