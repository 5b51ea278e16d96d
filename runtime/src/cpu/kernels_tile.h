// Of a tile of 16 outputs: the scales of its weights, and how its sums become outputs, over the V
// of the file that includes this, which includes its cpu/simd_*.h first.
//
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "cpu/kernels.h"

namespace plansmith {
namespace cpu {
namespace {

constexpr uint32_t kTileVectors = kTile / kLanes;

// 1 <= n <= kLanes values.
inline V LoadUpTo(const float* p, uint32_t n) { return n == kLanes ? VLoad(p) : VLoadPart(p, n); }
inline void StoreUpTo(float* p, V v, uint32_t n) {
  if (n == kLanes) {
    VStore(p, v);
  } else {
    VStorePart(p, v, n);
  }
}

// kLanes scales of I8, I4 or F8 from number `at` on. A product has one type of them, and asks once
// a group: the branch is always predicted.
inline V LoadScales(const PackedMatrix& w, size_t at) {
  if (w.scale_dtype == kBF16) return VLoadBf16(static_cast<const uint16_t*>(w.scales) + at);
  return VLoad(static_cast<const float*>(w.scales) + at);
}

// out = sum (+ bias) (+ out) of a tile, the sums of which are kTileVectors vectors.
inline void Finish(const LinearArgs& a, uint32_t row, uint32_t tile, const V* sum) {
  for (uint32_t h = 0; h < kTileVectors; ++h) {
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

}  // namespace
}  // namespace cpu
}  // namespace plansmith
