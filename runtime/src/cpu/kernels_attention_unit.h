// What attention does with the K and V of one unit of positions: where they
// lie, q . k, p . v. T is what the pools hold: float, F16, F8 or int8_t.
// Over the V of the file that includes it; kernels_attention.h puts the units
// together.
//
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <type_traits>

#include "cpu/kernels.h"
#include "cpu/kernels_kv.h"

namespace plansmith {
namespace cpu {
namespace {

// Queries that go through the registers together, with so many vectors of
// positions (q . k) or of a head (p . v): 24 sums of AVX-512's 32 registers, 12
// of AVX2's 16. A vector that is read, from L1 or L2, meets 6 queries.
constexpr uint32_t kBlockQueries = 6;
constexpr uint32_t kBlockVectors = kLanes == 16 ? 4 : 2;
// What the last piece computes past its end goes behind the unit.
constexpr uint32_t kScoresStride = kAttentionUnit + 16;
// A tile of so few queries waits for memory rather than for arithmetic.
constexpr uint32_t kFewQueries = 12;

// The cache level that a unit is fetched to, as __builtin_prefetch counts: K
// and V as floats do not fit in L1 together (fetched there, long contexts are
// read at 27 GB/s instead of 38, and half floats take 1.6 times as long), codes do.
template <typename T>
constexpr int kFetchTo = sizeof(T) > 1 ? 2 : 3;

// Calls f(std::integral_constant<uint32_t, n>), 1 <= n <= N.
template <uint32_t N, typename F>
__attribute__((always_inline)) inline void WithConstant(uint32_t n, const F& f) {
  if (n == N) {
    f(std::integral_constant<uint32_t, N>());
  } else if constexpr (N > 1) {
    WithConstant<N - 1>(n, f);
  }
}

// K and V of one KV head in the pools.
template <typename T>
struct KvHead {
  const T* k;  // of block 0: [D][block_size]
  const T* v;  // [block_size][D]
  size_t block_stride;
  const int32_t* blocks;
  uint32_t block_size, block_shift;
  uint32_t head_dim;

