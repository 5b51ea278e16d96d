"""The float64 reference of PagedAttention against dense attention that knows nothing of pages."""

from __future__ import annotations

from typing import Any, Literal

import ml_dtypes
import numpy as np
import pytest
from plansmith.plugins.paged_attention.reference import paged_attention, quantize_kv

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


Kv = Literal["float", "fp8", "int8"]
SCALES = {"float": (1.0, 1.0), "fp8": (0.004, 0.25), "int8": (0.02, 0.3)}  # K is cut off here and there


def codes(x: np.ndarray, scale: float, kv: Kv) -> np.ndarray:
    """Return what a pool holds of float32 x, by ml_dtypes' own rounding."""
    y = x.astype(np.float32) / np.float32(scale)
    if kv == "int8":
        return np.round(y).clip(-128, 127).astype(np.int8)
    return y.clip(-448, 448).astype(ml_dtypes.float8_e4m3fn)


@pytest.mark.parametrize("kv", ["fp8", "int8"])
@pytest.mark.parametrize("scale", [1.0, 0.3, 0.0078125])
def test_codes_are_those_of_ml_dtypes(kv: Kv, scale: float) -> None:
    rng = np.random.default_rng(1)
    every = np.arange(256, dtype=np.uint8).view(ml_dtypes.float8_e4m3fn).astype(np.float32)
    every = np.sort(every[np.isfinite(every)])
    ties = (every[1:] + every[:-1]) / 2
    hard = np.concatenate([every, ties, np.nextafter(ties, np.inf), np.nextafter(ties, -np.inf)])
    x = np.concatenate([hard * np.float32(scale), rng.normal(0, 100 * scale, 20000), [1e30, -1e30, 0, -0.0]])
    x = x.astype(np.float32)
    wanted = codes(x, scale, kv).astype(np.float32)
    np.testing.assert_array_equal(quantize_kv(x, scale, kv), wanted)
    assert np.isnan(quantize_kv(np.array([np.nan], np.float32), scale, kv)).all()


@pytest.mark.parametrize("kv", ["float", "fp8", "int8"])
@pytest.mark.parametrize("window", [0, 1, 5])
@pytest.mark.parametrize("softcap", [0.0, 1.5])
def test_chunks_over_scattered_blocks_are_dense_attention(window: int, softcap: float, kv: Kv) -> None:
    rng = np.random.default_rng(window)
    lengths = [11, 4, 1, 9]
    qkv = [[rng.standard_normal((n, w * D)) for w in (H, KVH, KVH)] for n in lengths]
    free = rng.permutation(12).tolist()
    table = np.full((4, 3), -1, np.int32)
    for b, n in enumerate(lengths):
        used = -(-n // BS)
        table[b, :used] = [free.pop() for _ in range(used)]
    seen = qkv  # what attention sees
    if kv != "float":
        qkv = [[x.astype(np.float32) for x in parts] for parts in qkv]
        seen = [
            [
                q,
                *(
                    codes(x, s, kv).astype(np.float64) * float(np.float32(s))
                    for x, s in zip(rest, SCALES[kv], strict=True)
                ),
            ]
            for q, *rest in qkv
        ]
    k_pool = np.full((12, KVH, BS, D), np.nan)
    v_pool = k_pool.copy()
    attrs: dict[str, Any] = {
        "num_heads": H,
        "kv_num_heads": KVH,
        "head_dim": D,
        "scale": 0.7,
        "softcap": softcap,
        "window": window,
        "kv": kv,
        "k_scale": SCALES[kv][0],
        "v_scale": SCALES[kv][1],
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
        np.testing.assert_allclose(np.concatenate(outs[b]), dense(*seen[b], 0.7, softcap, window), atol=1e-12)
    written = sum(-(-n // BS) * BS for n in lengths) - sum(lengths)
    unwritten_blocks = 12 - (table >= 0).sum()
    assert np.isnan(k_pool[:, 0, :, 0]).sum() == written + unwritten_blocks * BS


def test_pools_of_bytes_hold_the_codes() -> None:
    rng = np.random.default_rng(3)
    q, k, v = (rng.standard_normal((5, w * D)).astype(np.float32) for w in (H, KVH, KVH))
    cu, lens, table = (np.array(x, np.int32) for x in ([0, 5], [5], [[1, 0]]))
    for kv, dtype in (("fp8", ml_dtypes.float8_e4m3fn), ("int8", np.int8)):
        pools = [np.zeros((2, KVH, BS, D), dtype) for _ in range(2)]
        attrs = {"num_heads": H, "kv_num_heads": KVH, "head_dim": D, "scale": 0.7}
        attrs |= {"kv": kv, "k_scale": 0.01, "v_scale": 0.02}
        _, k_out, v_out = paged_attention(q, k, v, *pools, cu, lens, table, **attrs)
        for out, x, scale in ((k_out, k, 0.01), (v_out, v, 0.02)):
            assert out.dtype == dtype
            held = np.concatenate([out[1], out[0, :, :1]], axis=1)  # (KVH, 5, D)
            wanted = codes(x, scale, kv).reshape(5, KVH, D).swapaxes(0, 1)
            np.testing.assert_array_equal(held.view(np.uint8), wanted.view(np.uint8))
