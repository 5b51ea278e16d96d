"""Sampling in numpy: the rule of runtime/src/sampler.h, a row at a time, rounded as the core rounds each operation."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from ..kernel import Constant

Float32Array = npt.NDArray[np.float32]
Float64Array = npt.NDArray[np.float64]
Int64Array = npt.NDArray[np.int64]
UInt32Array = npt.NDArray[np.uint32]

BAD_LOGITS, FORBIDDEN, OVERFLOW = -1, -2, -3
_F = np.float32


def draw(logits: Float32Array, row: dict[str, Constant], edits: np.ndarray, mask: UInt32Array | None) -> int:
    """Return one row's token, or BAD_LOGITS, FORBIDDEN, OVERFLOW.

    logits : (V,) float32
    row : seed, output_idx, temperature, top_p, min_p, top_k, as psm_sampling_row has them
    edits : (n,) of id, factor, minus, plus; mask : (words,) uint32 or None
    """
    if np.isnan(logits).any() or (logits == np.inf).any():
        return BAD_LOGITS
    x = adjust(logits, edits, mask)
    if np.isnan(x).any() or (x == np.inf).any():
        return OVERFLOW
    best = int(np.argmax(x))
    if x[best] == -np.inf:
        return FORBIDDEN
    temperature, top_p, min_p = (_F(row[name]) for name in ("temperature", "top_p", "min_p"))
    top_k = int(row["top_k"] or 0)
    if temperature == 0 or top_k == 1:
        return best
    with np.errstate(over="ignore"):
        z = (x - x[best]) / temperature
    order = kept(z, top_k, top_p)
    w = weights(z[order])
    enters = (w > 0) & (w >= min_p)
    ids, w = order[enters], w[enters]
    key = draw_key(int(row["seed"] or 0), int(row["output_idx"] or 0))
    times = exponential(draw_bits(key, ids)) / w.astype(np.float64)
    return int(ids[np.lexsort((ids, times))[0]])


def adjust(logits: Float32Array, edits: np.ndarray, mask: UInt32Array | None) -> Float32Array:
    """Return the logits after the mask and the edits, each operation rounded to float32."""
    x = logits.copy()
    if mask is not None:
        ids = np.arange(len(x))
        x[(mask[ids // 32] >> (ids % 32).astype(np.uint32)) & 1 == 0] = -np.inf
    ids = edits["id"]
    with np.errstate(over="ignore", invalid="ignore"):
        edited = x[ids]
        edited = np.where(edited > 0, edited / edits["factor"], edited * edits["factor"])
        edited = edited - edits["minus"]
        x[ids] = edited + edits["plus"]
    changed: Float32Array = x
    return changed


def kept(z: Float32Array, top_k: int, top_p: np.float32) -> Int64Array:
    """Return the ids that top_k and top_p keep, best first. z : (V,) distances from the best, <= 0."""
    order = np.lexsort((np.arange(len(z)), -z))
    if 0 < top_k < len(z):
        order = order[:top_k]
    if top_p < 1:
        units = np.cumsum(weight_units(weights(z[order]), len(z)))
        wanted = float(top_p) * float(units[-1])
        order = order[: int(np.searchsorted(units, max(wanted, 1.0))) + 1]
    return order


def weights(z: Float32Array) -> Float32Array:
    """Return sampler.h's ExpNonPositive."""
    magnitude = np.minimum(z.view(np.int32) & 0x7FFFFFFF, 0x42B00000).astype(np.int32)
    clamped = -magnitude.view(np.float32)
    n = (clamped * _F(1.44269504) + _F(12582912)) - _F(12582912)
    r = (clamped - n * _F(0.693359375)) - n * _F(-2.12194440e-4)
    p = _F(1) / _F(720)
    for term in (_F(1) / _F(120), _F(1) / _F(24), _F(1) / _F(6), _F(0.5), _F(1), _F(1)):
        p = p * r + term
    scale: Float32Array = ((n.astype(np.int32) + 127) << 23).astype(np.int32).view(np.float32)
    found: Float32Array = p * scale
    return found


def weight_units(w: Float32Array, vocab_size: int) -> Int64Array:
    """Return weights in the unit in which they are summed: 2^-34, above 2^19 tokens twice it for each doubling."""
    shift = max(0, (vocab_size - 1).bit_length() - 19)
    return np.rint(np.ldexp(w.astype(np.float64), 34 - shift)).astype(np.int64)


def draw_key(seed: int, output_idx: int) -> tuple[int, int]:
    """Return the two words of a draw's key, rng.h's DrawKey."""
    return philox(seed, output_idx, 0)[:2]  # type: ignore[return-value]


def philox(seed: int, c0: int, c1: int) -> tuple[int, ...]:
    """Return the four words of Philox 4x32-10 of the counter (c0, c1, 0, 0)."""
    low = 0xFFFFFFFF
    c = [c0 & low, c1 & low, 0, 0]
    k = [seed & low, seed >> 32]
    for _ in range(10):
        a, b = 0xD2511F53 * c[0], 0xCD9E8D57 * c[2]
        c = [(b >> 32) ^ c[1] ^ k[0], b & low, (a >> 32) ^ c[3] ^ k[1], a & low]
        k = [(k[0] + 0x9E3779B9) & low, (k[1] + 0xBB67AE85) & low]
    return tuple(c)


def keyed_hash(key: tuple[int, int], x: UInt32Array) -> UInt32Array:
    """Return rng.h's KeyedHash."""
    u = np.uint32
    x = (x ^ u(key[0])) * u(0xED5AD4BB)
    x = ((x ^ (x >> u(11))) + u(key[1])) * u(0xAC4C1B51)
    x = (x ^ (x >> u(15))) * u(0x31848BAB)
    found: UInt32Array = x ^ (x >> u(14))
    return found


def draw_bits(key: tuple[int, int], ids: Int64Array) -> UInt32Array:
    """Return tokens' 32 random bits."""
    u = np.uint32
    x = ids.astype(np.uint32)
    upper = keyed_hash(key, x // u(2)) >> (x % u(2) * u(16))
    found: UInt32Array = (upper << u(16)) | (keyed_hash(key, x | u(0x80000000)) >> u(16))
    return found


def exponential(bits: UInt32Array) -> Float64Array:
    """Return rng.h's Exponential: -log(1 - u) of u = (bits + 0.5) 2^-32."""
    half, exponent = np.frexp(1.0 - (bits.astype(np.float64) + 0.5) * 2.0**-32)
    is_low = half < 0.70710678118654752
    m = np.where(is_low, 2 * half, half)
    k = is_low.astype(np.float64) - exponent
    s = (m - 1.0) / (m + 1.0)
    s2 = s * s
    p = np.full_like(s, 1.0 / 11.0)
    for n in (9.0, 7.0, 5.0, 3.0, 1.0):
        p = p * s2 + 1.0 / n
    return k * 0.69314718055994531 - 2.0 * s * p


def log_probabilities(logits: Float32Array) -> Float64Array:
    """Return the natural logs of the model's own probabilities, (V,) float64."""
    x = logits.astype(np.float64)
    best = x.max()
    found: Float64Array = x - best - np.log(np.exp(x - best).sum())
    return found
