// Where the largest of many logits may be, over the V of the file that includes it: bound by
// reading them, which lie in L1 or L2.
//
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "cpu/kernels.h"

namespace plansmith {
namespace cpu {
namespace {

// maxima[b] = the largest of x[b * kCandidateBlock ..], the last block as long as is left. False
// when any of x is not finite; maxima are then worth nothing.
bool BlockMaxima(const float* x, uint32_t n, float* maxima) {
  static_assert(kCandidateBlock % (2 * kLanes) == 0, "two vectors at a time");
  // x * 0 is 0, or NaN for what is not finite, and a sum keeps a NaN, which a maximum may lose.
  V poison = VSet1(0.0f);
  float tail_poison = 0.0f;
  const V zero = VSet1(0.0f);
  for (uint32_t begin = 0; begin < n; begin += kCandidateBlock, ++maxima) {
    const uint32_t end = begin + kCandidateBlock < n ? begin + kCandidateBlock : n;
    uint32_t i = begin;
    float largest = -__builtin_inff();
    if (i + 2 * kLanes <= end) {
      V m0 = VLoad(x + i), m1 = VLoad(x + i + kLanes);
      for (; i + 2 * kLanes <= end; i += 2 * kLanes) {
        const V a = VLoad(x + i), b = VLoad(x + i + kLanes);
        m0 = VMax(m0, a);
        m1 = VMax(m1, b);
        poison = VFma(a, zero, poison);
        poison = VFma(b, zero, poison);
      }
      largest = VReduceMax(VMax(m0, m1));
    }
    for (; i < end; ++i) {
      largest = x[i] > largest ? x[i] : largest;
      tail_poison += x[i] * 0.0f;
    }
    *maxima = largest;
  }
  return VReduceAdd(poison) + tail_poison == 0.0f;
}

}  // namespace
}  // namespace cpu
}  // namespace plansmith
