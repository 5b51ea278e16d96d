"""E4M3 and int8 codes to and from floats, in operations that every SM has and the interpreter repeats exactly.

E4M3 (the "fn" kind): sign, 4 bits of exponent with bias 7, 3 of mantissa; no infinity, 0x7F and 0xFF are NaN, 448 is
the largest. Triton's own conversions need sm89. Codes are read as words of four: half as many operations as one by
one, and 16-byte loads whatever layout a product wants.
"""

# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator, attr-defined"
from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def e4m3_words_to_halves(words):
    """Return float16 [N, 4 * W], the numbers of the E4M3 codes in int32 words [N, W], lowest byte first; exact."""
    bits = words.to(tl.uint32, bitcast=True)
    return _interleave(_e4m3_pair(bits << 8), _e4m3_pair(bits), 256.0, 0.0)


@triton.jit
def int8_words_to_halves(words):
    """Return float16 [N, 4 * W], the numbers of the int8 codes in int32 words [N, W], lowest byte first; exact."""
    # The byte plus 128 is the mantissa of a float16 from 1024 on, whose steps are 1.
    bits = words.to(tl.uint32, bitcast=True) ^ 0x80808080
    return _interleave(
        (bits & 0x00FF00FF) | 0x64006400, ((bits >> 8) & 0x00FF00FF) | 0x64006400, 1.0, -1152.0
    )


@triton.jit
def _e4m3_pair(bits):
    """Return the codes in bits 8..15 and 24..31 of uint32 as two float16 of one uint32, 2^-8 of their numbers."""
    # Under float16's bias of 15 the exponent is 8 too small, in subnormals too. 0x7F, which would be 1.875, becomes
    # NaN: it alone carries into the highest bit of the exponent when 1 is added to the code.
    magnitude = (bits >> 1) & 0x3F803F80
    return magnitude | (bits & 0x80008000) | ((magnitude + 0x00800080) & 0x40004000)


@triton.jit
def _interleave(even, odd, factor: tl.constexpr, offset: tl.constexpr):
    """Return float16 [N, 4 * W] of the halves of even (bytes 0 and 2) and odd (1 and 3), uint32 [N, W]."""
    first = tl.join(_half(even & 0xFFFF), _half(even >> 16))
    second = tl.join(_half(odd & 0xFFFF), _half(odd >> 16))
    halves = tl.reshape(tl.join(first, second), [even.shape[0], 4 * even.shape[1]])
    if factor != 1.0:
        halves = halves * tl.full([], factor, tl.float16)
    if offset != 0.0:
        halves = halves + tl.full([], offset, tl.float16)
    return halves


@triton.jit
def _half(bits):
    """Return uint32 below 2^16 as the float16 of these bits."""
    return bits.to(tl.uint16).to(tl.float16, bitcast=True)


@triton.jit
def float_to_e4m3(x):
    """Return E4M3 codes (uint8) of float32 x: to nearest even, beyond +-448 saturated, NaN stays NaN."""
    bits = x.to(tl.uint32, bitcast=True)
    magnitude = tl.minimum(tl.abs(x), 448.0)
    held = magnitude.to(tl.uint32, bitcast=True)
    # 20 bits of mantissa go. A carry into the exponent is right; 120 is the difference of the biases.
    normal = ((held + 0x7FFFF + ((held >> 20) & 1)) >> 20) - (120 << 3)
    # Below 2^-6 all steps are 2^-9: so are float32's between 2^14 and 2^15, and the sum is rounded to nearest even.
    small = (magnitude + 16384.0).to(tl.uint32, bitcast=True) - 0x46800000
    code = tl.where(magnitude < 0.015625, small, normal)
    code = tl.where(x != x, 0x7F, code)
    return (code | ((bits >> 24) & 0x80)).to(tl.uint8)


@triton.jit
def float_to_int8(x):
    """Return int8 of float32 x: to nearest even, within -128..127; NaN becomes 0, as int8 has none."""
    held = tl.minimum(tl.maximum(x, -128.0), 127.0)
    # Float32's steps between 2^23 and 2^24 are 1: the low byte of 1.5 * 2^23 + n is n in two's complement.
    whole = (held + 12582912.0).to(tl.int32, bitcast=True)
    return tl.where(x != x, 0, whole).to(tl.int8)
