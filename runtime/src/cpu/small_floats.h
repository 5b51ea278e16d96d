// Half floats and FP8 codes as floats, and floats as half floats, one by one, for files that are
// compiled for every machine. Everything is private to the file that includes it.
//
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <stdint.h>
#include <string.h>

namespace plansmith {
namespace cpu {
namespace {

inline float FloatOf(uint32_t bits) {
  float r;
  memcpy(&r, &bits, sizeof(r));
  return r;
}
inline uint32_t BitsOf(float x) {
  uint32_t r;
  memcpy(&r, &x, sizeof(r));
  return r;
}

inline float Bf16ToFloat(uint16_t x) { return FloatOf(static_cast<uint32_t>(x) << 16); }

// By masks where a choice would become a branch: compilers make vectors of this, 8 times as fast.
inline float F16ToFloat(uint16_t x) {
  const int32_t magnitude = x & 0x7FFF;
  const uint32_t subnormal = -static_cast<uint32_t>(magnitude < 0x400);
  const uint32_t infinite = -static_cast<uint32_t>(magnitude >= 0x7C00);    // or NaN
  const uint32_t steps = BitsOf(static_cast<float>(magnitude) * 0x1p-24f);  // of subnormal numbers
  const uint32_t normal =
      (static_cast<uint32_t>(magnitude) << 13) + (112u << 23) + (infinite & (112u << 23));
  const uint32_t sign = static_cast<uint32_t>(x & 0x8000) << 16;
  return FloatOf((steps & subnormal) | (normal & ~subnormal) | sign);
}

// To nearest even, an infinity beyond 65519; a NaN becomes one of the same sign.
inline uint16_t FloatToF16(float x) {
  const uint32_t bits = BitsOf(x), abs = bits & 0x7FFFFFFF;
  uint32_t half;
  if (abs > 0x7F800000) {
    half = 0x7E00;
  } else if (abs >= BitsOf(65520.0f)) {
    half = 0x7C00;
  } else if (abs < BitsOf(0x1p-14f)) {  // multiples of 2^-24: what 0.5 counts in
    half = BitsOf(FloatOf(abs) + 0.5f) - BitsOf(0.5f);
  } else {  // 13 bits less, and an exponent bias of 15 instead of 127
    half = ((abs + (abs >> 13 & 1) + 0xFFF) >> 13) - (112u << 10);
  }
  return static_cast<uint16_t>(half | (bits >> 16 & 0x8000));
}

// E4M3 / 256: the half float of the same bits. NaNs count as 480 / 256, see plan_format.h.
inline float F8ToFloat256th(uint8_t x) {
  return F16ToFloat(static_cast<uint16_t>((x & 0x80) << 8 | (x & 0x7F) << 7));
}

}  // namespace
}  // namespace cpu
}  // namespace plansmith
