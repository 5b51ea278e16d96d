// Products of int8 inputs with int8 and int4 weights by AMX tiles: 16 rows x 16 outputs x 64 k in
// one instruction. Sixteen lines of N16K4 are a tile of weights as they lie; int4 is expanded to
// such lines, once for up to 64 rows.
//
// Two blocks of 16 rows times two tiles of outputs share what is loaded: four products for four
// loads. The sums of a group leave the tiles as integers, which are exact, and meet the scales in
// the order of the AVX-512 kernels: the same bits.
//
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <string.h>

#include "cpu/amx_tiles.h"
#include "cpu/kernels.h"
#include "cpu/simd_avx512.h"
// Behind it:
#include "cpu/kernels_tile.h"

namespace plansmith {
namespace cpu {
namespace {

constexpr uint32_t kMaxBlocks = 4;              // of rows, between two visits of a weight
constexpr uint32_t kMaxExpanded = 4;            // chunks of 64 columns, between two such visits
constexpr uint32_t kPairOutputs = 2 * kTile;    // of two tiles side by side
constexpr uint32_t kLineBytes = kTileRowBytes;  // 4 k of 16 outputs
constexpr uint32_t kBufferBytes = kTileRows * kLineBytes;  // a tile of weights

// Which tile register is what. Sums of row block i and output tile j: 2 i + j.
constexpr int kInputs = 4, kWeights = 6;

struct TileI8 {
  static constexpr uint32_t kLineCols = 4;
  static constexpr uint32_t kMaxChunks = ~0u;  // of a segment: nothing is expanded
  static constexpr bool kInPlace = true;
  // Lines of 4 k from one line of packed weights.
  static void Expand(const uint8_t* line, uint8_t* to) {
    _mm512_store_si512(to, _mm512_loadu_si512(line));
  }
};
struct TileI4 {
  static constexpr uint32_t kLineCols = 8;
  static constexpr uint32_t kMaxChunks = kMaxExpanded;
  static constexpr bool kInPlace = false;
  static void Expand(const uint8_t* line, uint8_t* to) {
    const __m512i both = _mm512_loadu_si512(line), nibble = _mm512_set1_epi8(15);
    const __m512i high = _mm512_and_si512(_mm512_srli_epi16(both, 4), nibble);
    const __m512i offset = _mm512_set1_epi8(8);
    _mm512_store_si512(to, _mm512_sub_epi8(_mm512_and_si512(both, nibble), offset));
    _mm512_store_si512(to + kLineBytes, _mm512_sub_epi8(high, offset));
  }
};

// What a thread works in, in L1.
struct alignas(64) TileScratch {
  int32_t dots[kMaxBlocks][kTileRows][kPairOutputs];
  float sums[kMaxBlocks * kTileRows][kPairOutputs];  // of rows
  uint8_t weights[kMaxExpanded][2][kBufferBytes];    // [chunk of a segment][tile of the pair]
};

// Up to kMaxBlocks blocks of rows. All have the same height: the last one also computes rows before
// its own where there are fewer than 16 left.
struct RowBlocks {
  uint32_t first_row, num_rows;
  uint32_t height;  // of a block
  uint32_t count;
  // Where a block begins, from first_row on: below 0 for rows of the blocks before these.
  int32_t RowOf(uint32_t block) const {
    const uint32_t at = block * kTileRows;
    return at + height <= num_rows ? static_cast<int32_t>(at)
                                   : static_cast<int32_t>(num_rows) - static_cast<int32_t>(height);
  }
};

template <typename Weights>
class TileLinear {
 public:
  // Columns of one product; 0 where the groups do not go into tiles.
  static uint32_t ChunkCols(const PackedMatrix& w) {
    if (w.num_groups == 1 || w.group_cols % kTileRowBytes == 0) return kTileRowBytes;
    return w.group_cols >= 32 && w.group_cols < kTileRowBytes ? w.group_cols : 0;
  }

  explicit TileLinear(const LinearArgs& args)
      : a_(args),
        chunk_cols_(ChunkCols(args.w)),
        tile_bytes_(static_cast<size_t>(args.w.padded_cols) / Weights::kLineCols * kLineBytes) {}

