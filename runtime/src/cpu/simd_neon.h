// Vectors of 4 floats. For kernels_neon.cc only: everything is private to the file that includes
// it.
//
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <arm_neon.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>

namespace plansmith {
namespace cpu {
namespace {

using V = float32x4_t;
constexpr uint32_t kLanes = 4;

inline V VLoad(const float* p) { return vld1q_f32(p); }
inline V VLoadPart(const float* p, uint32_t n) {
  float lanes[kLanes] = {};
  memcpy(lanes, p, n * sizeof(float));
  return vld1q_f32(lanes);
}
inline void VStore(float* p, V v) { vst1q_f32(p, v); }
inline void VStorePart(float* p, V v, uint32_t n) {
  float lanes[kLanes];
  vst1q_f32(lanes, v);
  memcpy(p, lanes, n * sizeof(float));
}
inline V VSet1(float x) { return vdupq_n_f32(x); }
inline V VAdd(V a, V b) { return vaddq_f32(a, b); }
inline V VSub(V a, V b) { return vsubq_f32(a, b); }
inline V VMul(V a, V b) { return vmulq_f32(a, b); }
inline V VDiv(V a, V b) { return vdivq_f32(a, b); }
inline V VFma(V a, V b, V c) { return vfmaq_f32(c, a, b); }  // a * b + c
// b when either is NaN, where NEON's own maximum is NaN.
inline V VMax(V a, V b) { return vbslq_f32(vcgtq_f32(a, b), a, b); }
inline V VMin(V a, V b) { return vbslq_f32(vcltq_f32(a, b), a, b); }
inline V VAbs(V a) { return vabsq_f32(a); }
inline V VRound(V a) { return vrndnq_f32(a); }
inline V VCopySign(V magnitude, V sign) {
  return vbslq_f32(vdupq_n_u32(0x80000000u), sign, magnitude);
}
// a < b ? x : y
inline V VSelectLess(V a, V b, V x, V y) { return vbslq_f32(vcltq_f32(a, b), x, y); }
// 2^floor(log2 a) for a > 0; 0 for subnormal a, an infinity for a NaN.
inline V VPowerBelow(V a) {
  return vreinterpretq_f32_u32(vandq_u32(vreinterpretq_u32_f32(a), vdupq_n_u32(0x7F800000u)));
}
// 2^n for integral n in -126..127
inline V VPow2(V n) {
  return vreinterpretq_f32_s32(vshlq_n_s32(vaddq_s32(vcvtq_s32_f32(n), vdupq_n_s32(127)), 23));
}
// Lane j of v[i] to lane i of v[j].
inline void VTranspose(V (&v)[kLanes]) {
  const float64x2_t a = vreinterpretq_f64_f32(vtrn1q_f32(v[0], v[1]));
  const float64x2_t b = vreinterpretq_f64_f32(vtrn2q_f32(v[0], v[1]));
  const float64x2_t c = vreinterpretq_f64_f32(vtrn1q_f32(v[2], v[3]));
  const float64x2_t d = vreinterpretq_f64_f32(vtrn2q_f32(v[2], v[3]));
  v[0] = vreinterpretq_f32_f64(vtrn1q_f64(a, c));
  v[1] = vreinterpretq_f32_f64(vtrn1q_f64(b, d));
  v[2] = vreinterpretq_f32_f64(vtrn2q_f64(a, c));
  v[3] = vreinterpretq_f32_f64(vtrn2q_f64(b, d));
}
inline float VReduceAdd(V v) { return vaddvq_f32(v); }  // (0 + 1) + (2 + 3)
inline float VReduceMax(V v) { return vmaxvq_f32(v); }
// The first n lanes, integral and within int8; 0 for a NaN.
inline void VStoreI8(int8_t* p, V v, uint32_t n) {
  const int16x4_t i16 = vqmovn_s32(vcvtq_s32_f32(v));
  const int8x8_t i8 = vqmovn_s16(vcombine_s16(i16, i16));
  int8_t lanes[8];
  vst1_s8(lanes, i8);
  memcpy(p, lanes, n);
}
// Four bytes in a register of eight.
inline uint8x8_t Load4(const void* p) {
  uint32_t four;
  memcpy(&four, p, sizeof(four));
  return vreinterpret_u8_u32(vdup_n_u32(four));
}
inline V VLoadI8(const int8_t* p) {
  return vcvtq_f32_s32(vmovl_s16(vget_low_s16(vmovl_s8(vreinterpret_s8_u8(Load4(p))))));
}
inline V VLoadBf16(const uint16_t* p) {
  return vreinterpretq_f32_u32(vshll_n_u16(vld1_u16(p), 16));
}
inline V VLoadF16(const uint16_t* p) { return vcvt_f32_f16(vreinterpret_f16_u16(vld1_u16(p))); }
// The first n lanes as half floats, to nearest even; NaN stays.
inline void VStoreF16(uint16_t* p, V v, uint32_t n) {
  const uint16x4_t half = vreinterpret_u16_f16(vcvt_f16_f32(v));
  if (n == kLanes) {
    vst1_u16(p, half);
  } else {
    uint16_t lanes[kLanes];
    vst1_u16(lanes, half);
    memcpy(p, lanes, n * sizeof(uint16_t));
  }
}
// E4M3 codes as their values / 256, which are the half floats of the same bits; NaN stays.
inline V VLoadF8(const uint8_t* p) {
  const int8x8_t codes = vreinterpret_s8_u8(Load4(p));
  const uint16x4_t wide = vreinterpret_u16_s16(vget_low_s16(vshll_n_s8(codes, 7)));
  const uint16x4_t nan = vceq_u16(vand_u16(wide, vdup_n_u16(0x3F80)), vdup_n_u16(0x3F80));
  const uint16x4_t half = vand_u16(wide, vdup_n_u16(0xBF80));  // the sign was there twice
  return vcvt_f32_f16(vreinterpret_f16_u16(vorr_u16(half, vand_u16(nan, vdup_n_u16(0x7C00)))));
}
// The first n lanes, within +-448, as E4M3 codes, to nearest even; NaN stays.
inline void VStoreF8(uint8_t* p, V v, uint32_t n) {
  const V magnitude = VAbs(v);
  const uint32x4_t abs = vreinterpretq_u32_f32(magnitude);
  // Normal numbers: 20 bits less, and an exponent bias of 7 instead of 127.
  const uint32x4_t odd = vandq_u32(vshrq_n_u32(abs, 20), vdupq_n_u32(1));
  const uint32x4_t even = vaddq_u32(vaddq_u32(abs, odd), vdupq_n_u32(0x7FFFF));
  const uint32x4_t normal = vsubq_u32(vshrq_n_u32(even, 20), vdupq_n_u32(120 << 3));
  // Those below 2^-6 are multiples of 2^-9: what 2^14 counts in.
  const V sum = VAdd(magnitude, VSet1(16384.0f));
  const uint32x4_t small =
      vsubq_u32(vreinterpretq_u32_f32(sum), vreinterpretq_u32_f32(VSet1(16384.0f)));
  uint32x4_t code = vbslq_u32(vcltq_f32(magnitude, VSet1(0.015625f)), small, normal);
  code = vbslq_u32(vceqq_f32(v, v), code, vdupq_n_u32(0x7F));
  const uint32x4_t sign = vandq_u32(vshrq_n_u32(vreinterpretq_u32_f32(v), 24), vdupq_n_u32(0x80));
  uint32_t codes[kLanes];
  vst1q_u32(codes, vorrq_u32(code, sign));
  for (uint32_t i = 0; i < n; ++i) p[i] = static_cast<uint8_t>(codes[i]);
}

}  // namespace
}  // namespace cpu
}  // namespace plansmith
