// Vectors of 8 floats in plain C++, which compilers turn into whatever the build's baseline has.
// For kernels_portable.cc only: everything is private to the file that includes it.
//
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <math.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>

#include "cpu/small_floats.h"

namespace plansmith {
namespace cpu {
namespace {

constexpr uint32_t kLanes = 8;
struct V {
  float f[kLanes];
};

template <typename F>
inline V VMake(F&& lane) {
  V r;
  for (uint32_t i = 0; i < kLanes; ++i) r.f[i] = lane(i);
  return r;
}
inline V VLoad(const float* p) {
  V r;
  memcpy(r.f, p, sizeof(r.f));
  return r;
}
inline V VLoadPart(const float* p, uint32_t n) {
  V r = {};
  memcpy(r.f, p, n * sizeof(float));
  return r;
}
inline void VStore(float* p, V v) { memcpy(p, v.f, sizeof(v.f)); }
inline void VStorePart(float* p, V v, uint32_t n) { memcpy(p, v.f, n * sizeof(float)); }
inline V VSet1(float x) {
  return VMake([&](uint32_t) { return x; });
}
inline V VAdd(V a, V b) {
  return VMake([&](uint32_t i) { return a.f[i] + b.f[i]; });
}
inline V VSub(V a, V b) {
  return VMake([&](uint32_t i) { return a.f[i] - b.f[i]; });
}
inline V VMul(V a, V b) {
  return VMake([&](uint32_t i) { return a.f[i] * b.f[i]; });
}
inline V VDiv(V a, V b) {
  return VMake([&](uint32_t i) { return a.f[i] / b.f[i]; });
}
inline V VFma(V a, V b, V c) {  // a * b + c, rounded twice
  return VMake([&](uint32_t i) { return a.f[i] * b.f[i] + c.f[i]; });
}
inline V VMax(V a, V b) {  // b when either is NaN
  return VMake([&](uint32_t i) { return a.f[i] > b.f[i] ? a.f[i] : b.f[i]; });
}
inline V VMin(V a, V b) {
  return VMake([&](uint32_t i) { return a.f[i] < b.f[i] ? a.f[i] : b.f[i]; });
}
inline V VAbs(V a) {
  return VMake([&](uint32_t i) { return fabsf(a.f[i]); });
}
// To nearest even, for |a| < 2^22.
inline V VRound(V a) {
  const float magic = 12582912.0f;  // 1.5 * 2^23
  return VMake([&](uint32_t i) { return (a.f[i] + magic) - magic; });
}
inline V VCopySign(V magnitude, V sign) {
  return VMake([&](uint32_t i) { return copysignf(magnitude.f[i], sign.f[i]); });
}
// a < b ? x : y
inline V VSelectLess(V a, V b, V x, V y) {
  return VMake([&](uint32_t i) { return a.f[i] < b.f[i] ? x.f[i] : y.f[i]; });
}
// 2^floor(log2 a) for a > 0; 0 for subnormal a, an infinity for a NaN.
inline V VPowerBelow(V a) {
  return VMake([&](uint32_t i) {
    uint32_t bits;
    memcpy(&bits, &a.f[i], sizeof(bits));
    bits &= 0x7F800000u;
    float r;
    memcpy(&r, &bits, sizeof(r));
    return r;
  });
}
// 2^n for integral n in -126..127; any value for a NaN
inline V VPow2(V n) {
  return VMake([&](uint32_t i) {
    const float magic = 12582912.0f;
    const float shifted = n.f[i] + magic;  // its low bits are n
    uint32_t bits;
    memcpy(&bits, &shifted, sizeof(bits));
    bits = (bits - 0x4B400000u + 127u) << 23;
    float r;
    memcpy(&r, &bits, sizeof(r));
    return r;
  });
}
// Lane j of v[i] to lane i of v[j].
inline void VTranspose(V (&v)[kLanes]) {
  for (uint32_t i = 0; i < kLanes; ++i) {
    for (uint32_t j = 0; j < i; ++j) {
      const float x = v[i].f[j];
      v[i].f[j] = v[j].f[i];
      v[j].f[i] = x;
    }
  }
}
inline float VReduceAdd(V v) {
  const float* f = v.f;
  return ((f[0] + f[4]) + (f[2] + f[6])) + ((f[1] + f[5]) + (f[3] + f[7]));
}
inline float VReduceMax(V v) {
  float m = v.f[0];
  for (uint32_t i = 1; i < kLanes; ++i) m = v.f[i] > m ? v.f[i] : m;
  return m;
}
// The first n lanes, integral and within int8; 0 for a NaN, whose conversion is undefined.
inline void VStoreI8(int8_t* p, V v, uint32_t n) {
  for (uint32_t i = 0; i < n; ++i) p[i] = static_cast<int8_t>(v.f[i] == v.f[i] ? v.f[i] : 0.0f);
}
inline V VLoadI8(const int8_t* p) {
  return VMake([&](uint32_t i) { return static_cast<float>(p[i]); });
}
inline V VLoadBf16(const uint16_t* p) {
  return VMake([&](uint32_t i) {
    const uint32_t bits = static_cast<uint32_t>(p[i]) << 16;
    float r;
    memcpy(&r, &bits, sizeof(r));
    return r;
  });
}
inline V VLoadF16(const uint16_t* p) {
  return VMake([&](uint32_t i) { return F16ToFloat(p[i]); });
}
// The first n lanes as half floats, to nearest even; NaN stays.
inline void VStoreF16(uint16_t* p, V v, uint32_t n) {
  for (uint32_t i = 0; i < n; ++i) p[i] = FloatToF16(v.f[i]);
}
// E4M3 codes as their values / 256; NaN stays.
inline V VLoadF8(const uint8_t* p) {
  return VMake([&](uint32_t i) {
    const uint32_t magnitude = p[i] & 0x7Fu;
    const uint32_t bits = magnitude == 0x7F ? 0x7FC00000u : (magnitude << 20) + (112u << 23);
    float r;
    memcpy(&r, &bits, sizeof(r));
    // Below 8 the code is a number of steps of 2^-9.
    r = magnitude < 8 ? static_cast<float>(magnitude) * 0x1p-17f : r;
    return p[i] > 0x7F ? -r : r;
  });
}
// The first n lanes, within +-448, as E4M3 codes, to nearest even; NaN stays.
inline void VStoreF8(uint8_t* p, V v, uint32_t n) {
  for (uint32_t i = 0; i < n; ++i) {
    const float magnitude = fabsf(v.f[i]);
    uint32_t bits, code;
    memcpy(&bits, &magnitude, sizeof(bits));
    if (magnitude != magnitude) {
      code = 0x7F;
    } else if (magnitude < 0.015625f) {  // below 2^-6: multiples of 2^-9, what 2^14 counts in
      const float sum = magnitude + 16384.0f;
      memcpy(&code, &sum, sizeof(code));
      code -= 0x46800000u;
    } else {  // 20 bits less, and an exponent bias of 7 instead of 127
      code = ((bits + ((bits >> 20) & 1) + 0x7FFFFu) >> 20) - (120u << 3);
    }
    p[i] = static_cast<uint8_t>(code | (signbit(v.f[i]) ? 0x80u : 0u));
  }
}

}  // namespace
}  // namespace cpu
}  // namespace plansmith