  size_t BlockOf(uint32_t pos) const {
    return static_cast<size_t>(blocks[pos >> block_shift]) * block_stride;
  }
  const T* KeyAt(uint32_t pos) const { return k + BlockOf(pos) + (pos & (block_size - 1)); }
  const T* ValueAt(uint32_t pos) const {
    return v + BlockOf(pos) + static_cast<size_t>(pos & (block_size - 1)) * head_dim;
  }
};

template <typename T>
inline KvHead<T> HeadOf(const AttentionArgs& a) {
  const size_t head = static_cast<size_t>(a.kv_head) * a.head_dim * a.block_size;
  return {static_cast<const T*>(a.k_pool) + head,
          static_cast<const T*>(a.v_pool) + head,
          a.block_stride,
          a.blocks,
          a.block_size,
          static_cast<uint32_t>(__builtin_ctz(a.block_size)),
          a.head_dim};
}

// Where 1..kLanes positions of a unit lie in the pools.
template <typename T>
struct Piece {
  const T* k;       // [D] rows of block_size
  const T* v;       // rows of D
  uint32_t offset;  // in the unit
};

template <typename T>
struct Unit {
  uint32_t step;  // positions of a piece, but for the last
  uint32_t num_pieces;
  Piece<T> pieces[kAttentionUnit];
};

// Positions [base, base + n) of the sequence, cut where a block or a vector
// ends.
template <typename T>
inline void FindPieces(const KvHead<T>& head, uint32_t base, uint32_t n, Unit<T>* unit) {
  unit->step = head.block_size < kLanes ? head.block_size : kLanes;
  unit->num_pieces = 0;
  for (uint32_t i = 0; i < n; i += unit->step) {
    unit->pieces[unit->num_pieces++] = {head.KeyAt(base + i), head.ValueAt(base + i), i};
  }
}

// scores[query][offset ...] = q . k for Q queries, q [Q][q_stride], and P
// pieces. Lanes behind a piece's end hold rubbish, which the next piece
// overwrites or the mask hides. kFetch: also fetches the pieces' V, which comes
// next, from memory: hardware stops at each block's end.
template <uint32_t Q, uint32_t P, bool kFetch, typename T>
inline void ScorePieces(const float* q, size_t q_stride, uint32_t head_dim, uint32_t block_size,
                        const Piece<T>* pieces, float* scores) {
  constexpr uint32_t kFetchEach = sizeof(float) / sizeof(T) * 16 / kLanes;
  V sum[Q][P];
  const T* keys[P];
#pragma GCC unroll 8
  for (uint32_t p = 0; p < P; ++p) {
    keys[p] = pieces[p].k;
#pragma GCC unroll 8
    for (uint32_t i = 0; i < Q; ++i) sum[i][p] = VSet1(0.0f);
  }
  for (uint32_t d = 0; d < head_dim; ++d, ++q) {
    V key[P];
#pragma GCC unroll 8
    for (uint32_t p = 0; p < P; ++p) {
      key[p] = LoadKv(keys[p]);
      keys[p] += block_size;
      if (kFetch && d % kFetchEach == 0)
        __builtin_prefetch(pieces[p].v + d * kLanes, 0, kFetchTo<T>);
    }
#pragma GCC unroll 8
    for (uint32_t i = 0; i < Q; ++i) {
      const V x = VSet1(q[i * q_stride]);
#pragma GCC unroll 8
      for (uint32_t p = 0; p < P; ++p) sum[i][p] = VFma(x, key[p], sum[i][p]);
    }
  }
#pragma GCC unroll 8
  for (uint32_t p = 0; p < P; ++p) {
#pragma GCC unroll 8
    for (uint32_t i = 0; i < Q; ++i) {
      VStore(scores + i * kScoresStride + pieces[p].offset, sum[i][p]);
    }
  }
}

// Scores of n queries with positions [begin, end) of the unit, and of others
// beside them.
template <bool kFetch, typename T>
inline void ScoreBlock(const KvHead<T>& head, const Unit<T>& unit, uint32_t begin, uint32_t end,
                       const float* q, size_t q_stride, uint32_t n, float* scores) {
  const uint32_t last = (end + unit.step - 1) / unit.step;
  WithConstant<kBlockQueries>(n, [&](auto queries) {
    constexpr uint32_t Q = queries;
    uint32_t p = begin / unit.step;
    for (; p + kBlockVectors <= last; p += kBlockVectors) {
      ScorePieces<Q, kBlockVectors, kFetch>(q, q_stride, head.head_dim, head.block_size,
                                            unit.pieces + p, scores);
    }
    for (; p < last; p += 2) {  // an odd one is computed twice
      const Piece<T> pair[] = {unit.pieces[p], unit.pieces[p + 1 < last ? p + 1 : p]};
      ScorePieces<Q, 2, kFetch>(q, q_stride, head.head_dim, head.block_size, pair, scores);
    }
  });
}

// Where a block's p . v go: added to what `part` holds or not; then stored
// there, or joined to acc.
struct ValueSums {
  bool add;
  float* part;  // [queries][stride]
  size_t stride;
  float* acc;          // [queries][stride], or null: stored
  const float* old;    // [queries] factors of acc
  const float* fresh;  // [queries] of the sums
};

// Sums p[j] * v[j] over positions [begin, end) of the unit at `base`, for Q
// queries and N vectors from `column`. kFetch: also fetches K of the positions
// a unit further, before `limit`.
template <uint32_t Q, uint32_t N, bool kFetch, typename T>
inline void AddValues(const KvHead<T>& head, uint32_t base, uint32_t begin, uint32_t end,
                      uint32_t limit, const float* p, uint32_t column, const ValueSums& to) {
  constexpr size_t kBytes = N * kLanes * sizeof(T);
  V sum[Q][N];
#pragma GCC unroll 8
  for (uint32_t i = 0; i < Q; ++i) {
#pragma GCC unroll 8
    for (uint32_t c = 0; c < N; ++c) {
      sum[i][c] = to.add ? VLoad(to.part + i * to.stride + column + c * kLanes) : VSet1(0.0f);
    }
  }
  for (uint32_t j = begin; j < end;) {
    const uint32_t pos = base + j;
    const uint32_t left = head.block_size - (pos & (head.block_size - 1));
    const uint32_t stop = left < end - j ? j + left : end;
    const T* v = head.ValueAt(pos) + column;
    // A block's K has as many bytes as its V.
    const char* fetch = nullptr;
    if (kFetch && pos + kAttentionUnit < limit && head.block_size <= kAttentionUnit) {
      fetch = reinterpret_cast<const char*>(
          head.k + head.BlockOf(pos + kAttentionUnit) +
          static_cast<size_t>(pos & (head.block_size - 1)) * head.head_dim + column);
    }
    for (; j < stop; ++j, v += head.head_dim) {
      V value[N];
#pragma GCC unroll 8
      for (uint32_t c = 0; c < N; ++c) value[c] = LoadKv(v + c * kLanes);
      if (kFetch && fetch != nullptr) {
        for (size_t b = 0; b < kBytes; b += 64) __builtin_prefetch(fetch + b, 0, kFetchTo<T>);
        fetch += head.head_dim * sizeof(T);
      }
#pragma GCC unroll 8
      for (uint32_t i = 0; i < Q; ++i) {
        const V x = VSet1(p[i * kScoresStride + j]);
#pragma GCC unroll 8
        for (uint32_t c = 0; c < N; ++c) sum[i][c] = VFma(x, value[c], sum[i][c]);
      }
    }
  }
#pragma GCC unroll 8
  for (uint32_t i = 0; i < Q; ++i) {
    const size_t row = i * to.stride + column;
#pragma GCC unroll 8
    for (uint32_t c = 0; c < N; ++c) {
      const size_t at = row + c * kLanes;
      if (to.acc == nullptr) {
        VStore(to.part + at, sum[i][c]);
      } else {
        const V before = VMul(VLoad(to.acc + at), VSet1(to.old[i]));
        VStore(to.acc + at, VFma(sum[i][c], VSet1(to.fresh[i]), before));
      }
    }
  }
}

// All columns. Head sizes that are not a multiple of the vector end in a vector
// that reads past them; the pool has slack behind it.
template <bool kFetch, typename T>
inline void AddValueBlock(const KvHead<T>& head, uint32_t base, uint32_t begin, uint32_t end,
                          uint32_t limit, const float* p, uint32_t n, const ValueSums& to) {
  const uint32_t vectors = (head.head_dim + kLanes - 1) / kLanes;
  WithConstant<kBlockQueries>(n, [&](auto queries) {
    constexpr uint32_t Q = queries, N = kBlockVectors;
    uint32_t c = 0;
    for (; c + N <= vectors; c += N) {
      AddValues<Q, N, kFetch>(head, base, begin, end, limit, p, c * kLanes, to);
    }
    for (; c < vectors; ++c) {
      AddValues<Q, 1, kFetch>(head, base, begin, end, limit, p, c * kLanes, to);
    }
  });
}

}  // namespace
}  // namespace cpu
}  // namespace plansmith
