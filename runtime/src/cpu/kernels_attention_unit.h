// What attention does with one unit of positions: where they lie, their scores, their softmax,
// their values. T is what the pools hold: float, F8 or int8_t. Over the V of the file that includes
// it; kernels_attention.h puts the units together.
//
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "cpu/kernels.h"
#include "cpu/kernels_kv.h"
#include "cpu/simd_math.h"

namespace plansmith {
namespace cpu {
namespace {

constexpr uint32_t kUnitVectors = kAttentionUnit / kLanes;
// Scores are summed for 4 queries x 2 vectors of positions at a time: enough sums to hide an FMA's
// latency.
constexpr uint32_t kScoreQueries = 4;
// What the last piece computes past its end goes behind the unit.
constexpr uint32_t kScoresStride = kAttentionUnit + 16;
// Values are summed for so many heads x 4 vectors of a head, in registers.
constexpr uint32_t kValueHeads = kLanes == 16 ? 4 : 2;
// A tile of so few queries waits for memory rather than for arithmetic.
constexpr uint32_t kFewQueries = 12;

// Where 1..kLanes positions of a unit lie in the pools.
template <typename T>
struct Piece {
  const T* k;       // [D] rows of block_size
  const T* v;       // rows of D
  uint32_t offset;  // in the unit
};

template <typename T>
struct Unit {
  Piece<T> pieces[kAttentionUnit + 1];  // blocks of one position, and one to make a pair
  uint32_t num_pieces;
};

// Positions [base, base + n) of the sequence, cut where a block or a vector ends.
template <typename T>
inline void FindPieces(const AttentionArgs& a, uint32_t base, uint32_t n, Unit<T>* unit) {
  const uint32_t step = a.block_size < kLanes ? a.block_size : kLanes;
  const size_t head_values = static_cast<size_t>(a.head_dim) * a.block_size;
  uint32_t num = 0;
  for (uint32_t i = 0; i < n; i += step) {
    const uint32_t pos = base + i;
    const size_t block = static_cast<size_t>(a.blocks[pos / a.block_size]);
    const size_t head = block * a.block_stride + a.kv_head * head_values;
    const T* k = static_cast<const T*>(a.k_pool) + head;
    const T* v = static_cast<const T*>(a.v_pool) + head;
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
template <uint32_t Q, bool kFetch, typename T>
inline void ScorePair(const float* q, uint32_t head_dim, uint32_t block_size,
                      const Piece<T>* pieces, float* scores) {
  constexpr uint32_t kFetchEach = sizeof(float) / sizeof(T);
  V sum[Q][2];
  for (uint32_t i = 0; i < Q; ++i) sum[i][0] = sum[i][1] = VSet1(0.0f);
  const T* k0 = pieces[0].k;
  const T* k1 = pieces[1].k;
  for (uint32_t d = 0; d < head_dim; ++d) {
    const V a = LoadKv(k0), b = LoadKv(k1);
    if (kFetch && d % kFetchEach == 0) {
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

template <uint32_t Q = kScoreQueries, typename T>
inline void ScoreQueries(const float* q, uint32_t num_queries, const AttentionArgs& a, bool fetch,
                         const Piece<T>* pair, float* scores) {
  if (num_queries != Q) {
    if constexpr (Q > 1) ScoreQueries<Q - 1>(q, num_queries, a, fetch, pair, scores);
  } else if (fetch) {
    ScorePair<Q, true>(q, a.head_dim, a.block_size, pair, scores);
  } else {
    ScorePair<Q, false>(q, a.head_dim, a.block_size, pair, scores);
  }
}

template <typename T>
inline void Scores(const float* q, uint32_t num_queries, const AttentionArgs& a,
                   const Unit<T>& unit, float* scores) {
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
template <typename T>
inline void FetchKeys(const Unit<T>& unit, uint32_t begin, uint32_t end, uint32_t block_size) {
  constexpr uint32_t kEach = sizeof(float) / sizeof(T);  // short rows share a cache line
  for (uint32_t p = 0; p < unit.num_pieces; ++p) {
    const T* k = unit.pieces[p].k;
    for (uint32_t d = (begin + kEach - 1) / kEach * kEach; d < end; d += kEach) {
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
template <typename T, uint32_t H, uint32_t N>
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
    const T* v = static_cast<const T*>(a.v_pool) + block * a.block_stride + in_pool + column;
    const uint32_t left = a.block_size - in_block;
    const uint32_t stop = left < row.end - j ? j + left : row.end;
    for (; j < stop; ++j, v += a.head_dim) {
      V values[N];
      for (uint32_t i = 0; i < N; ++i) values[i] = LoadKv(v + i * kLanes);
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
// has slack behind it. Inlined everywhere: 5 % of prefill on AVX-512.
template <typename T, uint32_t H = kValueHeads>
__attribute__((always_inline)) inline void AddHeads(const AttentionArgs& a, const RowValues& row,
                                                    uint32_t num_heads) {
  const uint32_t vectors = (a.head_dim + kLanes - 1) / kLanes;
  uint32_t head = 0;
  for (; head + H <= num_heads; head += H) {
    uint32_t i = 0;
    for (; i + 4 <= vectors; i += 4) AddValues<T, H, 4>(a, row, head, i * kLanes);
    for (; i < vectors; ++i) AddValues<T, H, 1>(a, row, head, i * kLanes);
  }
  if constexpr (H > 1) {
    if (head < num_heads) {
      RowValues rest = row;
      rest.p += head * kScoresStride;
      rest.factors += head;
      rest.acc += head * row.acc_stride;
      AddHeads<T, H - 1>(a, rest, num_heads - head);
    }
  }
}

}  // namespace
}  // namespace cpu
}  // namespace plansmith
