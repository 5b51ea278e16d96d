// Kernels for AVX-512 with VNNI. Compiled with those flags, called only where the machine has them.
//
// Matrix products keep MR rows x NT tiles of 16 outputs in registers and read each weight vector
// once for MR rows. At one row they are bound by reading the weights, from about 8 rows by
// arithmetic (one 512-bit product a cycle on Zen 4, one or two on Intel).
//
// SPDX-License-Identifier: Apache-2.0
#include "cpu/simd_avx512.h"
// The vectors above come first: what follows is written over them.
#include "cpu/kernels_attention.h"
#include "cpu/kernels_linear.h"
#include "cpu/kernels_round.h"
#include "cpu/kernels_rows.h"
#include "cpu/kernels_weights_avx512.h"

namespace plansmith {
namespace cpu {
namespace {

// Sums are kept in this type and not in __m512i (eight 64-bit lanes): GCC 12 does not see that they
// are one register in both types, copies each of them in every step and runs out of registers.
using Sums = int32_t __attribute__((vector_size(64)));

inline __m512i Broadcast4(const int8_t* q) {
  int32_t four;
  __builtin_memcpy(&four, q, sizeof(four));
  return _mm512_set1_epi32(four);
}

// vpdpbusd wants one side unsigned: the weights, moved by kOffset, which -kOffset times the row's
// sum takes back.
struct DotI8 {
  static constexpr uint32_t kStep = 4;
  static constexpr int32_t kOffset = 128;
  static constexpr uint32_t kParts = 1;
  static void Load(const uint8_t* w, __m512i* parts) {
    parts[0] = _mm512_xor_si512(_mm512_loadu_si512(w), _mm512_set1_epi8(-128));
  }
};
struct DotI4 {
  static constexpr uint32_t kStep = 8;
  static constexpr int32_t kOffset = 8;
  static constexpr uint32_t kParts = 2;
  static void Load(const uint8_t* w, __m512i* parts) {
    const __m512i both = _mm512_loadu_si512(w), nibble = _mm512_set1_epi8(15);
    parts[0] = _mm512_and_si512(both, nibble);
    parts[1] = _mm512_and_si512(_mm512_srli_epi16(both, 4), nibble);
  }
};

// kGrouped: weights with more than one group a row keep float sums beside the integer ones, so
// their blocks are lower.
template <typename Dot, bool kGrouped>
struct IntBlock {
  static constexpr uint32_t kMaxRows = kGrouped ? 4 : 8, kMaxTiles = 3, kOneRowTiles = 1;

  template <uint32_t MR, uint32_t NT>
  static void Run(const LinearArgs& a, uint32_t row, uint32_t tile) {
    const uint32_t steps = a.w.group_cols / Dot::kStep;
    const size_t tile_bytes = static_cast<size_t>(a.w.padded_cols) / Dot::kStep * 64;
    const uint8_t* w = static_cast<const uint8_t*>(a.w.data) + tile * tile_bytes;
    const int8_t* q = a.q + row * a.q_stride;
    const size_t q_groups = a.q_groups, num_groups = kGrouped ? a.w.num_groups : 1;
    const float* row_scales = a.q_scales + row * q_groups;
    const int32_t* row_sums = a.q_sums + row * num_groups;
    const float* scales = static_cast<const float*>(a.w.scales) + tile * num_groups * kTile;
    V sum[MR][NT];
    for (size_t g = 0; g < num_groups; ++g) {
      Sums dot[MR][NT];
      for (uint32_t r = 0; r < MR; ++r) {
        const Sums start = (Sums)_mm512_set1_epi32(-Dot::kOffset * row_sums[r * num_groups + g]);
        for (uint32_t t = 0; t < NT; ++t) dot[r][t] = start;
      }
      for (uint32_t s = 0; s < steps; ++s, w += 64, q += Dot::kStep) {
        __m512i parts[NT][Dot::kParts];
        for (uint32_t t = 0; t < NT; ++t) Dot::Load(w + t * tile_bytes, parts[t]);
        for (uint32_t p = 0; p < Dot::kParts; ++p) {
          for (uint32_t r = 0; r < MR; ++r) {
            const __m512i four = Broadcast4(q + r * a.q_stride + 4 * p);
            for (uint32_t t = 0; t < NT; ++t) {
              dot[r][t] = (Sums)_mm512_dpbusd_epi32((__m512i)dot[r][t], parts[t][p], four);
            }
          }
        }
      }
      for (uint32_t r = 0; r < MR; ++r) {
        const V scale = VSet1(row_scales[r * q_groups + (q_groups == 1 ? 0 : g)]);
        for (uint32_t t = 0; t < NT; ++t) {
          const V x = VMul(_mm512_cvtepi32_ps((__m512i)dot[r][t]), scale);
          const V ws = VLoad(scales + (t * num_groups + g) * kTile);
          sum[r][t] = g == 0 ? VMul(x, ws) : VFma(x, ws, sum[r][t]);
        }
      }
    }
    for (uint32_t r = 0; r < MR; ++r) {
      for (uint32_t t = 0; t < NT; ++t) Finish(a, row + r, tile + t, &sum[r][t]);
    }
  }
};

template <typename Dot>
void LinearInt(const LinearArgs& a, uint32_t row_begin, uint32_t row_end, uint32_t tile_begin,
               uint32_t tile_end) {
  if (a.w.num_groups == 1) {
    Linear<IntBlock<Dot, false>>(a, row_begin, row_end, tile_begin, tile_end);
  } else {
    Linear<IntBlock<Dot, true>>(a, row_begin, row_end, tile_begin, tile_end);
  }
}

}  // namespace

const KernelTable kAvx512VnniKernels = {
    "avx512vnni",
    {Linear<FloatBlock<F32Weights, 8, 3, 1>>, Linear<FloatBlock<Bf16Weights, 8, 3, 3>>,
     Linear<FloatBlock<I8Weights, 8, 3, 4>>,
     LinearI4<FloatBlock<I4Weights, 8, 3, 4>, FloatBlock<I4ZeroWeights, 8, 3, 4>>,
     Linear<FloatBlock<F16Weights, 8, 3, 3>>, Linear<FloatBlock<F8Weights, 8, 3, 4>>,
     Linear<FloatBlock<F4Weights, 8, 3, 4>>},
    {nullptr, nullptr, LinearInt<DotI8>, LinearInt<DotI4>, nullptr,
     Linear<FloatBlock<F8Weights, 8, 3, 4, CodeInput>>, nullptr},
    QuantizeRow,
    QuantizeRowStatic,
    RoundRow,
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
