// Vectors of 16 floats, for the files that are compiled for AVX-512: everything is private to the
// file that includes it.
//
// SPDX-License-Identifier: Apache-2.0
#pragma once

#if defined(__GNUC__) && !defined(__clang__)
// GCC 12's own AVX-512 header reads variables that it means to leave undefined (GCC bug 105593).
#pragma GCC diagnostic ignored "-Wuninitialized"
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
#endif
#include <immintrin.h>
#include <stddef.h>
#include <stdint.h>

namespace plansmith {
namespace cpu {
namespace {

using V = __m512;
constexpr uint32_t kLanes = 16;

inline __mmask16 MaskOf(uint32_t n) { return static_cast<__mmask16>((1u << n) - 1); }
inline V VLoad(const float* p) { return _mm512_loadu_ps(p); }
inline V VLoadPart(const float* p, uint32_t n) { return _mm512_maskz_loadu_ps(MaskOf(n), p); }
inline void VStore(float* p, V v) { _mm512_storeu_ps(p, v); }
inline void VStorePart(float* p, V v, uint32_t n) { _mm512_mask_storeu_ps(p, MaskOf(n), v); }
inline V VSet1(float x) { return _mm512_set1_ps(x); }
inline V VAdd(V a, V b) { return _mm512_add_ps(a, b); }
inline V VSub(V a, V b) { return _mm512_sub_ps(a, b); }
inline V VMul(V a, V b) { return _mm512_mul_ps(a, b); }
inline V VDiv(V a, V b) { return _mm512_div_ps(a, b); }
inline V VFma(V a, V b, V c) { return _mm512_fmadd_ps(a, b, c); }  // a * b + c
inline V VMax(V a, V b) { return _mm512_max_ps(a, b); }            // b when either is NaN
inline V VMin(V a, V b) { return _mm512_min_ps(a, b); }
inline V VAbs(V a) { return _mm512_abs_ps(a); }
inline V VRound(V a) {
  return _mm512_roundscale_ps(a, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
}
inline V VCopySign(V magnitude, V sign) {
  return _mm512_or_ps(magnitude, _mm512_and_ps(sign, _mm512_set1_ps(-0.0f)));
}
// a < b ? x : y
inline V VSelectLess(V a, V b, V x, V y) {
  return _mm512_mask_blend_ps(_mm512_cmp_ps_mask(a, b, _CMP_LT_OQ), y, x);
}
// 2^floor(log2 a) for a > 0; 0 for subnormal a, an infinity for a NaN.
inline V VPowerBelow(V a) {
  const __m512i exponent = _mm512_set1_epi32(0x7F800000);
  return _mm512_castsi512_ps(_mm512_and_si512(_mm512_castps_si512(a), exponent));
}
// 2^n for integral n in -126..127
inline V VPow2(V n) {
  const __m512i bits = _mm512_add_epi32(_mm512_cvtps_epi32(n), _mm512_set1_epi32(127));
  return _mm512_castsi512_ps(_mm512_slli_epi32(bits, 23));
}
// Lane j of v[i] to lane i of v[j].
inline void VTranspose(V (&v)[kLanes]) {
  V x[kLanes];  // x[4 g + j], quarter q: of v[4 g .. 4 g + 3] lane 4 q + j
  for (uint32_t i = 0; i < kLanes; i += 4) {
    const __m512d a = _mm512_castps_pd(_mm512_unpacklo_ps(v[i], v[i + 1]));
    const __m512d b = _mm512_castps_pd(_mm512_unpackhi_ps(v[i], v[i + 1]));
    const __m512d c = _mm512_castps_pd(_mm512_unpacklo_ps(v[i + 2], v[i + 3]));
    const __m512d d = _mm512_castps_pd(_mm512_unpackhi_ps(v[i + 2], v[i + 3]));
    x[i] = _mm512_castpd_ps(_mm512_unpacklo_pd(a, c));
    x[i + 1] = _mm512_castpd_ps(_mm512_unpackhi_pd(a, c));
    x[i + 2] = _mm512_castpd_ps(_mm512_unpacklo_pd(b, d));
    x[i + 3] = _mm512_castpd_ps(_mm512_unpackhi_pd(b, d));
  }
  for (uint32_t j = 0; j < 4; ++j) {
    const V low = _mm512_shuffle_f32x4(x[j], x[4 + j], 0x44);
    const V high = _mm512_shuffle_f32x4(x[j], x[4 + j], 0xEE);
    const V low2 = _mm512_shuffle_f32x4(x[8 + j], x[12 + j], 0x44);
    const V high2 = _mm512_shuffle_f32x4(x[8 + j], x[12 + j], 0xEE);
    v[j] = _mm512_shuffle_f32x4(low, low2, 0x88);
    v[4 + j] = _mm512_shuffle_f32x4(low, low2, 0xDD);
    v[8 + j] = _mm512_shuffle_f32x4(high, high2, 0x88);
    v[12 + j] = _mm512_shuffle_f32x4(high, high2, 0xDD);
  }
}
inline float VReduceAdd(V v) { return _mm512_reduce_add_ps(v); }
inline float VReduceMax(V v) { return _mm512_reduce_max_ps(v); }
// The first n lanes, integral and within int8; any value for a NaN.
inline void VStoreI8(int8_t* p, V v, uint32_t n) {
  _mm512_mask_cvtsepi32_storeu_epi8(p, MaskOf(n), _mm512_cvtps_epi32(v));
}
inline V VLoadI8(const int8_t* p) {
  const __m128i codes = _mm_loadu_si128(reinterpret_cast<const __m128i*>(p));
  return _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(codes));
}
inline V VLoadBf16(const uint16_t* p) {
  const __m256i halves = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p));
  return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(halves), 16));
}
inline V VLoadF16(const uint16_t* p) {
  return _mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)));
}
// The first n lanes as half floats, to nearest even; NaN stays.
inline void VStoreF16(uint16_t* p, V v, uint32_t n) {
  const __m256i half = _mm512_cvtps_ph(v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
  _mm256_mask_storeu_epi16(p, MaskOf(n), half);
}
// E4M3 codes as their values / 256, which are the half floats of the same bits; NaN stays.
inline V VLoadF8(const uint8_t* p) {
  const __m128i codes = _mm_loadu_si128(reinterpret_cast<const __m128i*>(p));
  const __m256i wide = _mm256_slli_epi16(_mm256_cvtepi8_epi16(codes), 7);  // the sign in two bits
  const __m256i half = _mm256_and_si256(wide, _mm256_set1_epi16(static_cast<int16_t>(0xBF80)));
  const __mmask16 nan =
      _mm_cmpeq_epi8_mask(_mm_or_si128(codes, _mm_set1_epi8(-128)), _mm_set1_epi8(-1));
  const __m256i infinite = _mm256_set1_epi16(0x7C00);
  return _mm512_cvtph_ps(_mm256_or_si256(half, _mm256_maskz_mov_epi16(nan, infinite)));
}
// The first n lanes, within +-448, as E4M3 codes, to nearest even; NaN stays.
inline void VStoreF8(uint8_t* p, V v, uint32_t n) {
  const __m512i bits = _mm512_castps_si512(v), one = _mm512_set1_epi32(1);
  const V magnitude = VAbs(v);
  const __m512i abs = _mm512_castps_si512(magnitude);
  // Normal numbers: 20 bits less, and an exponent bias of 7 instead of 127.
  const __m512i odd = _mm512_and_si512(_mm512_srli_epi32(abs, 20), one);
  const __m512i even = _mm512_add_epi32(_mm512_add_epi32(abs, odd), _mm512_set1_epi32(0x7FFFF));
  __m512i code = _mm512_sub_epi32(_mm512_srli_epi32(even, 20), _mm512_set1_epi32(120 << 3));
  // Those below 2^-6 are multiples of 2^-9: what 2^14 counts in.
  const V sum = VAdd(magnitude, VSet1(16384.0f));
  const __m512i small =
      _mm512_sub_epi32(_mm512_castps_si512(sum), _mm512_castps_si512(VSet1(16384.0f)));
  const __mmask16 is_small = _mm512_cmp_ps_mask(magnitude, VSet1(0.015625f), _CMP_LT_OQ);
  code = _mm512_mask_mov_epi32(code, is_small, small);
  code =
      _mm512_mask_mov_epi32(code, _mm512_cmp_ps_mask(v, v, _CMP_UNORD_Q), _mm512_set1_epi32(0x7F));
  const __m512i sign = _mm512_and_si512(_mm512_srli_epi32(bits, 24), _mm512_set1_epi32(0x80));
  _mm512_mask_cvtepi32_storeu_epi8(p, MaskOf(n), _mm512_or_si512(code, sign));
}

}  // namespace
}  // namespace cpu
}  // namespace plansmith
