// Vectors of 8 floats in plain C++, which compilers turn into whatever the build's baseline has.
// For kernels_portable.cc only: everything is private to the file that includes it.
//
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <math.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>

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

}  // namespace
}  // namespace cpu
}  // namespace plansmith
