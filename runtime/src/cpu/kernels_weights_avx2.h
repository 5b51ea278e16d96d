// Weights of every type decoded in registers, 16 outputs (two vectors) at a time: the `Weights` of
// FloatBlock (kernels_linear.h) for AVX2 with F16C.
//
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "cpu/kernels_linear.h"
#include "cpu/simd_avx2.h"

namespace plansmith {
namespace cpu {
namespace {

inline __m128i Load16(const uint8_t* p) {
  return _mm_loadu_si128(reinterpret_cast<const __m128i*>(p));
}
inline __m256i Load32(const uint8_t* p) {
  return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p));
}

struct F32Weights : OneColumn, NoScales {
  static constexpr uint32_t kLineBytes = 64;
  static void Next(const Line* line, V* w) {
    const float* p = reinterpret_cast<const float*>(*line);
    w[0] = _mm256_loadu_ps(p);
    w[1] = _mm256_loadu_ps(p + kLanes);
  }
};
struct Bf16Weights : OneColumn, NoScales {
  static constexpr uint32_t kLineBytes = 32;
  static void Next(const Line* line, V* w) {
    w[0] = VLoadBf16(reinterpret_cast<const uint16_t*>(*line));
    w[1] = VLoadBf16(reinterpret_cast<const uint16_t*>(*line) + kLanes);
  }
};
struct F16Weights : OneColumn, NoScales {
  static constexpr uint32_t kLineBytes = 32;
  static void Next(const Line* line, V* w) {
    w[0] = _mm256_cvtph_ps(Load16(*line));
    w[1] = _mm256_cvtph_ps(Load16(*line + 16));
  }
};
// An E4M3 code shifted into a half float is its value / 256, subnormal ones too.
struct F8Weights : OneColumn, F8Scales {
  static constexpr uint32_t kLineBytes = 16;
  static void Next(const Line* line, V* w) {
    const __m256i wide = _mm256_slli_epi16(_mm256_cvtepi8_epi16(Load16(*line)), 7);
    const __m256i mask =
        _mm256_set1_epi16(static_cast<int16_t>(0xBFFF));  // the sign is there twice
    const __m256i half = _mm256_and_si256(wide, mask);
    w[0] = _mm256_cvtph_ps(_mm256_castsi256_si128(half));
    w[1] = _mm256_cvtph_ps(_mm256_extracti128_si256(half, 1));
  }
};

struct TwoVectors {
  __m256i half[2];
};
struct LineOf64 {
  using Line = TwoVectors;
  static Line Load(const uint8_t* p) { return {{Load32(p), Load32(p + 32)}}; }
};
// Four k in a 32-bit lane, from the highest.
struct I8Weights : LineOf64, FloatScales {
  static constexpr uint32_t kStep = 4, kLineBytes = 64;
  static uint32_t Column(uint32_t i) { return 3 - i; }
  static void Next(Line* line, V* w) {
    for (uint32_t h = 0; h < 2; ++h) {
      w[h] = _mm256_cvtepi32_ps(_mm256_srai_epi32(line->half[h], 24));
      line->half[h] = _mm256_slli_epi32(line->half[h], 8);
    }
  }
};
// A code is the value + 8: with its highest bit turned over, a number of 4 bits in two's
// complement. From the highest: k0+7, k0+3, k0+6, k0+2, ...
struct I4Weights : LineOf64, FloatScales {
  static constexpr uint32_t kStep = 8, kLineBytes = 64;
  static uint32_t Column(uint32_t i) { return 7 - NibbleColumns::Column(i); }
  static Line Load(const uint8_t* p) {
    const __m256i high = _mm256_set1_epi8(static_cast<int8_t>(0x88));
    return {{_mm256_xor_si256(Load32(p), high), _mm256_xor_si256(Load32(p + 32), high)}};
  }
  static void Next(Line* line, V* w) {
    for (uint32_t h = 0; h < 2; ++h) {
      w[h] = _mm256_cvtepi32_ps(_mm256_srai_epi32(line->half[h], 28));
      line->half[h] = _mm256_slli_epi32(line->half[h], 4);
    }
  }
};
struct I4ZeroWeights : LineOf64, FloatScales {
  static constexpr uint32_t kStep = 8, kLineBytes = 64;
  static constexpr bool kHasZeros = true;
  static uint32_t Column(uint32_t i) { return 7 - NibbleColumns::Column(i); }
  static void Next(Line* line, V* w) {
    for (uint32_t h = 0; h < 2; ++h) {
      w[h] = _mm256_cvtepi32_ps(_mm256_srli_epi32(line->half[h], 28));
      line->half[h] = _mm256_slli_epi32(line->half[h], 4);
    }
  }
};
// The magnitude by a table of 8 floats (a permutation looks at the lowest 3 bits of an index), the
// sign as it is.
struct F4Weights : LineOf64, NibbleColumns, F4Scales {
  static void Next(Line* line, V* w) {
    const V table = _mm256_setr_ps(0, 0.5f, 1, 1.5f, 2, 3, 4, 6);
    for (uint32_t h = 0; h < 2; ++h) {
      const V sign = _mm256_castsi256_ps(_mm256_slli_epi32(line->half[h], 28));
      w[h] = VCopySign(_mm256_permutevar8x32_ps(table, line->half[h]), sign);
      line->half[h] = _mm256_srli_epi32(line->half[h], 4);
    }
  }
};

}  // namespace
}  // namespace cpu
}  // namespace plansmith
