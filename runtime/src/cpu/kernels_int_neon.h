// Products of int8 inputs with int8 and int4 weights by dot products of four (sdot): the integer
// blocks of kernels_neon.cc.
//
// 16 bytes of a row are four k steps: one register of inputs serves 16 dot products, each of which
// picks the step's four bytes as a lane. A block of 4 rows takes 9 loads for 64 dot products, so it
// is bound by arithmetic; one row is bound by reading the weights.
//
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "cpu/kernels_linear.h"
#include "cpu/simd_neon.h"

namespace plansmith {
namespace cpu {
namespace {

// A line of weights as kParts vectors of four k for each four outputs.
struct DotI8 {
  static constexpr uint32_t kParts = 1;
  static constexpr int32_t kOffset = 0;
  static void Load(const uint8_t* w, int8x16_t* parts) {
    parts[0] = vreinterpretq_s8_u8(vld1q_u8(w));
  }
};
// A code is the value + 8, which -8 times the row's sum takes back.
struct DotI4 {
  static constexpr uint32_t kParts = 2;
  static constexpr int32_t kOffset = 8;
  static void Load(const uint8_t* w, int8x16_t* parts) {
    const uint8x16_t both = vld1q_u8(w);
    parts[0] = vreinterpretq_s8_u8(vandq_u8(both, vdupq_n_u8(15)));
    parts[1] = vreinterpretq_s8_u8(vshrq_n_u8(both, 4));
  }
};

template <typename Dot, uint32_t kRows>
struct IntBlock {
  static constexpr uint32_t kMaxRows = kRows, kMaxTiles = 1, kOneRowTiles = 1;
  static constexpr uint32_t kStep = 4 * Dot::kParts;
  static constexpr uint32_t kLines = 16 / kStep;  // of 16 bytes of inputs

  // Line kLine of those that meet the inputs q.
  template <uint32_t MR, uint32_t kLine>
  [[gnu::always_inline]] static void AddLine(const uint8_t* w, const int8x16_t* q,
                                             int32x4_t (*dot)[kTileVectors]) {
    for (uint32_t h = 0; h < kTileVectors; ++h) {
      int8x16_t parts[Dot::kParts];
      Dot::Load(w + 16 * h, parts);
      for (uint32_t r = 0; r < MR; ++r) {
        dot[r][h] = vdotq_laneq_s32(dot[r][h], parts[0], q[r], kLine * Dot::kParts);
        if constexpr (Dot::kParts == 2) {
          dot[r][h] = vdotq_laneq_s32(dot[r][h], parts[1], q[r], kLine * Dot::kParts + 1);
        }
      }
    }
  }
  template <uint32_t MR, uint32_t kLine = 0>
  [[gnu::always_inline]] static void AddLines(const uint8_t* w, const int8x16_t* q,
                                              int32x4_t (*dot)[kTileVectors]) {
    AddLine<MR, kLine>(w + 64 * kLine, q, dot);
    if constexpr (kLine + 1 < kLines) AddLines<MR, kLine + 1>(w, q, dot);
  }

  template <uint32_t MR, uint32_t NT>
  static void Run(const LinearArgs& a, uint32_t row, uint32_t tile) {
    const uint32_t steps = a.w.group_cols / kStep;
    const size_t tile_bytes = static_cast<size_t>(a.w.padded_cols) / kStep * 64;
    const uint8_t* w = static_cast<const uint8_t*>(a.w.data) + tile * tile_bytes;
    const int8_t* q = a.q + row * a.q_stride;
    const size_t q_groups = a.q_groups, num_groups = a.w.num_groups;
    const float* row_scales = a.q_scales + row * q_groups;
    const int32_t* row_sums = a.q_sums + row * num_groups;
    size_t scale_at = tile * num_groups * kTile;
    V sum[MR][kTileVectors];
    for (auto& of_row : sum) {
      for (V& v : of_row) v = VSet1(0.0f);
    }
    for (size_t g = 0; g < num_groups; ++g, scale_at += kTile) {
      int32x4_t dot[MR][kTileVectors];
      for (uint32_t r = 0; r < MR; ++r) {
        const int32x4_t start = vdupq_n_s32(-Dot::kOffset * row_sums[r * num_groups + g]);
        for (uint32_t h = 0; h < kTileVectors; ++h) dot[r][h] = start;
      }
      int8x16_t four[MR];
      uint32_t s = 0;
      for (; s + kLines <= steps; s += kLines, w += 64 * kLines, q += 16) {
        for (uint32_t r = 0; r < MR; ++r) four[r] = vld1q_s8(q + r * a.q_stride);
        AddLines<MR>(w, four, dot);
      }
      for (; s < steps; ++s, w += 64, q += kStep) {  // of a group that is no multiple of 16
        for (uint32_t r = 0; r < MR; ++r) {
          const int8_t* from = q + r * a.q_stride;
          int8_t bytes[16] = {};
          memcpy(bytes, from, kStep);
          four[r] = vld1q_s8(bytes);
        }
        AddLine<MR, 0>(w, four, dot);
      }
      for (uint32_t r = 0; r < MR; ++r) {
        const V scale = VSet1(row_scales[r * q_groups + (q_groups == 1 ? 0 : g)]);
        for (uint32_t h = 0; h < kTileVectors; ++h) {
          const V x = VMul(vcvtq_f32_s32(dot[r][h]), scale);
          const V ws = LoadScales(a.w, scale_at + h * kLanes);
          sum[r][h] = VFma(x, ws, sum[r][h]);
        }
      }
    }
    for (uint32_t r = 0; r < MR; ++r) Finish(a, row + r, tile, sum[r]);
  }
};

}  // namespace
}  // namespace cpu
}  // namespace plansmith
