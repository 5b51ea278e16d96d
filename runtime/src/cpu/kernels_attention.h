// Paged attention of one tile of query rows and heads that share a KV head, over the V of the file
// that includes it.
//
// q [rows][heads][D] against K and V of the sequence's blocks, which hold T: float, F8 or int8_t.
// Bound by reading K and V at decode (each position is read once for all queries of the tile), by
// arithmetic at prefill. The scales of K and V meet q and the sums, so that the inner loops see
// codes alone.
//
// The softmax is taken online over units of kAttentionUnit positions, units at multiples of that.
// What a row adds for a unit depends on the row alone: its first and last position in the unit. So
// a row has the same bits whatever tile, chunk or batch it is in.
//
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <type_traits>

#include "cpu/kernels_attention_plain.h"
#include "cpu/kernels_attention_unit.h"

namespace plansmith {
namespace cpu {
namespace {

// A tile's state: the running softmax of each query (row x head).
struct Tile {
  uint32_t num_queries;
  size_t acc_stride;
  float* acc;     // [queries][acc_stride] sums of exp(score - max) * v
  float* scores;  // [queries][kScoresStride] of the unit at hand
  float* q;       // [queries][D] times the scales of q.k and of K
  float* max;     // [queries]
  float* sum;     // [queries] of exp(score - max)
  float* factor;  // [queries] for what was summed before the unit at hand
  float* plain;   // for StartPlain
};

template <typename T>
inline Tile StartTile(const AttentionArgs& a) {
  const float scale = a.scale * (a.k_scale * kKvFactor<T>);
  Tile t;
  t.num_queries = a.num_rows * a.num_heads;
  t.acc_stride = (a.head_dim + 15) / 16 * 16;
  t.acc = a.scratch;
  t.scores = t.acc + t.num_queries * t.acc_stride;
  t.q = t.scores + t.num_queries * kScoresStride;
  t.max = t.q + static_cast<size_t>(t.num_queries) * a.head_dim;
  t.sum = t.max + t.num_queries;
  t.factor = t.sum + t.num_queries;
  t.plain = t.factor + t.num_queries;
  for (uint32_t i = 0; i < t.num_queries; ++i) {
    const float* row = a.q + (i / a.num_heads) * a.q_stride + (i % a.num_heads) * a.head_dim;
    for (uint32_t d = 0; d < a.head_dim; ++d) t.q[i * a.head_dim + d] = row[d] * scale;
    for (uint32_t d = 0; d < t.acc_stride; ++d) t.acc[i * t.acc_stride + d] = 0.0f;
    t.max[i] = -__builtin_inff();
    t.sum[i] = 0.0f;
  }
  return t;
}

// Softens the scores of one row's part of the unit at `base`: the positions that it sees. Returns
// whether there are any, and what is to be summed. Fetches a share of the next unit's K, if given.
// All in int64: a window may be as large as an int32 holds.
template <typename T>
__attribute__((always_inline)) inline bool SoftenRow(const AttentionArgs& a, const Tile& t,
                                                     uint32_t row, int64_t base,
                                                     const Unit<T>* next, RowValues* values) {
  const int64_t pos = a.first_pos + static_cast<int64_t>(row);
  const int64_t from = (a.window > 0 && pos + 1 > a.window ? pos + 1 - a.window : 0) - base;
  const int64_t to = pos + 1 - base;
  if (to <= 0 || from >= kAttentionUnit) return false;
  const uint32_t begin = from > 0 ? static_cast<uint32_t>(from) : 0;
  const uint32_t end = to < kAttentionUnit ? static_cast<uint32_t>(to) : kAttentionUnit;
  const uint32_t first = row * a.num_heads;
  for (uint32_t i = first; i < first + a.num_heads; ++i) {
    // In small parts: more fetches at once than the core can keep open would stop it.
    if (next != nullptr) {
      FetchKeys(*next, i * a.head_dim / t.num_queries, (i + 1) * a.head_dim / t.num_queries,
                a.block_size);
    }
    t.factor[i] =
        SoftmaxUnit(t.scores + i * kScoresStride, begin, end, a.softcap, t.max + i, t.sum + i);
  }
  *values = {static_cast<uint32_t>(base),
             begin,
             end,
             t.scores + first * kScoresStride,
             t.factor + first,
             t.acc + first * t.acc_stride,
             t.acc_stride};
  return true;
}

// Adds the unit at `base`, whose values are V of the positions from `values_base` on in `pool`.
template <typename T, typename Next>
__attribute__((always_inline)) inline void AddUnit(const AttentionArgs& a, const Tile& t,
                                                   const AttentionArgs& pool, const Unit<T>& unit,
                                                   int64_t base, uint32_t values_base,
                                                   const Next* next) {
  Scores(t.q, t.num_queries, pool, unit, t.scores);
  RowValues values;
  for (uint32_t row = 0; row < a.num_rows; ++row) {
    if (!SoftenRow(a, t, row, base, next, &values)) continue;
    values.base = values_base;
    AddHeads<T>(pool, values, a.num_heads);
  }
}

template <typename T>
void Attend(const AttentionArgs& a) {
  const Tile t = StartTile<T>(a);
  const bool few = t.num_queries <= kFewQueries;
  const int64_t end = static_cast<int64_t>(a.first_pos) + a.num_rows;
  const int64_t first = a.window > 0 && a.first_pos >= a.window
                            ? static_cast<int64_t>(a.first_pos) + 1 - a.window
                            : 0;
  const auto positions = [&](int64_t base) {
    return static_cast<uint32_t>(end - base < kAttentionUnit ? end - base : kAttentionUnit);
  };
  const auto find = [&](int64_t base, Unit<T>* unit) {
    FindPieces(a, static_cast<uint32_t>(base), positions(base), unit);
  };
  // An int8 is decoded in two instructions, as fast as a float is read again.
  constexpr bool kDecodes = std::is_same<T, F8>::value;
  [[maybe_unused]] PlainUnit plain;
  if constexpr (kDecodes) {
    if (!few) plain = StartPlain(a, t.plain);
  }
  Unit<T> units[2];
  Unit<T>*unit = units, *next = units + 1;
  int64_t base = first / kAttentionUnit * kAttentionUnit;
  find(base, unit);
  for (; base < end; base += kAttentionUnit) {
    const bool last = base + kAttentionUnit >= end;
    if (!last) find(base + kAttentionUnit, next);
    const Unit<T>* const fetched = few && !last ? next : nullptr;
    if (!kDecodes || few) {
      AddUnit(a, t, a, *unit, base, static_cast<uint32_t>(base), fetched);
    } else if constexpr (kDecodes) {
      Decode(a, *unit, positions(base), &plain);
      AddUnit(a, t, plain.args, plain.unit, base, 0, fetched);
    }
    Unit<T>* const done = unit;
    unit = next;
    next = done;
  }
  const float scale = a.v_scale * kKvFactor<T>;
  for (uint32_t i = 0; i < t.num_queries; ++i) {
    float* row = a.out + (i / a.num_heads) * a.out_stride + (i % a.num_heads) * a.head_dim;
    for (uint32_t d = 0; d < a.head_dim; ++d) {
      row[d] = t.acc[i * t.acc_stride + d] / t.sum[i] * scale;
    }
  }
}

}  // namespace
}  // namespace cpu
}  // namespace plansmith
