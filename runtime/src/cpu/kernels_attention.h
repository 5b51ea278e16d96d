// Paged attention of one tile of query rows and heads that share a KV head, over the V of the file
// that includes it.
//
// q [rows][heads][D] against K and V of the sequence's blocks. Bound by reading K and V at decode
// (each position is read once for all queries of the tile), by arithmetic at prefill.
//
// The softmax is taken online over units of kAttentionUnit positions, units at multiples of that.
// What a row adds for a unit depends on the row alone: its first and last position in the unit. So
// a row has the same bits whatever tile, chunk or batch it is in.
//
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "cpu/kernels.h"
#include "cpu/simd_math.h"

namespace plansmith {
namespace cpu {
namespace {

constexpr uint32_t kUnitVectors = kAttentionUnit / kLanes;
constexpr uint32_t kScoreQueries =
    4;  // x 2 vectors of positions: 8 sums, enough to hide an FMA's latency
constexpr uint32_t kMaxPieces = kAttentionUnit;
constexpr uint32_t kFewQueries = 12;  // of a tile that waits for memory rather than for arithmetic

// Where 1..kLanes positions of a unit lie in the pools.
struct Piece {
  const float* k;   // [D] rows of block_size
  const float* v;   // rows of D
  uint32_t offset;  // in the unit
};

struct Unit {
  Piece pieces[kMaxPieces + 1];
  uint32_t num_pieces;
};

// Positions [base, base + n) of the sequence, cut where a block or a vector ends.
inline void FindPieces(const AttentionArgs& a, uint32_t base, uint32_t n, Unit* unit) {
  const uint32_t step = a.block_size < kLanes ? a.block_size : kLanes;
  const size_t head_floats = static_cast<size_t>(a.head_dim) * a.block_size;
  uint32_t num = 0;
  for (uint32_t i = 0; i < n; i += step) {
    const uint32_t pos = base + i;
    const size_t block = static_cast<size_t>(a.blocks[pos / a.block_size]);
    const float* k = a.k_pool + block * a.block_stride + a.kv_head * head_floats;
    const float* v = a.v_pool + block * a.block_stride + a.kv_head * head_floats;
    const uint32_t in_block = pos % a.block_size;
    unit->pieces[num++] = {k + in_block, v + static_cast<size_t>(in_block) * a.head_dim, i};
  }
  if (num % 2 != 0) {  // pieces go in pairs; the odd one is computed twice
    unit->pieces[num] = unit->pieces[num - 1];
    ++num;
  }
  unit->num_pieces = num;
}

// scores[query][offset ...] = q . k for Q queries and two pieces. Lanes behind a piece's end hold
// rubbish, which the next piece overwrites or the mask hides.
// kFetch: also fetches the pieces' V, which comes next, from memory: hardware stops at each block's
// end.
template <uint32_t Q, bool kFetch>
inline void ScorePair(const float* q, uint32_t head_dim, uint32_t block_size, const Piece* pieces,
                      float* scores, size_t scores_stride) {
  V sum[Q][2];
  for (uint32_t i = 0; i < Q; ++i) sum[i][0] = sum[i][1] = VSet1(0.0f);
  const float* k0 = pieces[0].k;
  const float* k1 = pieces[1].k;
  for (uint32_t d = 0; d < head_dim; ++d) {
    const V a = VLoad(k0), b = VLoad(k1);
    if (kFetch) {
      __builtin_prefetch(pieces[0].v + d * kLanes);
      __builtin_prefetch(pieces[1].v + d * kLanes);
    }
    k0 += block_size;
    k1 += block_size;
    for (uint32_t i = 0; i < Q; ++i) {
      const V x = VSet1(q[i * head_dim + d]);
      sum[i][0] = VFma(x, a, sum[i][0]);
      sum[i][1] = VFma(x, b, sum[i][1]);
    }
  }
  for (uint32_t i = 0; i < Q; ++i) {
    VStore(scores + i * scores_stride + pieces[0].offset, sum[i][0]);
    VStore(scores + i * scores_stride + pieces[1].offset, sum[i][1]);
  }
}

template <uint32_t Q = kScoreQueries>
inline void ScoreQueries(const float* q, uint32_t num_queries, const AttentionArgs& a, bool fetch,
                         const Piece* pair, float* scores, size_t stride) {
  if (num_queries != Q) {
    if constexpr (Q > 1) ScoreQueries<Q - 1>(q, num_queries, a, fetch, pair, scores, stride);
  } else if (fetch) {
    ScorePair<Q, true>(q, a.head_dim, a.block_size, pair, scores, stride);
  } else {
    ScorePair<Q, false>(q, a.head_dim, a.block_size, pair, scores, stride);
  }
}

inline void Scores(const float* q, uint32_t num_queries, const AttentionArgs& a, const Unit& unit,
                   float* scores, size_t stride) {
  const bool few = num_queries <= kFewQueries;
  for (uint32_t p = 0; p < unit.num_pieces; p += 2) {
    for (uint32_t i = 0; i < num_queries; i += kScoreQueries) {
      const uint32_t n = num_queries - i < kScoreQueries ? num_queries - i : kScoreQueries;
      ScoreQueries(q + i * a.head_dim, n, a, few && i == 0, unit.pieces + p, scores + i * stride,
                   stride);
    }
  }
}

// Fetches rows [begin, end) of D of the unit's K.
inline void FetchKeys(const Unit& unit, uint32_t begin, uint32_t end, uint32_t block_size) {
  for (uint32_t p = 0; p < unit.num_pieces; ++p) {
    const float* k = unit.pieces[p].k;
    for (uint32_t d = begin; d < end; ++d) {
      __builtin_prefetch(k + static_cast<size_t>(d) * block_size);
    }
  }
}

// Turns scores[begin, end) into exp(score - max) in place (0 elsewhere in the unit), updates the
// running max and sum, and returns the factor for what was summed before.
inline float SoftmaxUnit(float* scores, uint32_t begin, uint32_t end, float softcap, float* max,
                         float* sum) {
  if (softcap > 0) {
    for (uint32_t v = 0; v < kUnitVectors; ++v) {
      const V y = VDiv(VLoad(scores + v * kLanes), VSet1(softcap));
      VStore(scores + v * kLanes, VMul(VSet1(softcap), VTanh(y)));
    }
  }
  for (uint32_t j = 0; j < begin; ++j) scores[j] = -__builtin_inff();
  for (uint32_t j = end; j < kAttentionUnit; ++j) scores[j] = -__builtin_inff();
  V m = VLoad(scores);
  for (uint32_t v = 1; v < kUnitVectors; ++v) m = VMax(m, VLoad(scores + v * kLanes));
  const float unit_max = VReduceMax(m);
  const float new_max = unit_max > *max ? unit_max : *max;
  V total = VSet1(0.0f);
  for (uint32_t v = 0; v < kUnitVectors; ++v) {
    const V e = VExp(VSub(VLoad(scores + v * kLanes), VSet1(new_max)));
    VStore(scores + v * kLanes, e);
    total = VAdd(total, e);
  }
  alignas(64) float old[kLanes];
  VStore(old, VExp(VSet1(*max - new_max)));  // 0 in the first unit: exp(-inf)
  *max = new_max;
  *sum = *sum * old[0] + VReduceAdd(total);
  return old[0];
}

// acc[0..N vectors) = acc * factor + sum over [begin, end) of p[j] * v[j].
template <uint32_t N>
inline void AddValues(const AttentionArgs& a, uint32_t base, uint32_t begin, uint32_t end,
                      const float* p, float factor, uint32_t column, float* acc) {
  V sum[N];
  for (uint32_t i = 0; i < N; ++i) sum[i] = VMul(VLoad(acc + i * kLanes), VSet1(factor));
  uint32_t j = begin;
  while (j < end) {
    const uint32_t pos = base + j;
    const size_t block = static_cast<size_t>(a.blocks[pos / a.block_size]);
    const uint32_t in_block = pos % a.block_size;
    const uint32_t left = a.block_size - in_block;
    const uint32_t stop = left < end - j ? j + left : end;
    const size_t in_head = (static_cast<size_t>(a.kv_head) * a.block_size + in_block) * a.head_dim;
    const float* v = a.v_pool + block * a.block_stride + in_head + column;
    for (; j < stop; ++j, v += a.head_dim) {
      const V x = VSet1(p[j]);
      for (uint32_t i = 0; i < N; ++i) sum[i] = VFma(x, VLoad(v + i * kLanes), sum[i]);
    }
  }
  for (uint32_t i = 0; i < N; ++i) VStore(acc + i * kLanes, sum[i]);
}

// Head sizes that are not a multiple of the vector end here, and the pools have a vector of slack
// behind them.
inline void AddAllValues(const AttentionArgs& a, uint32_t base, uint32_t begin, uint32_t end,
                         const float* p, float factor, float* acc) {
  constexpr uint32_t kWide = 8;
  const uint32_t vectors = (a.head_dim + kLanes - 1) / kLanes;
  uint32_t i = 0;
  for (; i + kWide <= vectors; i += kWide) {
    AddValues<kWide>(a, base, begin, end, p, factor, i * kLanes, acc + i * kLanes);
  }
  if (i + 4 <= vectors) {
    AddValues<4>(a, base, begin, end, p, factor, i * kLanes, acc + i * kLanes);
    i += 4;
  }
  for (; i < vectors; ++i) {
    AddValues<1>(a, base, begin, end, p, factor, i * kLanes, acc + i * kLanes);
  }
}

void Attend(const AttentionArgs& a) {
  const uint32_t num_queries = a.num_rows * a.num_heads;
  const uint32_t padded_dim = (a.head_dim + 15) / 16 * 16;
  const size_t stride = kAttentionUnit + 16;
  float* acc = a.scratch;
  float* scores = acc + static_cast<size_t>(num_queries) * padded_dim;
  float* q = scores + num_queries * stride;
  float* maxes = q + static_cast<size_t>(num_queries) * a.head_dim;
  float* sums = maxes + num_queries;
  for (uint32_t i = 0; i < num_queries; ++i) {
    const float* row = a.q + (i / a.num_heads) * a.q_stride + (i % a.num_heads) * a.head_dim;
    for (uint32_t d = 0; d < a.head_dim; ++d) q[i * a.head_dim + d] = row[d] * a.scale;
    for (uint32_t d = 0; d < padded_dim; ++d) acc[i * padded_dim + d] = 0.0f;
    maxes[i] = -__builtin_inff();
    sums[i] = 0.0f;
  }
  // All in int64: a window may be as large as an int32 holds.
  const int64_t end = static_cast<int64_t>(a.first_pos) + a.num_rows;
  const int64_t seen = a.window > 0 ? a.window : end;
  const int64_t first = a.first_pos + 1 > seen ? a.first_pos + 1 - seen : 0;
  const auto find = [&](int64_t base, Unit* unit) {
    const int64_t n = end - base < kAttentionUnit ? end - base : kAttentionUnit;
    FindPieces(a, static_cast<uint32_t>(base), static_cast<uint32_t>(n), unit);
  };
  Unit units[2];
  Unit *unit = units, *next = units + 1;
  find(first / kAttentionUnit * kAttentionUnit, unit);
  for (int64_t base = first / kAttentionUnit * kAttentionUnit; base < end; base += kAttentionUnit) {
    const bool fetch = base + kAttentionUnit < end && num_queries <= kFewQueries;
    if (base + kAttentionUnit < end) find(base + kAttentionUnit, next);
    Scores(q, num_queries, a, *unit, scores, stride);
    for (uint32_t i = 0; i < num_queries; ++i) {
      if (fetch) {
        FetchKeys(*next, i * a.head_dim / num_queries, (i + 1) * a.head_dim / num_queries,
                  a.block_size);
      }
      const int64_t pos = a.first_pos + static_cast<int64_t>(i / a.num_heads);
      const int64_t from = (a.window > 0 && pos + 1 > a.window ? pos + 1 - a.window : 0) - base;
      const int64_t to = pos + 1 - base;
      const uint32_t lo = from > 0 ? static_cast<uint32_t>(from) : 0;
      if (to <= 0 || from >= kAttentionUnit) continue;
      const uint32_t hi = to < kAttentionUnit ? static_cast<uint32_t>(to) : kAttentionUnit;
      float* p = scores + i * stride;
      const float factor = SoftmaxUnit(p, lo, hi, a.softcap, maxes + i, sums + i);
      AddAllValues(a, static_cast<uint32_t>(base), lo, hi, p, factor, acc + i * padded_dim);
    }
    Unit* const done = unit;
    unit = next;
    next = done;
  }
  for (uint32_t i = 0; i < num_queries; ++i) {
    float* row = a.out + (i / a.num_heads) * a.out_stride + (i % a.num_heads) * a.head_dim;
    for (uint32_t d = 0; d < a.head_dim; ++d) row[d] = acc[i * padded_dim + d] / sums[i];
  }
}

}  // namespace
}  // namespace cpu
}  // namespace plansmith
