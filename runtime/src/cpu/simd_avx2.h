// Vectors of 8 floats. For kernels_avx2.cc only: everything is private to the file that includes
// it.
//
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <immintrin.h>
#include <stddef.h>
#include <stdint.h>

namespace plansmith {
namespace cpu {
namespace {

using V = __m256;
constexpr uint32_t kLanes = 8;

inline __m256i MaskOf(uint32_t n) {
  return _mm256_cmpgt_epi32(_mm256_set1_epi32(static_cast<int>(n)),
                            _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7));
}
inline V VLoad(const float* p) { return _mm256_loadu_ps(p); }
inline V VLoadPart(const float* p, uint32_t n) { return _mm256_maskload_ps(p, MaskOf(n)); }
inline void VStore(float* p, V v) { _mm256_storeu_ps(p, v); }
inline void VStorePart(float* p, V v, uint32_t n) { _mm256_maskstore_ps(p, MaskOf(n), v); }
inline V VSet1(float x) { return _mm256_set1_ps(x); }
inline V VAdd(V a, V b) { return _mm256_add_ps(a, b); }
inline V VSub(V a, V b) { return _mm256_sub_ps(a, b); }
inline V VMul(V a, V b) { return _mm256_mul_ps(a, b); }
inline V VDiv(V a, V b) { return _mm256_div_ps(a, b); }
inline V VFma(V a, V b, V c) { return _mm256_fmadd_ps(a, b, c); }  // a * b + c
inline V VMax(V a, V b) { return _mm256_max_ps(a, b); }            // b when either is NaN
inline V VMin(V a, V b) { return _mm256_min_ps(a, b); }
inline V VAbs(V a) { return _mm256_andnot_ps(_mm256_set1_ps(-0.0f), a); }
inline V VRound(V a) { return _mm256_round_ps(a, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC); }
inline V VCopySign(V magnitude, V sign) {
  return _mm256_or_ps(magnitude, _mm256_and_ps(sign, _mm256_set1_ps(-0.0f)));
}
// a < b ? x : y
inline V VSelectLess(V a, V b, V x, V y) {
  return _mm256_blendv_ps(y, x, _mm256_cmp_ps(a, b, _CMP_LT_OQ));
}
// 2^floor(log2 a) for a > 0; 0 for subnormal a, an infinity for a NaN.
inline V VPowerBelow(V a) {
  return _mm256_and_ps(a, _mm256_castsi256_ps(_mm256_set1_epi32(0x7F800000)));
}
// 2^n for integral n in -126..127
inline V VPow2(V n) {
  const __m256i bits = _mm256_add_epi32(_mm256_cvtps_epi32(n), _mm256_set1_epi32(127));
  return _mm256_castsi256_ps(_mm256_slli_epi32(bits, 23));
}
// Lane j of v[i] to lane i of v[j].
inline void VTranspose(V (&v)[kLanes]) {
  V x[kLanes];  // x[4 g + j], half h: of v[4 g .. 4 g + 3] lane 4 h + j
  for (uint32_t i = 0; i < kLanes; i += 4) {
    const __m256d a = _mm256_castps_pd(_mm256_unpacklo_ps(v[i], v[i + 1]));
    const __m256d b = _mm256_castps_pd(_mm256_unpackhi_ps(v[i], v[i + 1]));
    const __m256d c = _mm256_castps_pd(_mm256_unpacklo_ps(v[i + 2], v[i + 3]));
    const __m256d d = _mm256_castps_pd(_mm256_unpackhi_ps(v[i + 2], v[i + 3]));
    x[i] = _mm256_castpd_ps(_mm256_unpacklo_pd(a, c));
    x[i + 1] = _mm256_castpd_ps(_mm256_unpackhi_pd(a, c));
    x[i + 2] = _mm256_castpd_ps(_mm256_unpacklo_pd(b, d));
    x[i + 3] = _mm256_castpd_ps(_mm256_unpackhi_pd(b, d));
  }
  for (uint32_t j = 0; j < 4; ++j) {
    v[j] = _mm256_permute2f128_ps(x[j], x[4 + j], 0x20);
    v[4 + j] = _mm256_permute2f128_ps(x[j], x[4 + j], 0x31);
  }
}
inline float VReduceAdd(V v) {
  __m128 s = _mm_add_ps(_mm256_castps256_ps128(v), _mm256_extractf128_ps(v, 1));
  s = _mm_add_ps(s, _mm_movehl_ps(s, s));
  return _mm_cvtss_f32(_mm_add_ss(s, _mm_movehdup_ps(s)));
}
inline float VReduceMax(V v) {
  __m128 s = _mm_max_ps(_mm256_castps256_ps128(v), _mm256_extractf128_ps(v, 1));
  s = _mm_max_ps(s, _mm_movehl_ps(s, s));
  return _mm_cvtss_f32(_mm_max_ss(s, _mm_movehdup_ps(s)));
}
// The first n lanes, integral and within int8; any value for a NaN.
inline void VStoreI8(int8_t* p, V v, uint32_t n) {
  const __m256i i32 = _mm256_cvtps_epi32(v);
  const __m128i i16 =
      _mm_packs_epi32(_mm256_castsi256_si128(i32), _mm256_extracti128_si256(i32, 1));
  const __m128i i8 = _mm_packs_epi16(i16, i16);
  if (n == kLanes) {
    _mm_storel_epi64(reinterpret_cast<__m128i*>(p), i8);
  } else {
    alignas(16) int8_t lanes[16];
    _mm_store_si128(reinterpret_cast<__m128i*>(lanes), i8);
    for (uint32_t i = 0; i < n; ++i) p[i] = lanes[i];
  }
}
inline V VLoadI8(const int8_t* p) {
  const __m128i codes = _mm_loadl_epi64(reinterpret_cast<const __m128i*>(p));
  return _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(codes));
}
inline V VLoadBf16(const uint16_t* p) {
  const __m128i halves = _mm_loadu_si128(reinterpret_cast<const __m128i*>(p));
  return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(halves), 16));
}
inline V VLoadF16(const uint16_t* p) {
  return _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
}
// The first n lanes as half floats, to nearest even; NaN stays.
inline void VStoreF16(uint16_t* p, V v, uint32_t n) {
  const __m128i half = _mm256_cvtps_ph(v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
  if (n == kLanes) {
    _mm_storeu_si128(reinterpret_cast<__m128i*>(p), half);
  } else {
    alignas(16) uint16_t lanes[kLanes];
    _mm_store_si128(reinterpret_cast<__m128i*>(lanes), half);
    for (uint32_t i = 0; i < n; ++i) p[i] = lanes[i];
  }
}
// E4M3 codes as their values / 256, which are the half floats of the same bits; NaN stays.
inline V VLoadF8(const uint8_t* p) {
  const __m128i codes = _mm_loadl_epi64(reinterpret_cast<const __m128i*>(p));
  const __m128i wide = _mm_slli_epi16(_mm_cvtepi8_epi16(codes), 7);  // the sign in two bits
  const __m128i half = _mm_and_si128(wide, _mm_set1_epi16(static_cast<int16_t>(0xBF80)));
  const __m128i signless = _mm_and_si128(wide, _mm_set1_epi16(0x3F80));
  const __m128i nan = _mm_cmpeq_epi16(signless, _mm_set1_epi16(0x3F80));
  return _mm256_cvtph_ps(_mm_or_si128(half, _mm_and_si128(nan, _mm_set1_epi16(0x7C00))));
}
// The first n lanes, within +-448, as E4M3 codes, to nearest even; NaN stays.
inline void VStoreF8(uint8_t* p, V v, uint32_t n) {
  const V magnitude = VAbs(v);
  const __m256i abs = _mm256_castps_si256(magnitude);
  // Normal numbers: 20 bits less, and an exponent bias of 7 instead of 127.
  const __m256i odd = _mm256_and_si256(_mm256_srli_epi32(abs, 20), _mm256_set1_epi32(1));
  const __m256i even = _mm256_add_epi32(_mm256_add_epi32(abs, odd), _mm256_set1_epi32(0x7FFFF));
  const __m256i normal = _mm256_sub_epi32(_mm256_srli_epi32(even, 20), _mm256_set1_epi32(120 << 3));
  // Those below 2^-6 are multiples of 2^-9: what 2^14 counts in.
  const V sum = VAdd(magnitude, VSet1(16384.0f));
  const __m256i small =
      _mm256_sub_epi32(_mm256_castps_si256(sum), _mm256_castps_si256(VSet1(16384.0f)));
  V code = VSelectLess(magnitude, VSet1(0.015625f), _mm256_castsi256_ps(small),
                       _mm256_castsi256_ps(normal));
  code = _mm256_blendv_ps(code, _mm256_castsi256_ps(_mm256_set1_epi32(0x7F)),
                          _mm256_cmp_ps(v, v, _CMP_UNORD_Q));
  const __m256i sign =
      _mm256_and_si256(_mm256_srli_epi32(_mm256_castps_si256(v), 24), _mm256_set1_epi32(0x80));
  alignas(32) int32_t codes[kLanes];
  _mm256_store_si256(reinterpret_cast<__m256i*>(codes),
                     _mm256_or_si256(_mm256_castps_si256(code), sign));
  for (uint32_t i = 0; i < n; ++i) p[i] = static_cast<uint8_t>(codes[i]);
}

}  // namespace
}  // namespace cpu
}  // namespace plansmith
