// Kernels for AVX2 with FMA. Compiled with those flags, called only where the machine has them.
//
// SPDX-License-Identifier: Apache-2.0
#include "cpu/simd_avx2.h"
// The vectors above come first: what follows is written over them.
#include "cpu/kernels_table.h"
#include "cpu/kernels_weights_avx2.h"

namespace plansmith {
namespace cpu {
namespace {

inline __m256i Broadcast4(const int8_t* q) {
  int32_t four;
  __builtin_memcpy(&four, q, sizeof(four));
  return _mm256_set1_epi32(four);
}
// sum += the pairs of 16-bit sums
inline __m256i AddPairs(__m256i sum, __m256i sums16) {
  return _mm256_add_epi32(sum, _mm256_madd_epi16(sums16, _mm256_set1_epi16(1)));
}

// vpmaddubsw saturates at 16 bits: |w| as the unsigned side and w's sign moved to q stay within
// 2 * 128 * 127. Not the other way round: a weight may be -128, which int8 cannot negate. For the
// same reason q may not: DotI8FullRange.
struct DotI8 {
  static constexpr uint32_t kStep = 4;
  static constexpr int32_t kOffset = 0;

  template <uint32_t MR>
  static void Run(const uint8_t* w, const int8_t* q, size_t q_stride, uint32_t steps,
                  __m256i (*dot)[2]) {
    for (uint32_t s = 0; s < steps; ++s, w += 64, q += kStep) {
      const __m256i w0 = Load32(w), w1 = Load32(w + 32);
      const __m256i size0 = _mm256_abs_epi8(w0), size1 = _mm256_abs_epi8(w1);
      for (uint32_t r = 0; r < MR; ++r) {
        const __m256i four = Broadcast4(q + r * q_stride);
        dot[r][0] = AddPairs(dot[r][0], _mm256_maddubs_epi16(size0, _mm256_sign_epi8(four, w0)));
        dot[r][1] = AddPairs(dot[r][1], _mm256_maddubs_epi16(size1, _mm256_sign_epi8(four, w1)));
      }
    }
  }
};

// Nibbles are unsigned as they are: 2 * 15 * 128 a pair, so 8 pairs (32 k) are added in 16 bits
// before they are widened.
struct DotI4 {
  static constexpr uint32_t kStep = 8;
  static constexpr int32_t kOffset = 8;

  template <uint32_t MR>
  static void Run(const uint8_t* w, const int8_t* q, size_t q_stride, uint32_t steps,
                  __m256i (*dot)[2]) {
    const __m256i nibble = _mm256_set1_epi8(15);
    while (steps > 0) {
      const uint32_t n = steps < 4 ? steps : 4;
      __m256i part[MR][2];
      for (uint32_t r = 0; r < MR; ++r) part[r][0] = part[r][1] = _mm256_setzero_si256();
      for (uint32_t s = 0; s < n; ++s, w += 64, q += kStep) {
        for (uint32_t h = 0; h < 2; ++h) {
          const __m256i both = Load32(w + 32 * h);
          const __m256i low = _mm256_and_si256(both, nibble);
          const __m256i high = _mm256_and_si256(_mm256_srli_epi16(both, 4), nibble);
          for (uint32_t r = 0; r < MR; ++r) {
            const int8_t* qr = q + r * q_stride;
            part[r][h] = _mm256_add_epi16(part[r][h], _mm256_maddubs_epi16(low, Broadcast4(qr)));
            part[r][h] =
                _mm256_add_epi16(part[r][h], _mm256_maddubs_epi16(high, Broadcast4(qr + 4)));
          }
        }
      }
      for (uint32_t r = 0; r < MR; ++r) {
        dot[r][0] = AddPairs(dot[r][0], part[r][0]);
        dot[r][1] = AddPairs(dot[r][1], part[r][1]);
      }
      steps -= n;
    }
  }
};

// Both sides widened to 16 bits, whose pairs fit in 32: -128 * -128 * 2 = 2^15.
struct DotI8FullRange {
  static constexpr uint32_t kStep = 4;
  static constexpr int32_t kOffset = 0;

