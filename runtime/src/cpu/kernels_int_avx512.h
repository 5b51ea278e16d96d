// Products of int8 rows with int8 and int4 weights over AVX-512 VNNI: out [rows, N] = q . w^T, with
// a scale for each group of columns and output, and one for each group and row.
//
// A block of MR rows x NT tiles of 16 outputs has its sums in registers. A 512-bit vpdpbusd is one
// a cycle on Zen 4, where everything else finds room beside it but the two float products at the
// end of a group: groups of 32 columns leave 8 / 10 of the peak, groups of 64 leave 16 / 18. Of
// that, blocks of 6 rows x 2 tiles reach 91 to 95 % on one thread; blocks of 13 x 2, whose float
// sums do not fit in registers, 84 to 92 %.
// Few rows are bound by reading the weights: one tile at a time, which is one stream of memory, and
// the lines of later tiles asked for early.
//
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <utility>

#include "cpu/kernels_linear.h"

namespace plansmith {
namespace cpu {
namespace {

// body(0), body(1), ... body(N - 1) with constants, so that arrays indexed by them are registers
// whatever the compiler thinks of the loop's size.
template <typename Body, uint32_t... kIndices>
[[gnu::always_inline]] inline void UnrollOver(Body& body,
                                              std::integer_sequence<uint32_t, kIndices...>) {
  (body(std::integral_constant<uint32_t, kIndices>{}), ...);
}
template <uint32_t N, typename Body>
[[gnu::always_inline]] inline void Unroll(Body body) {
  UnrollOver(body, std::make_integer_sequence<uint32_t, N>{});
}
#define PSM_UNROLLED [&](auto i) __attribute__((always_inline))

// Sums are kept in this type and not in __m512i (eight 64-bit lanes): GCC 12 does not see that they
// are one register in both types, copies each of them in every step and runs out of registers.
using Sums = int32_t __attribute__((vector_size(64)));

inline __m512i Broadcast4(const int8_t* q) {
  int32_t four;
  __builtin_memcpy(&four, q, sizeof(four));
  return _mm512_set1_epi32(four);
}

// vpdpbusd wants one side unsigned: the weights, moved by kOffset, which -kOffset times the row's
// sum takes back. A line of 64 bytes is kParts vectors of 4 columns.
struct DotI8 {
  static constexpr uint32_t kParts = 1;
  static constexpr int32_t kOffset = 128;
  static void Load(const uint8_t* w, __m512i* parts) {
    parts[0] = _mm512_xor_si512(_mm512_loadu_si512(w), _mm512_set1_epi8(-128));
  }
};
struct DotI4 {
  static constexpr uint32_t kParts = 2;
  static constexpr int32_t kOffset = 8;
  static void Load(const uint8_t* w, __m512i* parts) {
    const __m512i both = _mm512_loadu_si512(w), nibble = _mm512_set1_epi8(15);
    parts[0] = _mm512_and_si512(both, nibble);
    parts[1] = _mm512_and_si512(_mm512_srli_epi16(both, 4), nibble);
  }
};

// What a block reads of its product, from its first row and tile on.
struct IntOperands {
  const uint8_t* w;
  const uint8_t* ahead;  // a line of it is asked for with each line of a tile
  size_t tile_bytes;
  const int8_t* q;
  size_t q_stride;
  size_t scale;  // number of the group's first scale
  const float* row_scales;
  const int32_t* row_sums;
};

template <typename Dot, uint32_t MR, uint32_t NT>
struct IntBlock {
  // A sum waits 4 cycles for itself: blocks of fewer sums keep one for each part of a line.
  static constexpr uint32_t kChains = MR * NT < 4 ? Dot::kParts : 1;
  static constexpr uint32_t kSums = MR * NT;
  // Fewer rows read as fast as memory brings, which the processor's own prefetch does best.
  static constexpr bool kAsksAhead = MR * NT > 4;

  [[gnu::always_inline]] static void AddLine(const IntOperands& o, Sums (*dot)[kSums]) {
    __m512i parts[NT][Dot::kParts];
    if constexpr (kAsksAhead) _mm_prefetch(reinterpret_cast<const char*>(o.ahead), _MM_HINT_T1);
    Unroll<NT>(PSM_UNROLLED { Dot::Load(o.w + i * o.tile_bytes, parts[i]); });
    Unroll<Dot::kParts * MR>(PSM_UNROLLED {
      constexpr uint32_t part = i / MR, r = i % MR;
      const __m512i four = Broadcast4(o.q + r * o.q_stride + 4 * part);
      Sums* sums = dot[part % kChains] + r * NT;
      for (uint32_t t = 0; t < NT; ++t) {
        sums[t] = (Sums)_mm512_dpbusd_epi32((__m512i)sums[t], parts[t][part], four);
      }
    });
  }

