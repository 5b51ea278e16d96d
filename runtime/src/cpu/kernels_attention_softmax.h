// The softmax of attention, in base 2, in parts: each unit of positions gives a maximum, a sum and
// sums of values (Part) that know nothing of the others; parts are joined in the order of the
// positions. So a context may be cut between threads at any unit, and comes out the same.
//
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "cpu/kernels.h"
#include "cpu/kernels_attention_unit.h"
#include "cpu/simd_math.h"

namespace plansmith {
namespace cpu {
namespace {

constexpr uint32_t kPartLanes = 16;  // sums are kept by lane until the end
constexpr float kLog2E = 1.44269504f;

// What some positions give for each query; arrays of AttentionPartFloats.
struct Part {
  float* max;  // [queries, padded to 16]
  float* sum;  // [queries][kPartLanes] of 2^(score - max), by lane
  float* acc;  // [queries][acc_stride] of 2^(score - max) * v
};

inline uint32_t PadTo16(uint32_t n) { return (n + 15) / 16 * 16; }

// AttentionPartFloats, of a head dimension that is padded.
inline size_t PartFloats(uint32_t num_queries, uint32_t acc_stride) {
  return PadTo16(num_queries) + num_queries * static_cast<size_t>(kPartLanes + acc_stride);
}

inline Part PartAt(float* p, uint32_t num_queries) {
  float* sum = p + PadTo16(num_queries);
  return {p, sum, sum + num_queries * kPartLanes};
}

// Positions [begin, end) of a unit; of a row, those that it sees.
struct Range {
  uint32_t begin, end;
  bool empty() const { return begin >= end; }
};

// All in int64: a window may be as large as an int32 holds.
inline Range RangeOf(const AttentionArgs& a, uint32_t row, uint32_t unit) {
  const int64_t pos = a.first_pos + static_cast<int64_t>(row);
  const int64_t base = static_cast<int64_t>(unit) * kAttentionUnit;
  const int64_t from = (a.window > 0 && pos + 1 > a.window ? pos + 1 - a.window : 0) - base;
  const int64_t to = pos + 1 - base;
  if (to <= 0 || from >= kAttentionUnit) return {0, 0};
  return {from > 0 ? static_cast<uint32_t>(from) : 0,
          to < kAttentionUnit ? static_cast<uint32_t>(to) : kAttentionUnit};
}

// x in lanes [begin, end), -inf in the others.
inline V Masked(V x, uint32_t begin, uint32_t end) {
  alignas(64) static constexpr float kLane[] = {0, 1, 2,  3,  4,  5,  6,  7,
                                                8, 9, 10, 11, 12, 13, 14, 15};
  const V lane = VLoad(kLane), nothing = VSet1(-__builtin_inff());
  const V front = VSelectLess(lane, VSet1(static_cast<float>(begin)), nothing, x);
  return VSelectLess(lane, VSet1(static_cast<float>(end)), front, nothing);
}

// The largest score of a query, whose vectors that hold `seen` are capped and masked in place.
inline float PrepareScores(float* scores, Range seen, float softcap) {
  const uint32_t first = seen.begin / kLanes, last = (seen.end + kLanes - 1) / kLanes;
  if (softcap > 0) {
    const V cap = VSet1(softcap), factor = VSet1(softcap * kLog2E);
    for (uint32_t v = first; v < last; ++v) {
      const V y = VDiv(VLoad(scores + v * kLanes), cap);
      VStore(scores + v * kLanes, VMul(factor, VTanh(y)));
    }
  }
  if (seen.begin % kLanes != 0) {
    float* s = scores + first * kLanes;
    VStore(s, Masked(VLoad(s), seen.begin % kLanes, kLanes));
  }
  if (seen.end % kLanes != 0) {
    float* s = scores + (last - 1) * kLanes;
    VStore(s, Masked(VLoad(s), 0, seen.end % kLanes));
  }
  V m = VSet1(-__builtin_inff());
  for (uint32_t v = first; v < last; ++v) m = VMax(m, VLoad(scores + v * kLanes));
  return VReduceMax(m);
}

// Turns a query's scores into 2^(score - max) in place, and gives their sum by lane.
template <uint32_t kVectors>
inline V SoftenVectors(float* scores, V max) {
  V total = VSet1(0.0f);
  for (uint32_t v = 0; v < kVectors; ++v) {
    const V e = VExp2(VSub(VLoad(scores + v * kLanes), max));
    VStore(scores + v * kLanes, e);
    total = VAdd(total, e);
  }
  return total;
}
inline V Soften(float* scores, Range seen, float max) {
  constexpr uint32_t kAll = kAttentionUnit / kLanes;
  const uint32_t first = seen.begin / kLanes, last = (seen.end + kLanes - 1) / kLanes;
  if (first == 0 && last == kAll) return SoftenVectors<kAll>(scores, VSet1(max));
  V total = VSet1(0.0f);
  for (uint32_t v = first; v < last; ++v) {
    const V e = VExp2(VSub(VLoad(scores + v * kLanes), VSet1(max)));
    VStore(scores + v * kLanes, e);
    total = VAdd(total, e);
  }
  return total;
}

// The factors with which what was summed before and a new part are joined; updates the maxima.
// Arrays of 16s. Entries of queries that see nothing of the part hold rubbish in the factors.
inline void JoinMaxima(float* max, const float* part_max, uint32_t num_queries, float* old,
                       float* fresh) {
  for (uint32_t i = 0; i < num_queries; i += kLanes) {
    const V before = VLoad(max + i), part = VLoad(part_max + i);
    const V now = VMax(part, before);
    VStore(old + i, VExp2(VSub(before, now)));
    VStore(fresh + i, VExp2(VSub(part, now)));
    VStore(max + i, now);
  }
}

// sum = sum * old + part * fresh
inline V Joined(V sum, V part, V old, V fresh) { return VFma(part, fresh, VMul(sum, old)); }

inline void JoinVectors(float* sum, const float* part, uint32_t n, float old, float fresh) {
  for (uint32_t i = 0; i < n; i += kLanes) {
    VStore(sum + i, Joined(VLoad(sum + i), VLoad(part + i), VSet1(old), VSet1(fresh)));
  }
}

}  // namespace
}  // namespace cpu
}  // namespace plansmith
