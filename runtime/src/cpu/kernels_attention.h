// Paged attention of one tile of query rows and heads that share a KV head,
// over the V of the file that includes it.
//
// q [rows][heads][D] against K and V of the sequence's blocks, which hold T:
// float, F16, F8 or int8_t. Bound by reading K and V at decode (each position is
// read once for all queries of the tile), by arithmetic at prefill. The scales
// of K and V meet q and the sums, so that the inner loops see codes alone.
//
// A call takes the units of the context one by one: scores, softmax, sums of
// values. Each unit's part is joined to what came before, or written for
// another call to join. What a row gets from a unit depends on the row alone,
// so it has the same bits whatever tile, chunk or batch it is in, and however
// its context is shared.
//
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "cpu/kernels_attention_plain.h"
#include "cpu/kernels_attention_softmax.h"
#include "cpu/kernels_attention_unit.h"

namespace plansmith {
namespace cpu {
namespace {

struct Tile {
  uint32_t num_queries;  // rows x heads
  uint32_t acc_stride;
  float* q;       // [queries][acc_stride] times the scales of q . k and of K
  float* scores;  // [queries][kScoresStride] of the unit at hand
  float* old;     // [queries] factors of a join
  float* fresh;
  Part all;   // what was joined so far
  Part unit;  // of the unit at hand
  float* plain;
  float out_scale;                   // of the sums: that of V
  Range seen[kMaxAttentionQueries];  // of the unit at hand, by row
};

inline void StartTile(const AttentionArgs& a, Tile* t) {
  t->num_queries = a.num_rows * a.num_heads;
  t->acc_stride = PadTo16(a.head_dim);
  const uint32_t padded = PadTo16(t->num_queries);
  const size_t part = PartFloats(t->num_queries, t->acc_stride);
  t->all = PartAt(a.scratch, t->num_queries);
  t->unit = PartAt(a.scratch + part, t->num_queries);
  t->old = a.scratch + 2 * part;
  t->fresh = t->old + padded;
  t->scores = t->fresh + padded;
  t->q = t->scores + t->num_queries * kScoresStride;
  t->plain = t->q + t->num_queries * t->acc_stride;
}

inline void StartSums(const Tile& t) {
  const uint32_t padded = PadTo16(t.num_queries);
  const uint32_t sums = t.num_queries * (kPartLanes + t.acc_stride);
  for (uint32_t i = 0; i < padded; i += kLanes) {
    VStore(t.all.max + i, VSet1(-__builtin_inff()));
    VStore(t.unit.max + i, VSet1(-__builtin_inff()));
  }
  for (uint32_t i = 0; i < sums; i += kLanes) VStore(t.all.sum + i, VSet1(0.0f));
}

inline const float* QueryRow(const AttentionArgs& a, uint32_t query) {
  return a.q + (query / a.num_heads) * a.q_stride + (query % a.num_heads) * a.head_dim;
}

inline void ScaleQueries(const AttentionArgs& a, float scale, const Tile& t) {
  // Rows lie pages apart, where hardware fetches nothing ahead.
  for (uint32_t i = 0; i < t.num_queries; ++i) {
    const float* row = QueryRow(a, i);
    for (uint32_t d = 0; d < a.head_dim; d += 16) __builtin_prefetch(row + d);
  }
  for (uint32_t i = 0; i < t.num_queries; ++i) {
    const float* row = QueryRow(a, i);
    float* to = t.q + i * t.acc_stride;
    ForVectors(a.head_dim, [&](uint32_t d, uint32_t lanes) {
      VStore(to + d, VMul(LoadUpTo(row + d, lanes), VSet1(scale)));
    });
  }
}

// Output rows are fetched while the tile is computed.
inline void FetchOutput(const AttentionArgs& a, const Tile& t) {
  for (uint32_t i = 0; i < t.num_queries; ++i) {
    const float* row = a.out + (i / a.num_heads) * a.out_stride + (i % a.num_heads) * a.head_dim;
    for (uint32_t d = 0; d < a.head_dim; d += 16) __builtin_prefetch(row + d, 1);
  }
}

// Rows of out: the joined sums of queries [first, end), divided.
inline void Finish(const AttentionArgs& a, const Tile& t, uint32_t first, uint32_t end) {
  for (uint32_t i = first; i < end; ++i) {
    float* row = a.out + (i / a.num_heads) * a.out_stride + (i % a.num_heads) * a.head_dim;
    const V factor = VSet1(t.out_scale / VReduceAdd(VLoad(t.all.sum + i * kPartLanes)));
    const float* acc = t.all.acc + i * t.acc_stride;
    ForVectors(a.head_dim, [&](uint32_t d, uint32_t lanes) {
      StoreUpTo(row + d, VMul(VLoad(acc + d), factor), lanes);
    });
  }
}

// What the queries of one block see of the unit: all of them, and any of them.
struct BlockRange {
  Range common, any;
};
inline BlockRange RangeOfBlock(const Tile& t, uint32_t first_row, uint32_t last_row) {
  BlockRange r = {{0, kAttentionUnit}, {kAttentionUnit, 0}};
  for (uint32_t row = first_row; row <= last_row; ++row) {
    const Range& seen = t.seen[row];
    if (seen.begin > r.common.begin) r.common.begin = seen.begin;
    if (seen.end < r.common.end) r.common.end = seen.end;
    if (seen.empty()) continue;
    if (seen.begin < r.any.begin) r.any.begin = seen.begin;
    if (seen.end > r.any.end) r.any.end = seen.end;
  }
  return r;
}

// The queries of a block that do not all see the same of the unit: what they
// have in common together, the rest one by one, each in the order of the
// positions.
template <typename T>
inline void AddRaggedValues(const AttentionArgs& a, const Tile& t, const KvHead<T>& head,
                            uint32_t base, uint32_t first, uint32_t n, Range common) {
  const float* p = t.scores + first * kScoresStride;
  const auto add = [&](uint32_t query, uint32_t count, Range range, bool more) {
    if (range.empty() && more) return;
    AddValueBlock<false>(head, base, range.begin, range.end, 0, p + query * kScoresStride, count,
                         {more, t.unit.acc + (first + query) * t.acc_stride, t.acc_stride, nullptr,
                          nullptr, nullptr});
  };
  const auto seen = [&](uint32_t query) { return t.seen[(first + query) / a.num_heads]; };
  if (common.empty()) {
    for (uint32_t i = 0; i < n; ++i) add(i, 1, seen(i), false);
    return;
  }
  bool more = false;
  for (uint32_t i = 0; i < n; ++i) more |= seen(i).begin < common.begin;
  if (more) {
    for (uint32_t i = 0; i < n; ++i) add(i, 1, {seen(i).begin, common.begin}, false);
  }
  add(0, n, common, more);
  for (uint32_t i = 0; i < n; ++i) add(i, 1, {common.end, seen(i).end}, true);
}

// One unit for all queries of the tile. `head` may be that of a decoded unit,
// at `base` in it. fetch_end: where the positions end that the call reads from
// `head`. last: of the context; blocks that are done go out while the next ones
// are computed.
template <typename T>
inline void AddUnit(const AttentionArgs& a, const Tile& t, const KvHead<T>& head,
                    const Unit<T>& unit, uint32_t base, uint32_t fetch_end, bool last) {
  const auto for_blocks = [&](const auto& f) {
    for (uint32_t first = 0; first < t.num_queries; first += kBlockQueries) {
      const uint32_t n =
          t.num_queries - first < kBlockQueries ? t.num_queries - first : kBlockQueries;
      const BlockRange r = RangeOfBlock(t, first / a.num_heads, (first + n - 1) / a.num_heads);
      f(first, n, r);
    }
  };
  for_blocks([&](uint32_t first, uint32_t n, const BlockRange& r) {
    if (r.any.empty()) return;
    const float* q = t.q + first * t.acc_stride;
    float* scores = t.scores + first * kScoresStride;
    if (first == 0) {
      ScoreBlock<true>(head, unit, r.any.begin, r.any.end, q, t.acc_stride, n, scores);
    } else {
      ScoreBlock<false>(head, unit, r.any.begin, r.any.end, q, t.acc_stride, n, scores);
    }
  });
  const bool join = a.parts == nullptr;
  for (uint32_t i = 0; i < t.num_queries; ++i) {
    const Range seen = t.seen[i / a.num_heads];
    if (!seen.empty()) {
      t.unit.max[i] = PrepareScores(t.scores + i * kScoresStride, seen, a.softcap);
    }
  }
  if (join) JoinMaxima(t.all.max, t.unit.max, t.num_queries, t.old, t.fresh);
  for (uint32_t i = 0; i < t.num_queries; ++i) {
    const Range seen = t.seen[i / a.num_heads];
    if (seen.empty()) continue;
    const V total = Soften(t.scores + i * kScoresStride, seen, t.unit.max[i]);
    if (join) {
      float* sum = t.all.sum + i * kPartLanes;
      VStore(sum, Joined(VLoad(sum), total, VSet1(t.old[i]), VSet1(t.fresh[i])));
    } else {
      VStore(t.unit.sum + i * kPartLanes, total);
    }
  }
  const auto add_values = [&](uint32_t first, uint32_t n, const BlockRange& r) {
    if (r.common.begin != r.any.begin || r.common.end != r.any.end) {
      AddRaggedValues(a, t, head, base, first, n, r.common);
      for (uint32_t i = first; join && i < first + n; ++i) {
        if (t.seen[i / a.num_heads].empty()) continue;
        JoinVectors(t.all.acc + i * t.acc_stride, t.unit.acc + i * t.acc_stride, a.head_dim,
                    t.old[i], t.fresh[i]);
      }
      return;
    }
    const size_t at = first * t.acc_stride;
    const ValueSums to = {false,         t.unit.acc + at,
                          t.acc_stride,  join ? t.all.acc + at : nullptr,
                          t.old + first, t.fresh + first};
    const float* p = t.scores + first * kScoresStride;
    if (first == 0) {
      AddValueBlock<true>(head, base, r.any.begin, r.any.end, fetch_end, p, n, to);
    } else {
      AddValueBlock<false>(head, base, r.any.begin, r.any.end, 0, p, n, to);
    }
  };
  for_blocks([&](uint32_t first, uint32_t n, const BlockRange& r) {
    if (!r.any.empty()) add_values(first, n, r);
    if (last) Finish(a, t, first, first + n);
  });
}

// Joins the parts of all units.
inline void JoinParts(const AttentionArgs& a, const Tile& t) {
  const size_t floats = PartFloats(t.num_queries, t.acc_stride);
  for (uint32_t u = a.first_unit; u < a.end_unit; ++u) {
    const Part part = PartAt(a.parts + (u - a.first_unit) * floats, t.num_queries);
    JoinMaxima(t.all.max, part.max, t.num_queries, t.old, t.fresh);
    for (uint32_t i = 0; i < t.num_queries; ++i) {
      if (RangeOf(a, i / a.num_heads, u).empty()) continue;
      JoinVectors(t.all.sum + i * kPartLanes, part.sum + i * kPartLanes, kLanes, t.old[i],
                  t.fresh[i]);
      JoinVectors(t.all.acc + i * t.acc_stride, part.acc + i * t.acc_stride, a.head_dim, t.old[i],
                  t.fresh[i]);
    }
  }
}

template <typename T>
void AddUnits(const AttentionArgs& a, Tile* t) {
  // Half floats are decoded as fast as they are read, by one instruction.
  constexpr bool kDecodes = sizeof(T) == 1;
  const KvHead<T> head = HeadOf<T>(a);
  const bool few = t->num_queries <= kFewQueries;
  ScaleQueries(a, a.scale * (a.softcap > 0 ? 1.0f : kLog2E) * (a.k_scale * kKvFactor<T>), *t);
  [[maybe_unused]] PlainUnit plain;
  if constexpr (kDecodes) {
    if (!few) StartPlain(a, t->plain, &plain);
  }
  const uint32_t end = static_cast<uint32_t>(a.first_pos) + a.num_rows;
  Unit<T> unit;
  for (uint32_t u = a.first_unit; u < a.end_unit; ++u) {
    const uint32_t base = u * kAttentionUnit;
    const uint32_t n = end - base < kAttentionUnit ? end - base : kAttentionUnit;
    const uint32_t next = (u + 1) * kAttentionUnit;
    const uint32_t fetch_end = u + 1 == a.end_unit ? next : end;
    if (a.parts != nullptr) {
      const size_t floats = PartFloats(t->num_queries, t->acc_stride);
      t->unit = PartAt(a.parts + (u - a.first_unit) * floats, t->num_queries);
    }
    for (uint32_t row = 0; row < a.num_rows; ++row) {
      t->seen[row] = RangeOf(a, row, u);
      if (!t->seen[row].empty()) continue;
      for (uint32_t h = 0; h < a.num_heads; ++h) {
        t->unit.max[row * a.num_heads + h] = -__builtin_inff();
      }
    }
    FindPieces(head, base, n, &unit);
    const bool last = a.parts == nullptr && u + 1 == a.end_unit;
    if (!kDecodes || few) {
      AddUnit(a, *t, head, unit, base, fetch_end, last);
    } else if constexpr (kDecodes) {
      Decode(head, unit, n, &plain);
      AddUnit(a, *t, plain.head, plain.unit, 0, 0, last);
    }
  }
}

template <typename T>
void Attend(const AttentionArgs& a) {
  Tile t;
  StartTile(a, &t);
  if (a.parts == nullptr || a.join) StartSums(t);
  if (a.parts == nullptr || a.join) FetchOutput(a, t);
  t.out_scale = a.v_scale * kKvFactor<T>;
  if (a.join) {
    JoinParts(a, t);
    Finish(a, t, 0, t.num_queries);
  } else {
    AddUnits<T>(a, &t);
  }
}

}  // namespace
}  // namespace cpu
}  // namespace plansmith