  // Not inlined: in the loops over blocks it would run out of registers.
  [[gnu::noinline]] static void Run(const LinearArgs& a, uint32_t row, uint32_t tile,
                                    const uint8_t* ahead) {
    const uint32_t num_groups = a.w.num_groups, lines = a.w.group_cols / (4 * Dot::kParts);
    const uint32_t q_groups = a.q_groups, next_scale = q_groups == 1 ? 0 : 1;
    IntOperands o;
    o.tile_bytes = static_cast<size_t>(a.w.padded_cols) / (4 * Dot::kParts) * 64;
    o.w = static_cast<const uint8_t*>(a.w.data) + tile * o.tile_bytes;
    o.ahead = ahead;
    o.q_stride = a.q_stride;
    o.q = a.q + row * o.q_stride;
    o.scale = static_cast<size_t>(tile) * num_groups * kTile;
    o.row_scales = a.q_scales + static_cast<size_t>(row) * q_groups;
    o.row_sums = a.q_sums + static_cast<size_t>(row) * num_groups;
    // Lines of a large output are far from the caches: asked for before they are written.
    for (uint32_t i = 0; i < kSums; ++i) {
      const float* out = a.out + (row + i / NT) * a.out_stride + (tile + i % NT) * kTile;
      _mm_prefetch(reinterpret_cast<const char*>(out), _MM_HINT_T0);
    }
    V sum[kSums];
    Unroll<kSums>(PSM_UNROLLED { sum[i] = VSet1(0.0f); });
    for (uint32_t g = 0; g < num_groups; ++g) {
      Sums dot[kChains][kSums];
      Unroll<kChains * kSums>(PSM_UNROLLED {
        const int32_t row_sum = i < kSums ? o.row_sums[i / NT * num_groups] : 0;
        dot[i / kSums][i % kSums] = (Sums)_mm512_set1_epi32(-Dot::kOffset * row_sum);
      });
      for (uint32_t s = 0; s < lines; ++s) {
        AddLine(o, dot);
        o.w += 64;
        o.ahead += 64;
        o.q += 4 * Dot::kParts;
      }
      V w_scale[NT];
      Unroll<NT>(PSM_UNROLLED { w_scale[i] = LoadScales(a.w, o.scale + i * num_groups * kTile); });
      Unroll<kSums>(PSM_UNROLLED {
        if constexpr (kChains == 2) dot[0][i] += dot[1][i];
        const V x =
            VMul(_mm512_cvtepi32_ps((__m512i)dot[0][i]), VSet1(o.row_scales[i / NT * q_groups]));
        sum[i] = VFma(x, w_scale[i % NT], sum[i]);
      });
      o.scale += kTile;
      o.row_scales += next_scale;
      ++o.row_sums;
    }
    for (uint32_t i = 0; i < kSums; ++i) Finish(a, row + i / NT, tile + i % NT, &sum[i]);
  }
};

// Blocks of equal height where they can be, as RunTile.
template <typename Dot, uint32_t NT, uint32_t MR>
inline void RunIntRows(const LinearArgs& a, uint32_t rows, uint32_t row, uint32_t tile,
                       const uint8_t* ahead) {
  if (rows == MR) {
    IntBlock<Dot, MR, NT>::Run(a, row, tile, ahead);
  } else if constexpr (MR > 1) {
    RunIntRows<Dot, NT, MR - 1>(a, rows, row, tile, ahead);
  }
}

constexpr uint32_t kOneTileRows = 12;  // rows of a block of one tile
constexpr uint32_t kBlockRows = 6, kBlockTiles = 2;
// How far before a line is read it is asked for, where a tile is read once: what memory brings in
// its latency is 3 KB, twice and more of it costs nothing.
constexpr size_t kAheadBytes = 8192;

// One block for each tile.
template <typename Dot>
void RunFewRows(const LinearArgs& a, uint32_t row_begin, uint32_t rows, uint32_t tile_begin,
                uint32_t tile_end) {
  const size_t tile_bytes = static_cast<size_t>(a.w.padded_cols) / (4 * Dot::kParts) * 64;
  const uint8_t* w = static_cast<const uint8_t*>(a.w.data) + kAheadBytes;
  for (uint32_t tile = tile_begin; tile < tile_end; ++tile) {
    RunIntRows<Dot, 1, kOneTileRows>(a, rows, row_begin, tile, w + tile * tile_bytes);
  }
}

// NT tiles are read for some blocks of rows. The first of those ask for the next tiles.
template <typename Dot, uint32_t NT>
void RunManyRows(const LinearArgs& a, uint32_t row_begin, uint32_t row_end, uint32_t tile_begin,
                 uint32_t tile_end) {
  const size_t tile_bytes = static_cast<size_t>(a.w.padded_cols) / (4 * Dot::kParts) * 64;
  for (uint32_t tile = tile_begin; tile < tile_end; tile += NT) {
    const uint8_t* w = static_cast<const uint8_t*>(a.w.data) + tile * tile_bytes;
    uint32_t left = row_end - row_begin;
    const uint32_t num_blocks = (left + kBlockRows - 1) / kBlockRows;
    for (uint32_t block = 0, row = row_begin; left > 0; ++block) {
      const uint32_t rows = (left + num_blocks - block - 1) / (num_blocks - block);
      const uint8_t* ahead = block < NT ? w + (NT + block) * tile_bytes : w;
      RunIntRows<Dot, NT, kBlockRows>(a, rows, row, tile, ahead);
      row += rows;
      left -= rows;
    }
  }
}

template <typename Dot>
void LinearInt(const LinearArgs& a, uint32_t row_begin, uint32_t row_end, uint32_t tile_begin,
               uint32_t tile_end) {
  const uint32_t rows = row_end - row_begin;
  if (rows <= kOneTileRows) return RunFewRows<Dot>(a, row_begin, rows, tile_begin, tile_end);
  const uint32_t last = tile_end - (tile_end - tile_begin) % kBlockTiles;
  RunManyRows<Dot, kBlockTiles>(a, row_begin, row_end, tile_begin, last);
  RunManyRows<Dot, 1>(a, row_begin, row_end, last, tile_end);
}

#undef PSM_UNROLLED

}  // namespace
}  // namespace cpu
}  // namespace plansmith