  void Run(uint32_t row_begin, uint32_t row_end, uint32_t tile_begin, uint32_t tile_end) {
    const uint32_t num_rows = row_end - row_begin;
    const uint32_t height = num_rows < kTileRows ? num_rows : kTileRows;
    const Tiles tiles(Shapes(height));
    for (uint32_t tile = tile_begin; tile < tile_end; tile += 2) {
      for (uint32_t row = 0; row < num_rows; row += kMaxBlocks * kTileRows) {
        const uint32_t left = num_rows - row;
        const uint32_t n = left < kMaxBlocks * kTileRows ? left : kMaxBlocks * kTileRows;
        const RowBlocks rows = {row_begin + row, n, height, (n + kTileRows - 1) / kTileRows};
        if (tile + 1 < tile_end) {
          RunPair<2>(rows, tile);
        } else {
          RunPair<1>(rows, tile);
        }
      }
    }
  }

 private:
  TileShapes Shapes(uint32_t height) const {
    TileShapes shapes;
    for (uint32_t sum = 0; sum < 4; ++sum) shapes.Set(sum, height, kTile * 4);
    for (uint32_t i = 0; i < 2; ++i) {
      shapes.Set(kInputs + i, height, chunk_cols_);
      shapes.Set(kWeights + i, chunk_cols_ / 4, kLineBytes);
    }
    return shapes;
  }

  // NT tiles side by side.
  template <uint32_t NT>
  void RunPair(const RowBlocks& rows, uint32_t tile) {
    const uint32_t chunks = (a_.w.group_cols + chunk_cols_ - 1) / chunk_cols_;
    for (uint32_t g = 0; g < a_.w.num_groups; ++g) {
      for (uint32_t chunk = 0; chunk < chunks;) {
        const uint32_t left = chunks - chunk;
        const uint32_t n = left < Weights::kMaxChunks ? left : Weights::kMaxChunks;
        AddSegment<NT>(rows, tile, g * a_.w.group_cols + chunk * chunk_cols_, n, chunk == 0);
        chunk += n;
      }
      for (uint32_t t = 0; t < NT; ++t) AddGroup(rows, tile, t, g);
    }
    for (uint32_t t = 0; t < NT; ++t) {
      for (uint32_t r = 0; r < rows.num_rows; ++r) {
        const V sum = VLoad(s_.sums[r] + t * kTile);
        Finish(a_, rows.first_row + r, tile + t, &sum);
      }
    }
  }

  // dots (+)= products of n chunks from column k.
  template <uint32_t NT>
  void AddSegment(const RowBlocks& rows, uint32_t tile, uint32_t k, uint32_t n, bool first) {
    if constexpr (!Weights::kInPlace) {
      for (uint32_t c = 0; c < n; ++c) Expand<NT>(tile, k + c * chunk_cols_, c);
    }
    uint32_t block = 0;
    for (; block + 2 <= rows.count; block += 2) {
      AddBlocks<2, NT>(rows, block, tile, k, n, first);
    }
    if (block < rows.count) AddBlocks<1, NT>(rows, block, tile, k, n, first);
  }

  template <uint32_t NT>
  void Expand(uint32_t tile, uint32_t k, uint32_t chunk) {
    for (uint32_t t = 0; t < NT; ++t) ExpandTile(LinesOf(tile + t, k), k, s_.weights[chunk][t]);
  }
  // Zeros behind the last column: whatever the inputs are there.
  void ExpandTile(const uint8_t* from, uint32_t k, uint8_t* to) {
    const uint32_t left = a_.w.padded_cols - k;
    const uint32_t cols = left < chunk_cols_ ? left : chunk_cols_;
    uint32_t done = 0;
    for (; done < cols; done += Weights::kLineCols, from += kLineBytes) {
      Weights::Expand(from, to + done / 4 * kLineBytes);
    }
    memset(to + done / 4 * kLineBytes, 0, (chunk_cols_ - done) / 4 * kLineBytes);
  }
  const uint8_t* LinesOf(uint32_t tile, uint32_t k) const {
    return static_cast<const uint8_t*>(a_.w.data) + tile * tile_bytes_ +
           static_cast<size_t>(k) / Weights::kLineCols * kLineBytes;
  }
  // A tile of weights: as it lies, or expanded.
  const uint8_t* WeightsOf(uint32_t tile, uint32_t t, uint32_t k, uint32_t chunk) {
    if constexpr (!Weights::kInPlace) return s_.weights[chunk][t];
    if (k + chunk_cols_ <= a_.w.padded_cols) return LinesOf(tile + t, k);
    ExpandTile(LinesOf(tile + t, k), k, s_.weights[0][t]);
    return s_.weights[0][t];
  }

