"""The core's arithmetic of a draw in the Triton language, operation by operation (runtime/src/sampler.h, rng.h).

Compiled without fused multiply-add (Kernel.fp_fusion False), so that every result has the core's bits.
"""

# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator, attr-defined"
from __future__ import annotations

import numpy as np
import triton
import triton.language as tl

FARTHEST = tl.constexpr(0x42B00000)
"""The bits of 88: e^-88 is 0 here, so tokens as far from the best, or farther, are never drawn."""


def _float32(x: float) -> tl.constexpr:
    """Return a float32 number exactly as C's constant of the same digits."""
    return tl.constexpr(float(np.float32(x)))


_LOG2_E, _LN2_HIGH, _LN2_LOW = _float32(1.44269504), _float32(0.693359375), _float32(-2.12194440e-4)
_C6 = tl.constexpr(float(np.float32(1) / np.float32(720)))
_C5 = tl.constexpr(float(np.float32(1) / np.float32(120)))
_C4 = tl.constexpr(float(np.float32(1) / np.float32(24)))
_C3 = tl.constexpr(float(np.float32(1) / np.float32(6)))
_D11, _D9, _D7, _D5, _D3 = (tl.constexpr(1.0 / n) for n in (11.0, 9.0, 7.0, 5.0, 3.0))
_LN2 = tl.constexpr(0.69314718055994531)
_SQRT_HALF_BITS = tl.constexpr(0x3FE6A09E667F3BCD)
_MANTISSA = tl.constexpr(0x000FFFFFFFFFFFFF)
_HALF_EXPONENT = tl.constexpr(0x3FE0000000000000)


@triton.jit
def distance_key(x, best, temperature):
    """Return the bits of |(x - best) / temperature|, at most FARTHEST: an order, best first.

    x, best : fp32, x <= best, which is finite
    """
    z = tl.div_rn(x - best, temperature)
    return tl.minimum(z.to(tl.int32, bitcast=True) & 0x7FFFFFFF, FARTHEST)


@triton.jit
def weight(key):
    """Return the core's ExpNonPositive of a distance, fp32. key : int32 as distance_key gives it."""
    clamped = -key.to(tl.float32, bitcast=True)
    shifted = clamped * _LOG2_E + 12582912.0
    n = shifted - 12582912.0
    r = (clamped - n * _LN2_HIGH) - n * _LN2_LOW
    p = _C6 * r + _C5
    p = p * r + _C4
    p = p * r + _C3
    p = p * r + 0.5
    p = p * r + 1.0
    p = p * r + 1.0
    scale = ((n.to(tl.int32) + 127) << 23).to(tl.float32, bitcast=True)
    return p * scale


@triton.jit
def weight_units(w, shift):
    """Return a weight as whole units of 2^(shift - 34), int64, to nearest, ties to even. w : fp32 in [0, 1]."""
    bits = w.to(tl.int32, bitcast=True)
    mantissa = ((bits & 0x7FFFFF) | 0x800000).to(tl.int64)
    left = (bits >> 23) - 116 - shift
    up = mantissa << tl.maximum(left, 0).to(tl.int64)
    # A mantissa has 24 bits: 25 places to the right nothing of it rounds up any more.
    right = tl.minimum(tl.maximum(-left, 1), 25).to(tl.int64)
    down = mantissa >> right
    rest = mantissa - (down << right)
    half = ((mantissa & 0) + 1) << (right - 1)
    odd = (down & 1) == 1
    down += ((rest > half) | ((rest == half) & odd)).to(tl.int64)
    return tl.where(left >= 0, up, down)


@triton.jit
def keyed_hash(key_0, key_1, x):
    """Return rng.h's KeyedHash of uint32 numbers."""
    x = (x ^ key_0) * 0xED5AD4BB
    x = ((x ^ (x >> 11)) + key_1) * 0xAC4C1B51
    x = (x ^ (x >> 15)) * 0x31848BAB
    return x ^ (x >> 14)


@triton.jit
def upper_bits(key_0, key_1, ids):
    """Return the upper 16 of tokens' 32 random bits, uint32. ids : int32."""
    x = ids.to(tl.uint32)
    return (keyed_hash(key_0, key_1, x >> 1) >> ((x & 1) * 16)) & 0xFFFF


@triton.jit
def draw_bits(key_0, key_1, ids):
    """Return tokens' 32 random bits, uint32."""
    x = ids.to(tl.uint32)
    return (upper_bits(key_0, key_1, ids) << 16) | (keyed_hash(key_0, key_1, x | 0x80000000) >> 16)


@triton.jit
def philox(c0, c1, seed_0, seed_1):
    """Return the four words of Philox 4x32-10 of the counter (c0, c1, 0, 0). All uint32."""
    c2 = c0 * 0
    c3 = c2
    for _ in tl.static_range(10):
        high_0 = tl.umulhi(c0, 0xD2511F53)
        high_1 = tl.umulhi(c2, 0xCD9E8D57)
        low_0 = c0 * 0xD2511F53
        low_1 = c2 * 0xCD9E8D57
        c0 = high_1 ^ c1 ^ seed_0
        c1 = low_1
        c2 = high_0 ^ c3 ^ seed_1
        c3 = low_0
        seed_0 += 0x9E3779B9
        seed_1 += 0xBB67AE85
    return c0, c1, c2, c3


@triton.jit
def draw_key(seed_0, seed_1, output_idx):
    """Return the two words of a draw's key, rng.h's DrawKey. All uint32."""
    key_0, key_1, _0, _1 = philox(output_idx, output_idx * 0, seed_0, seed_1)
    return key_0, key_1


@triton.jit
def log_of(x):
    """Return the natural log of an fp64 number >= 2^-1000, relative error below 1e-10 of it or of x - 1."""
    bits = x.to(tl.int64, bitcast=True)
    # As m 2^-k with m in [sqrt(1/2), sqrt(2)).
    half = (bits & _MANTISSA) | _HALF_EXPONENT
    is_low = half < _SQRT_HALF_BITS
    k = 1022 - (bits >> 52) + is_low.to(tl.int64)
    m = half.to(tl.float64, bitcast=True)
    m = tl.where(is_low, m * 2.0, m)
    s = (m - 1.0) / (m + 1.0)
    s2 = s * s
    p = _D11 * s2 + _D9
    p = p * s2 + _D7
    p = p * s2 + _D5
    p = p * s2 + _D3
    p = p * s2 + 1.0
    return 2.0 * s * p - k.to(tl.float64) * _LN2


@triton.jit
def arrival(bits, w):
    """Return the time at which a token of that weight arrives, fp64: -log(1 - u) / w. bits : uint32."""
    u = (bits.to(tl.float64) + 0.5) * 2.3283064365386963e-10
    return -log_of(1.0 - u) / w.to(tl.float64)
