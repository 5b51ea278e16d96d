// Kernels in plain C++: the reference that runs everywhere, and the path of machines without AVX2.
//
// SPDX-License-Identifier: Apache-2.0
#include "cpu/simd_portable.h"
// The vectors above come first: what follows is written over them.
#include "cpu/kernels_table.h"
#include "cpu/kernels_weights_portable.h"

namespace plansmith {
namespace cpu {
namespace {

// Products of one k step of one tile: 4 k at I8, 8 at I4.
struct DotI8 {
  static constexpr uint32_t kStep = 4;
  static void Run(const uint8_t* w, const int8_t* q, int32_t* sum) {
    for (uint32_t i = 0; i < kTile; ++i) {
      for (uint32_t j = 0; j < 4; ++j) sum[i] += static_cast<int8_t>(w[i * 4 + j]) * q[j];
    }
  }
};
struct DotI4 {
  static constexpr uint32_t kStep = 8;
  static void Run(const uint8_t* w, const int8_t* q, int32_t* sum) {
    for (uint32_t i = 0; i < kTile; ++i) {
      for (uint32_t j = 0; j < 4; ++j) {
        const uint8_t both = w[i * 4 + j];
        sum[i] += (both & 15) * q[j] + (both >> 4) * q[4 + j];
      }
    }
  }
};

// Bytes of a k step of a tile are 64 in both layouts. `offset` is what the stored values have too
// much.
template <typename Dot, int kOffset>
void LinearInt(const LinearArgs& a, uint32_t row_begin, uint32_t row_end, uint32_t tile_begin,
               uint32_t tile_end) {
  const uint32_t steps = a.w.group_cols / Dot::kStep;
  const size_t tile_bytes = static_cast<size_t>(a.w.padded_cols) / Dot::kStep * 64;
  for (uint32_t tile = tile_begin; tile < tile_end; ++tile) {
    for (uint32_t row = row_begin; row < row_end; ++row) {
      const uint8_t* w = static_cast<const uint8_t*>(a.w.data) + tile * tile_bytes;
      const int8_t* q = a.q + row * a.q_stride;
      const float* row_scales = a.q_scales + static_cast<size_t>(row) * a.q_groups;
      const int32_t* row_sums = a.q_sums + static_cast<size_t>(row) * a.w.num_groups;
      size_t scale_at = static_cast<size_t>(tile) * a.w.num_groups * kTile;
      float sum[kTile] = {};
      for (uint32_t g = 0; g < a.w.num_groups; ++g, scale_at += kTile) {
        int32_t dot[kTile];
        for (uint32_t i = 0; i < kTile; ++i) dot[i] = -kOffset * row_sums[g];
        for (uint32_t s = 0; s < steps; ++s, w += 64, q += Dot::kStep) Dot::Run(w, q, dot);
        const float scale = row_scales[a.q_groups == 1 ? 0 : g];
        float scales[kTile];
        for (uint32_t h = 0; h < kTileVectors; ++h) {
          VStore(scales + h * kLanes, LoadScales(a.w, scale_at + h * kLanes));
        }
        for (uint32_t i = 0; i < kTile; ++i) {
          sum[i] += static_cast<float>(dot[i]) * scale * scales[i];
        }
      }
      const V sums[kTileVectors] = {VLoad(sum), VLoad(sum + kLanes)};
      Finish(a, row, tile, sums);
    }
  }
}

}  // namespace

const KernelTable kPortableKernels = TableOf(
    "portable",
    {{Linear<FloatBlock<F32Weights, 1, 1, 1>>, Linear<FloatBlock<Bf16Weights, 1, 1, 1>>,
      Linear<FloatBlock<I8Weights, 1, 1, 1>>,
      LinearI4<FloatBlock<I4Weights, 1, 1, 1>, FloatBlock<I4ZeroWeights, 1, 1, 1>>,
      Linear<FloatBlock<F16Weights, 1, 1, 1>>, Linear<FloatBlock<F8Weights, 1, 1, 1>>,
      Linear<FloatBlock<F4Weights, 1, 1, 1>>},
     {nullptr, nullptr, LinearInt<DotI8, 0>, LinearInt<DotI4, 8>, nullptr, nullptr, nullptr},
     Linear<FloatBlock<InPairs<F8Weights>, 1, 1, 1, CodeInput>>});

}  // namespace cpu
}  // namespace plansmith
