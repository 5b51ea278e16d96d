// Weights of every type decoded in registers, 16 outputs at a time: the `Weights` of FloatBlock
// (kernels_linear.h) for AVX-512.
//
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "cpu/kernels_linear.h"
#include "cpu/simd_avx512.h"

namespace plansmith {
namespace cpu {
namespace {

struct F32Weights : OneColumn, NoScales {
  static constexpr uint32_t kLineBytes = 64;
  static void Next(const Line* line, V* w) { *w = _mm512_loadu_ps(*line); }
};
struct Bf16Weights : OneColumn, NoScales {
  static constexpr uint32_t kLineBytes = 32;
  static void Next(const Line* line, V* w) {
    *w = VLoadBf16(reinterpret_cast<const uint16_t*>(*line));
  }
};
struct F16Weights : OneColumn, NoScales {
  static constexpr uint32_t kLineBytes = 32;
  static void Next(const Line* line, V* w) {
    *w = _mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(*line)));
  }
};
// An E4M3 code shifted into a half float is its value / 256, subnormal ones too.
struct F8Weights : OneColumn, F8Scales {
  static constexpr uint32_t kLineBytes = 16;
  static void Next(const Line* line, V* w) {
    const __m128i codes = _mm_loadu_si128(reinterpret_cast<const __m128i*>(*line));
    const __m256i wide = _mm256_slli_epi16(_mm256_cvtepi8_epi16(codes), 7);  // the sign twice
    const __m256i mask = _mm256_set1_epi16(static_cast<int16_t>(0xBFFF));
    *w = _mm512_cvtph_ps(_mm256_and_si256(wide, mask));
  }
};
// Four k in a 32-bit lane, from the highest.
struct I8Weights : FloatScales {
  static constexpr uint32_t kStep = 4, kLineBytes = 64;
  using Line = __m512i;
  static Line Load(const uint8_t* p) { return _mm512_loadu_si512(p); }
  static uint32_t Column(uint32_t i) { return 3 - i; }
  static void Next(Line* line, V* w) {
    *w = _mm512_cvtepi32_ps(_mm512_srai_epi32(*line, 24));
    *line = _mm512_slli_epi32(*line, 8);
  }
};
// Nibbles by a table of 16 floats: a permutation looks at the lowest 4 bits of an index.
template <typename Table>
struct NibbleWeights : NibbleColumns {
  using Line = __m512i;
  static Line Load(const uint8_t* p) { return _mm512_loadu_si512(p); }
  static void Next(Line* line, V* w) {
    *w = _mm512_permutexvar_ps(*line, Table::Values());
    *line = _mm512_srli_epi32(*line, 4);
  }
};
struct I4Table {
  static V Values() {
    return _mm512_setr_ps(-8, -7, -6, -5, -4, -3, -2, -1, 0, 1, 2, 3, 4, 5, 6, 7);
  }
};
struct CodeTable {
  static V Values() { return _mm512_setr_ps(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15); }
};
struct F4Table {
  static V Values() {
    return _mm512_setr_ps(0, 0.5f, 1, 1.5f, 2, 3, 4, 6, -0.0f, -0.5f, -1, -1.5f, -2, -3, -4, -6);
  }
};
struct I4Weights : NibbleWeights<I4Table>, FloatScales {};
struct I4ZeroWeights : NibbleWeights<CodeTable>, FloatScales {
  static constexpr bool kHasZeros = true;
};
struct F4Weights : NibbleWeights<F4Table>, F4Scales {};

}  // namespace
}  // namespace cpu
}  // namespace plansmith
