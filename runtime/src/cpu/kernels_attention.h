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
constexpr uint32_t kScoresStride =
    kAttentionUnit + 16;  // the last piece's rubbish goes behind the unit
constexpr uint32_t kValueHeads = kLanes == 16 ? 4 : 2;  // x 4 vectors of a head: sums in registers
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
                      float* scores) {
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
    VStore(scores + i * kScoresStride + pieces[0].offset, sum[i][0]);
    VStore(scores + i * kScoresStride + pieces[1].offset, sum[i][1]);
  }
}

template <uint32_t Q = kScoreQueries>
inline void ScoreQueries(const float* q, uint32_t num_queries, const AttentionArgs& a, bool fetch,
                         const Piece* pair, float* scores) {
  if (num_queries != Q) {
    if constexpr (Q > 1) ScoreQueries<Q - 1>(q, num_queries, a, fetch, pair, scores);
  } else if (fetch) {
    ScorePair<Q, true>(q, a.head_dim, a.block_size, pair, scores);
  } else {
    ScorePair<Q, false>(q, a.head_dim, a.block_size, pair, scores);
  }
}

inline void Scores(const float* q, uint32_t num_queries, const AttentionArgs& a, const Unit& unit,
                   float* scores) {
  const bool few = num_queries <= kFewQueries;
  for (uint32_t p = 0; p < unit.num_pieces; p += 2) {
    for (uint32_t i = 0; i < num_queries; i += kScoreQueries) {
      const uint32_t n = num_queries - i < kScoreQueries ? num_queries - i : kScoreQueries;
      ScoreQueries(q + i * a.head_dim, n, a, few && i == 0, unit.pieces + p,
                   scores + i * kScoresStride);
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

// What a row adds for a unit: its heads share the positions [begin, end) of the unit.
struct RowValues {
  uint32_t base;  // position of the unit
  uint32_t begin;
  uint32_t end;
  const float* p;        // [heads][kScoresStride]
  const float* factors;  // [heads] for what was summed before
  float* acc;            // [heads][acc_stride]
  size_t acc_stride;
};

// acc = acc * factor + sum of p[j] * v[j] for H heads from `head` and N vectors from `column`.
template <uint32_t H, uint32_t N>
inline void AddValues(const AttentionArgs& a, const RowValues& row, uint32_t head,
                      uint32_t column) {
  V sum[H][N];
  float* acc = row.acc + head * row.acc_stride + column;
  for (uint32_t h = 0; h < H; ++h) {
    const V factor = VSet1(row.factors[head + h]);
    for (uint32_t i = 0; i < N; ++i) {
      sum[h][i] = VMul(VLoad(acc + h * row.acc_stride + i * kLanes), factor);
    }
  }
  const float* p = row.p + head * kScoresStride;
  for (uint32_t j = row.begin; j < row.end;) {
    const uint32_t pos = row.base + j, in_block = pos % a.block_size;
    const size_t block = static_cast<size_t>(a.blocks[pos / a.block_size]);
    const size_t in_pool = (static_cast<size_t>(a.kv_head) * a.block_size + in_block) * a.head_dim;
    const float* v = a.v_pool + block * a.block_stride + in_pool + column;
    const uint32_t left = a.block_size - in_block;
    const uint32_t stop = left < row.end - j ? j + left : row.end;
    for (; j < stop; ++j, v += a.head_dim) {
      V values[N];
      for (uint32_t i = 0; i < N; ++i) values[i] = VLoad(v + i * kLanes);
      for (uint32_t h = 0; h < H; ++h) {
        const V x = VSet1(p[h * kScoresStride + j]);
        for (uint32_t i = 0; i < N; ++i) sum[h][i] = VFma(x, values[i], sum[h][i]);
      }
    }
  }
  for (uint32_t h = 0; h < H; ++h) {
    for (uint32_t i = 0; i < N; ++i) VStore(acc + h * row.acc_stride + i * kLanes, sum[h][i]);
  }
}

// Head sizes that are not a multiple of the vector end in a vector that reads past them; the pool
// has slack behind it.
template <uint32_t H = kValueHeads>
inline void AddHeads(const AttentionArgs& a, const RowValues& row, uint32_t num_heads) {
  const uint32_t vectors = (a.head_dim + kLanes - 1) / kLanes;
  uint32_t head = 0;
  for (; head + H <= num_heads; head += H) {
    uint32_t i = 0;
    for (; i + 4 <= vectors; i += 4) AddValues<H, 4>(a, row, head, i * kLanes);
    for (; i < vectors; ++i) AddValues<H, 1>(a, row, head, i * kLanes);
  }
  if constexpr (H > 1) {
    if (head < num_heads) {
      RowValues rest = row;
      rest.p += head * kScoresStride;
      rest.factors += head;
      rest.acc += head * row.acc_stride;
      AddHeads<H - 1>(a, rest, num_heads - head);
    }
  }
}

// A tile's state: the running softmax of each query (row x head).
struct Tile {
  uint32_t num_queries;
  size_t acc_stride;
  float* acc;     // [queries][acc_stride] sums of exp(score - max) * v
  float* scores;  // [queries][kScoresStride] of the unit at hand
  float* q;       // [queries][D] times the scale
  float* max;     // [queries]
  float* sum;     // [queries] of exp(score - max)
  float* factor;  // [queries] for what was summed before the unit at hand
};

inline Tile StartTile(const AttentionArgs& a) {
  Tile t;
  t.num_queries = a.num_rows * a.num_heads;
  t.acc_stride = (a.head_dim + 15) / 16 * 16;
  t.acc = a.scratch;
  t.scores = t.acc + t.num_queries * t.acc_stride;
  t.q = t.scores + t.num_queries * kScoresStride;
  t.max = t.q + static_cast<size_t>(t.num_queries) * a.head_dim;
  t.sum = t.max + t.num_queries;
  t.factor = t.sum + t.num_queries;
  for (uint32_t i = 0; i < t.num_queries; ++i) {
    const float* row = a.q + (i / a.num_heads) * a.q_stride + (i % a.num_heads) * a.head_dim;
    for (uint32_t d = 0; d < a.head_dim; ++d) t.q[i * a.head_dim + d] = row[d] * a.scale;
    for (uint32_t d = 0; d < t.acc_stride; ++d) t.acc[i * t.acc_stride + d] = 0.0f;
    t.max[i] = -__builtin_inff();
    t.sum[i] = 0.0f;
  }
  return t;
}

// One row's part of the unit at `base`: the positions that it sees, if any. Fetches a share of the
// next unit's K, if given. All in int64: a window may be as large as an int32 holds.
inline void AddRow(const AttentionArgs& a, const Tile& t, uint32_t row, int64_t base,
                   const Unit* next) {
  const int64_t pos = a.first_pos + static_cast<int64_t>(row);
  const int64_t from = (a.window > 0 && pos + 1 > a.window ? pos + 1 - a.window : 0) - base;
  const int64_t to = pos + 1 - base;
  if (to <= 0 || from >= kAttentionUnit) return;
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
  const RowValues values = {static_cast<uint32_t>(base),
                            begin,
                            end,
                            t.scores + first * kScoresStride,
                            t.factor + first,
                            t.acc + first * t.acc_stride,
                            t.acc_stride};
  AddHeads(a, values, a.num_heads);
}

void Attend(const AttentionArgs& a) {
  const Tile t = StartTile(a);
  const bool few = t.num_queries <= kFewQueries;
  const int64_t end = static_cast<int64_t>(a.first_pos) + a.num_rows;
  const int64_t first = a.window > 0 && a.first_pos >= a.window
                            ? static_cast<int64_t>(a.first_pos) + 1 - a.window
                            : 0;
  const auto find = [&](int64_t base, Unit* unit) {
    const int64_t n = end - base < kAttentionUnit ? end - base : kAttentionUnit;
    FindPieces(a, static_cast<uint32_t>(base), static_cast<uint32_t>(n), unit);
  };
  Unit units[2];
  Unit *unit = units, *next = units + 1;
  int64_t base = first / kAttentionUnit * kAttentionUnit;
  find(base, unit);
  for (; base < end; base += kAttentionUnit) {
    const bool last = base + kAttentionUnit >= end;
    if (!last) find(base + kAttentionUnit, next);
    Scores(t.q, t.num_queries, a, *unit, t.scores);
    for (uint32_t row = 0; row < a.num_rows; ++row) {
      AddRow(a, t, row, base, few && !last ? next : nullptr);
    }
    Unit* const done = unit;
    unit = next;
    next = done;
  }
  for (uint32_t i = 0; i < t.num_queries; ++i) {
    float* row = a.out + (i / a.num_heads) * a.out_stride + (i % a.num_heads) * a.head_dim;
    for (uint32_t d = 0; d < a.head_dim; ++d) row[d] = t.acc[i * t.acc_stride + d] / t.sum[i];
  }
}

}  // namespace
}  // namespace cpu
}  // namespace plansmith
