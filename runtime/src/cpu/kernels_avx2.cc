// Kernels for AVX2 with FMA. Compiled with those flags, called only where the machine has them.
//
// SPDX-License-Identifier: Apache-2.0
#include "cpu/simd_avx2.h"
// The vectors above come first: what follows is written over them.
#include "cpu/kernels_attention.h"
#include "cpu/kernels_linear.h"
#include "cpu/kernels_rows.h"

namespace plansmith {
namespace cpu {
namespace {

// A tile of 16 outputs is two vectors.
inline void Finish(const LinearArgs& a, uint32_t row, uint32_t tile, const V* sum) {
  for (uint32_t h = 0; h < 2; ++h) {
    const uint32_t n0 = tile * kTile + h * kLanes;
    if (n0 >= a.w.rows) return;
    const uint32_t n = a.w.rows - n0 < kLanes ? a.w.rows - n0 : kLanes;
    float* out = a.out + row * a.out_stride + n0;
    V r = sum[h];
    if (a.bias != nullptr) r = VAdd(r, LoadUpTo(a.bias + n0, n));
    if (a.accumulate) r = VAdd(r, LoadUpTo(out, n));
    StoreUpTo(out, r, n);
  }
}

inline V LoadWeights(const float* w) { return _mm256_loadu_ps(w); }
inline V LoadWeights(const uint16_t* w) {
  const __m128i half = _mm_loadu_si128(reinterpret_cast<const __m128i*>(w));
  return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(half), 16));
}

template <typename Stored>
struct FloatBlock {
  static constexpr uint32_t kMaxRows = 6,
                            kMaxTiles = 1;  // 12 sums, 2 weights, 1 input of 16 registers

  template <uint32_t MR, uint32_t NT>
  static void Run(const LinearArgs& a, uint32_t row, uint32_t tile) {
    const size_t tile_elements = static_cast<size_t>(a.w.padded_cols) * kTile;
    const Stored* w = static_cast<const Stored*>(a.w.data) + tile * tile_elements;
    const float* x = a.x + row * a.x_stride;
    V sum[MR][2];
    for (uint32_t r = 0; r < MR; ++r) sum[r][0] = sum[r][1] = VSet1(0.0f);
    for (uint32_t k = 0; k < a.w.cols; ++k) {
      const V w0 = LoadWeights(w + k * kTile), w1 = LoadWeights(w + k * kTile + kLanes);
      for (uint32_t r = 0; r < MR; ++r) {
        const V xk = VSet1(x[r * a.x_stride + k]);
        sum[r][0] = VFma(xk, w0, sum[r][0]);
        sum[r][1] = VFma(xk, w1, sum[r][1]);
      }
    }
    for (uint32_t r = 0; r < MR; ++r) Finish(a, row + r, tile, sum[r]);
  }
};

inline __m256i Load32(const uint8_t* p) {
  return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p));
}
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
// 2 * 128 * 127. Not the other way round: a weight may be -128, which int8 cannot negate.
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

// Nibbles are unsigned as they are: 2 * 15 * 127 a pair, so 8 pairs (32 k) are added in 16 bits
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

template <typename Dot, uint32_t kRows>
struct IntBlock {
  static constexpr uint32_t kMaxRows = kRows, kMaxTiles = 1;

  template <uint32_t MR, uint32_t NT>
  static void Run(const LinearArgs& a, uint32_t row, uint32_t tile) {
    const uint32_t steps = a.w.group_cols / Dot::kStep;
    const size_t tile_bytes = static_cast<size_t>(a.w.padded_cols) / Dot::kStep * 64;
    const uint8_t* w = static_cast<const uint8_t*>(a.w.data) + tile * tile_bytes;
    const int8_t* q = a.q + row * a.q_stride;
    const size_t q_groups = a.q_groups, num_groups = a.w.num_groups;
    const float* row_scales = a.q_scales + row * q_groups;
    const int32_t* row_sums = a.q_sums + row * num_groups;
    const float* scales = static_cast<const float*>(a.w.scales) + tile * num_groups * kTile;
    V sum[MR][2];
    for (uint32_t r = 0; r < MR; ++r) sum[r][0] = sum[r][1] = VSet1(0.0f);
    for (size_t g = 0; g < num_groups; ++g, scales += kTile) {
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
          const V ws = VLoad(scales + h * kLanes);
          sum[r][h] = VFma(VMul(_mm256_cvtepi32_ps(dot[r][h]), scale), ws, sum[r][h]);
        }
      }
    }
    for (uint32_t r = 0; r < MR; ++r) Finish(a, row + r, tile, sum[r]);
  }
};

}  // namespace

const KernelTable kAvx2Kernels = {
    "avx2",
    {Linear<FloatBlock<float>>, Linear<FloatBlock<uint16_t>>, nullptr, nullptr, nullptr, nullptr,
     nullptr},
    {nullptr, nullptr, Linear<IntBlock<DotI8, 4>>, Linear<IntBlock<DotI4, 2>>, nullptr, nullptr,
     nullptr},
    QuantizeRow,
    nullptr,
    nullptr,
    Mul,
    RmsNorm,
    Rope,
    Glu,
    Add,
    Softcap,
    Scale,
    {Attend<float>, Attend<F8>, Attend<int8_t>},
    {nullptr, StoreKv<F8>, StoreKv<int8_t>},
};

}  // namespace cpu
}  // namespace plansmith
