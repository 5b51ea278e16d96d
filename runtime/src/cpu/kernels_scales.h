// The scales of a packed weight as vectors of the file that includes this, which includes its
// cpu/simd_*.h first.
//
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "cpu/kernels.h"

namespace plansmith {
namespace cpu {
namespace {

// kLanes scales of I8, I4 or F8 from number `at` on. A product has one type of them, and asks once
// a group: the branch is always predicted.
inline V LoadScales(const PackedMatrix& w, size_t at) {
  if (w.scale_dtype == kBF16) return VLoadBf16(static_cast<const uint16_t*>(w.scales) + at);
  return VLoad(static_cast<const float*>(w.scales) + at);
}

}  // namespace
}  // namespace cpu
}  // namespace plansmith
