// Vectors of 16 floats. For kernels_avx512vnni.cc only: everything is private to the file that
// includes it.
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
// 2^n for integral n in -126..127
inline V VPow2(V n) {
  const __m512i bits = _mm512_add_epi32(_mm512_cvtps_epi32(n), _mm512_set1_epi32(127));
  return _mm512_castsi512_ps(_mm512_slli_epi32(bits, 23));
}
inline float VReduceAdd(V v) { return _mm512_reduce_add_ps(v); }
inline float VReduceMax(V v) { return _mm512_reduce_max_ps(v); }
// The first n lanes, integral and within int8; any value for a NaN.
inline void VStoreI8(int8_t* p, V v, uint32_t n) {
  _mm512_mask_cvtsepi32_storeu_epi8(p, MaskOf(n), _mm512_cvtps_epi32(v));
}

}  // namespace
}  // namespace cpu
}  // namespace plansmith