  template <uint32_t MR>
  static void Run(const uint8_t* w, const int8_t* q, size_t q_stride, uint32_t steps,
                  __m256i (*dot)[2]) {
    __m256i pairs[MR][4];  // of 4 outputs each, two sums an output
    for (uint32_t r = 0; r < MR; ++r) {
      for (__m256i& p : pairs[r]) p = _mm256_setzero_si256();
    }
    for (uint32_t s = 0; s < steps; ++s, w += 64, q += kStep) {
      __m256i wide[4];
      for (uint32_t i = 0; i < 4; ++i) wide[i] = _mm256_cvtepi8_epi16(Load16(w + 16 * i));
      for (uint32_t r = 0; r < MR; ++r) {
        const __m128i four = _mm256_castsi256_si128(Broadcast4(q + r * q_stride));
        const __m256i wide_q = _mm256_cvtepi8_epi16(four);
        for (uint32_t i = 0; i < 4; ++i) {
          pairs[r][i] = _mm256_add_epi32(pairs[r][i], _mm256_madd_epi16(wide[i], wide_q));
        }
      }
    }
    for (uint32_t r = 0; r < MR; ++r) {
      for (uint32_t h = 0; h < 2; ++h) {  // outputs 0 1 4 5 | 2 3 6 7 come out of the sum
        const __m256i sums = _mm256_hadd_epi32(pairs[r][2 * h], pairs[r][2 * h + 1]);
        dot[r][h] = _mm256_add_epi32(dot[r][h], _mm256_permute4x64_epi64(sums, 0xD8));
      }
    }
  }
};

template <typename Dot, uint32_t kRows>
struct IntBlock {
  static constexpr uint32_t kMaxRows = kRows, kMaxTiles = 1, kOneRowTiles = 1;

  // Inlined into the loops over blocks it runs out of registers: 7 % of int4 at two rows.
  template <uint32_t MR, uint32_t NT>
  [[gnu::noinline]] static void Run(const LinearArgs& a, uint32_t row, uint32_t tile) {
    const uint32_t steps = a.w.group_cols / Dot::kStep;
    const size_t tile_bytes = static_cast<size_t>(a.w.padded_cols) / Dot::kStep * 64;
    const uint8_t* w = static_cast<const uint8_t*>(a.w.data) + tile * tile_bytes;
    const int8_t* q = a.q + row * a.q_stride;
    const size_t q_groups = a.q_groups, num_groups = a.w.num_groups;
    const float* row_scales = a.q_scales + row * q_groups;
    const int32_t* row_sums = a.q_sums + row * num_groups;
    size_t scale_at = tile * num_groups * kTile;
    V sum[MR][2];
    for (uint32_t r = 0; r < MR; ++r) sum[r][0] = sum[r][1] = VSet1(0.0f);
    for (size_t g = 0; g < num_groups; ++g, scale_at += kTile) {
      __m256i dot[MR][2];
      for (uint32_t r = 0; r < MR; ++r) {
        dot[r][0] = _mm256_set1_epi32(-Dot::kOffset * row_sums[r * num_groups + g]);
        dot[r][1] = dot[r][0];
      }
      Dot::template Run<MR>(w, q, a.q_stride, steps, dot);
      w += static_cast<size_t>(steps) * 64;
      q += static_cast<size_t>(steps) * Dot::kStep;
      for (uint32_t r = 0; r < MR; ++r) {
        const V scale = VSet1(row_scales[r * q_groups + (q_groups == 1 ? 0 : g)]);
        for (uint32_t h = 0; h < 2; ++h) {
          const V ws = LoadScales(a.w, scale_at + h * kLanes);
          sum[r][h] = VFma(VMul(_mm256_cvtepi32_ps(dot[r][h]), scale), ws, sum[r][h]);
        }
      }
    }
    for (uint32_t r = 0; r < MR; ++r) Finish(a, row + r, tile, sum[r]);
  }
};

void LinearI8(const LinearArgs& a, uint32_t row_begin, uint32_t row_end, uint32_t tile_begin,
              uint32_t tile_end) {
  if (a.q_full_range) {
    Linear<IntBlock<DotI8FullRange, 2>>(a, row_begin, row_end, tile_begin, tile_end);
  } else {
    Linear<IntBlock<DotI8, 4>>(a, row_begin, row_end, tile_begin, tile_end);
  }
}

}  // namespace

const KernelTable kAvx2Kernels = TableOf(
    "avx2", {{Linear<FloatBlock<F32Weights, 6, 1, 1>>, Linear<FloatBlock<Bf16Weights, 6, 1, 1>>,
              Linear<FloatBlock<I8Weights, 4, 1, 2>>,
              LinearI4<FloatBlock<I4Weights, 4, 1, 2>, FloatBlock<I4ZeroWeights, 4, 1, 2>>,
              Linear<FloatBlock<F16Weights, 6, 1, 2>>, Linear<FloatBlock<F8Weights, 4, 1, 2>>,
              Linear<FloatBlock<F4Weights, 4, 1, 2>>},
             {nullptr, nullptr, LinearI8, Linear<IntBlock<DotI4, 2>>, nullptr, nullptr, nullptr},
             Linear<FloatBlock<InPairs<F8Weights>, 4, 1, 2, CodeInput>>});

}  // namespace cpu
}  // namespace plansmith