  template <uint32_t NB, uint32_t NT>
  void AddBlocks(const RowBlocks& rows, uint32_t block, uint32_t tile, uint32_t k, uint32_t n,
                 bool first) {
    StartSums<0, NT>(block, first);
    if constexpr (NB > 1) StartSums<2, NT>(block + 1, first);
    const int8_t* q0 = InputsOf(rows, block, k);
    [[maybe_unused]] const int8_t* q1 = NB > 1 ? InputsOf(rows, block + 1, k) : nullptr;
    for (uint32_t c = 0; c < n; ++c, k += chunk_cols_, q0 += chunk_cols_) {
      Tiles::Load<kInputs>(q0, a_.q_stride);
      if constexpr (NB > 1) {
        Tiles::Load<kInputs + 1>(q1, a_.q_stride);
        q1 += chunk_cols_;
      }
      Tiles::Load<kWeights>(WeightsOf(tile, 0, k, c), kLineBytes);
      Tiles::Dot<0, kInputs, kWeights>();
      if constexpr (NB > 1) Tiles::Dot<2, kInputs + 1, kWeights>();
      if constexpr (NT > 1) {
        Tiles::Load<kWeights + 1>(WeightsOf(tile, 1, k, c), kLineBytes);
        Tiles::Dot<1, kInputs, kWeights + 1>();
        if constexpr (NB > 1) Tiles::Dot<3, kInputs + 1, kWeights + 1>();
      }
    }
    StoreSums<0, NT>(block);
    if constexpr (NB > 1) StoreSums<2, NT>(block + 1);
  }
  const int8_t* InputsOf(const RowBlocks& rows, uint32_t block, uint32_t k) const {
    const int64_t row = static_cast<int64_t>(rows.first_row) + rows.RowOf(block);
    return a_.q + static_cast<size_t>(row) * a_.q_stride + k;
  }
  template <int kSum, uint32_t NT>
  void StartSums(uint32_t block, bool first) {
    if (first) {
      Tiles::Zero<kSum>();
      if constexpr (NT > 1) Tiles::Zero<kSum + 1>();
    } else {
      Tiles::Load<kSum>(s_.dots[block][0], kDotsStride);
      if constexpr (NT > 1) Tiles::Load<kSum + 1>(s_.dots[block][0] + kTile, kDotsStride);
    }
  }
  template <int kSum, uint32_t NT>
  void StoreSums(uint32_t block) {
    Tiles::Store<kSum>(s_.dots[block][0], kDotsStride);
    if constexpr (NT > 1) Tiles::Store<kSum + 1>(s_.dots[block][0] + kTile, kDotsStride);
  }

  // sums (+)= dots * the scales of group g.
  void AddGroup(const RowBlocks& rows, uint32_t tile, uint32_t t, uint32_t g) {
    const size_t q_group = a_.q_groups == 1 ? 0 : g;
    const float* row_scales = a_.q_scales + static_cast<size_t>(rows.first_row) * a_.q_groups;
    const V ws = LoadScales(a_.w, (static_cast<size_t>(tile + t) * a_.w.num_groups + g) * kTile);
    for (uint32_t r = 0; r < rows.num_rows; ++r) {
      const uint32_t block = r / kTileRows;
      const int32_t in_block = static_cast<int32_t>(r) - rows.RowOf(block);
      const int32_t* dots = s_.dots[block][in_block] + t * kTile;
      const V scale = VSet1(row_scales[static_cast<size_t>(r) * a_.q_groups + q_group]);
      const V x = VMul(_mm512_cvtepi32_ps(_mm512_load_si512(dots)), scale);
      float* sum = s_.sums[r] + t * kTile;
      // The first one is added to 0, too: x * ws alone may be -0.
      VStore(sum, VFma(x, ws, g == 0 ? VSet1(0.0f) : VLoad(sum)));
    }
  }

  static constexpr size_t kDotsStride = kPairOutputs * sizeof(int32_t);
  const LinearArgs& a_;
  const uint32_t chunk_cols_;
  const size_t tile_bytes_;
  TileScratch s_;
};

}  // namespace
}  // namespace cpu
}  // namespace plansmith
