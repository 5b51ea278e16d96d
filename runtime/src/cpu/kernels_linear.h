// Matrix products out [rows, N] = x [rows, K] . w [N, K]^T over the V of the file that includes it:
// the cut into blocks that fit in registers, and the block for float32 inputs and packed weights of
// any type. One row is bound by reading the weights, or by decoding them where they are small; many
// rows by arithmetic. Each output is summed over k in one order, whatever block it falls in.
//
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "cpu/kernels.h"
#include "cpu/kernels_rows.h"
#include "cpu/kernels_tile.h"

namespace plansmith {
namespace cpu {
namespace {

// Block::Run<MR, NT>(args, row, tile) computes MR rows x NT tiles; 1 <= MR <= Block::kMaxRows.
template <typename Block, uint32_t NT, uint32_t MR = Block::kMaxRows>
inline void RunRows(const LinearArgs& args, uint32_t rows, uint32_t row, uint32_t tile) {
  if (rows == MR) {
    Block::template Run<MR, NT>(args, row, tile);
  } else if constexpr (MR > 1) {
    RunRows<Block, NT, MR - 1>(args, rows, row, tile);
  }
}

// Rows in blocks of equal height where they can be: 9 rows are 5 + 4, not 8 + 1.
template <typename Block, uint32_t NT>
inline void RunTile(const LinearArgs& args, uint32_t row_begin, uint32_t row_end, uint32_t tile) {
  uint32_t left = row_end - row_begin;
  uint32_t blocks = (left + Block::kMaxRows - 1) / Block::kMaxRows;
  for (uint32_t row = row_begin; left > 0; --blocks) {
    const uint32_t rows = (left + blocks - 1) / blocks;
    RunRows<Block, NT>(args, rows, row, tile);
    row += rows;
    left -= rows;
  }
}

template <typename Block, uint32_t NT = Block::kMaxTiles>
inline void RunTiles(const LinearArgs& args, uint32_t row_begin, uint32_t row_end,
                     uint32_t tile_begin, uint32_t tile_end) {
  uint32_t tile = tile_begin;
  for (; tile + NT <= tile_end; tile += NT) RunTile<Block, NT>(args, row_begin, row_end, tile);
  // What is left one by one: a block for two would be a quarter of the code, for the last two
  // tiles.
  if constexpr (NT > 1) {
    if (tile < tile_end) RunTiles<Block, 1>(args, row_begin, row_end, tile, tile_end);
  }
}

// One row is bound by reading the weights or by decoding them: NT tiles are as many sums that do
// not wait for each other.
template <typename Block, uint32_t NT = Block::kOneRowTiles>
inline void RunOneRow(const LinearArgs& args, uint32_t row, uint32_t tile_begin,
                      uint32_t tile_end) {
  uint32_t tile = tile_begin;
  for (; tile + NT <= tile_end; tile += NT) Block::template Run<1, NT>(args, row, tile);
  if constexpr (NT > 1) {
    if (tile < tile_end) RunOneRow<Block, NT - 1>(args, row, tile, tile_end);
  }
}

template <typename Block>
void Linear(const LinearArgs& args, uint32_t row_begin, uint32_t row_end, uint32_t tile_begin,
            uint32_t tile_end) {
  if (row_end - row_begin == 1) {
    RunOneRow<Block>(args, row_begin, tile_begin, tile_end);
  } else {
    RunTiles<Block>(args, row_begin, row_end, tile_begin, tile_end);
  }
}

// Of the E4M3 codes of a row's group.
inline float RowScale(const LinearArgs& a, size_t row, uint32_t group) {
  return a.q_scales[row * a.q_groups + (a.q_groups <= 1 ? 0 : group)];
}

// Asks for lines of weights before they are read. The hardware's own reading ahead ends with a
// page, and a tile of a small model is two or three of them; where decoding holds the loads back it
// stays too near besides.
//
//   one row      far ahead and into L2 only: 8 and 4 bits are read 10-30 % faster, 16 bits 5-20 %.
//                float32 is left to the hardware, which reads it as fast as memory goes
//   many rows    near and into L1: 3-20 %
template <uint32_t kLineBytes, uint32_t kStep, uint32_t MR, uint32_t NT>
class ReadAhead {
 public:
  ReadAhead(const uint8_t* tile, size_t tile_bytes)
      : at_(reinterpret_cast<uintptr_t>(tile) + kAhead),
        end_(at_ - kAhead + tile_bytes),
        tile_bytes_(tile_bytes) {}

  void NextLine() {
    if constexpr (kAhead > 0) {
      // Behind the NT tiles of this block lie those of the next.
      if (at_ == end_) at_ += (NT - 1) * tile_bytes_;
      if (kLineBytes >= 64 || at_ % 64 < kLineBytes) {
        for (uint32_t t = 0; t < NT; ++t) {
          __builtin_prefetch(reinterpret_cast<const void*>(at_ + t * tile_bytes_), 0,
                             MR == 1 ? 2 : 3);
        }
      }
      at_ += kLineBytes;
    }
  }

 private:
  static constexpr uint32_t kColumnBytes = kLineBytes / kStep;
  static constexpr uint32_t kOneRowAhead = kColumnBytes == 64   ? 0
                                           : kColumnBytes == 32 ? 1024
                                                                : 2048;
  static constexpr uint32_t kAhead = MR == 1 ? kOneRowAhead : 512;
  uintptr_t at_, end_;
  size_t tile_bytes_;
};

// What a FloatBlock takes as x: floats as they are, or E4M3 numbers in bfloat16 under the scales of
// their rows.
struct FloatInput {
  static constexpr bool kHasScales = false;
  using Value = float;
  explicit FloatInput(const LinearArgs& a) : data(a.x), stride(a.x_stride) {}
  static float Of(float x) { return x; }
  const float* data;
  size_t stride;
};
struct CodeInput {
  static constexpr bool kHasScales = true;
  using Value = uint16_t;
  explicit CodeInput(const LinearArgs& a) : data(a.f8), stride(a.f8_stride) {}
  static float Of(uint16_t x) {
    const uint32_t bits = static_cast<uint32_t>(x) << 16;
    float value;
    __builtin_memcpy(&value, &bits, sizeof(value));
    return value;
  }
  const uint16_t* data;
  size_t stride;
};

// MR rows times NT tiles of weights that are decoded in registers. `Weights` is how:
//
//   kStep, kLineBytes    k that lie together, and their bytes in a tile
//   Line, Load           what a line is in registers
//   Column, Next         the column of the i-th vectors that are taken from a line; and they
//   kHasZeros            a group's zero points are subtracted from the codes
//   kHasScales, Scale    [kTileVectors] of a tile's group
//   Factor               of all scales; 1 without
//
// The sum of a group's x * code comes first, then the scale: one product with it for a group, and
// the same arithmetic whatever MR and NT.
template <typename Weights, uint32_t kRows, uint32_t kTiles, uint32_t kOneRow,
          typename Input = FloatInput>
struct FloatBlock {
  using X = typename Input::Value;
  static constexpr uint32_t kMaxRows = kRows, kMaxTiles = kTiles, kOneRowTiles = kOneRow;

  template <uint32_t MR, uint32_t NT>
  [[gnu::always_inline]] static void AddLine(const uint8_t* w, size_t tile_bytes, const X* x,
                                             size_t x_stride, const V (*zero)[kTileVectors],
                                             V (*part)[NT][kTileVectors]) {
    typename Weights::Line line[NT];
    for (uint32_t t = 0; t < NT; ++t) line[t] = Weights::Load(w + t * tile_bytes);
    for (uint32_t i = 0; i < Weights::kStep; ++i) {
      V wk[NT][kTileVectors];
      for (uint32_t t = 0; t < NT; ++t) {
        Weights::Next(&line[t], wk[t]);
        if constexpr (Weights::kHasZeros) {
          for (uint32_t h = 0; h < kTileVectors; ++h) wk[t][h] = VSub(wk[t][h], zero[t][h]);
        }
      }
      for (uint32_t r = 0; r < MR; ++r) {
        const V xk = VSet1(Input::Of(x[r * x_stride + Weights::Column(i)]));
        for (uint32_t t = 0; t < NT; ++t) {
          for (uint32_t h = 0; h < kTileVectors; ++h) {
            part[r][t][h] = VFma(xk, wk[t][h], part[r][t][h]);
          }
        }
      }
    }
  }

  template <uint32_t MR, uint32_t NT>
  static void Run(const LinearArgs& a, uint32_t row, uint32_t tile) {
    constexpr uint32_t kStep = Weights::kStep;
    const size_t tile_bytes = static_cast<size_t>(a.w.padded_cols) / kStep * Weights::kLineBytes;
    const uint8_t* w = static_cast<const uint8_t*>(a.w.data) + tile * tile_bytes;
    ReadAhead<Weights::kLineBytes, kStep, MR, NT> ahead(w, tile_bytes);
    const Input input(a);
    const X* x = input.data + row * input.stride;
    const uint32_t num_groups = Weights::kHasScales ? a.w.num_groups : 1;
    const uint32_t cols = num_groups == 1 ? a.w.cols : a.w.group_cols;
    V sum[MR][NT][kTileVectors];
    Clear(sum);
    for (uint32_t g = 0; g < num_groups; ++g) {
      V part[MR][NT][kTileVectors], zero[NT][kTileVectors];
      Clear(part);
      if constexpr (Weights::kHasZeros) {
        for (uint32_t t = 0; t < NT; ++t) LoadVectors(a.w.zeros, a.w, tile + t, g, zero[t]);
      }
      for (uint32_t s = 0; s < cols / kStep; ++s, w += Weights::kLineBytes, x += kStep) {
        ahead.NextLine();
        AddLine<MR, NT>(w, tile_bytes, x, input.stride, zero, part);
      }
      if (kStep > 1 && cols % kStep != 0) {  // of one group alone: it is the end of the row
        X last[MR][kStep] = {};
        for (uint32_t r = 0; r < MR; ++r) {
          for (uint32_t k = 0; k < cols % kStep; ++k) last[r][k] = x[r * input.stride + k];
        }
        AddLine<MR, NT>(w, tile_bytes, last[0], kStep, zero, part);
      }
      for (uint32_t t = 0; t < NT; ++t) {
        V scale[kTileVectors];
        if constexpr (Weights::kHasScales) Weights::Scale(a.w, tile + t, g, scale);
        for (uint32_t r = 0; r < MR; ++r) {
          for (uint32_t h = 0; h < kTileVectors; ++h) {
            V p = part[r][t][h];
            if constexpr (Input::kHasScales) p = VMul(p, VSet1(RowScale(a, row + r, g)));
            if constexpr (!Weights::kHasScales) {
              sum[r][t][h] = p;
            } else {
              sum[r][t][h] = VFma(p, scale[h], sum[r][t][h]);
            }
          }
        }
      }
    }
    for (uint32_t r = 0; r < MR; ++r) {
      for (uint32_t t = 0; t < NT; ++t) {
        if constexpr (Weights::kHasFactor) {
          const V factor = VSet1(Weights::Factor(a.w));
          for (uint32_t h = 0; h < kTileVectors; ++h) sum[r][t][h] = VMul(sum[r][t][h], factor);
        }
        Finish(a, row + r, tile + t, sum[r][t]);
      }
    }
  }

 private:
  template <uint32_t MR, uint32_t NT>
  static void Clear(V (&sums)[MR][NT][kTileVectors]) {
    for (auto& row : sums) {
      for (auto& tile : row) {
        for (V& v : tile) v = VSet1(0.0f);
      }
    }
  }
  static void LoadVectors(const float* from, const PackedMatrix& w, uint32_t tile, uint32_t group,
                          V* to) {
    for (uint32_t h = 0; h < kTileVectors; ++h) {
      to[h] = VLoad(from + (static_cast<size_t>(tile) * w.num_groups + group) * kTile + h * kLanes);
    }
  }
};

// I4: with zero points or without.
template <typename Plain, typename WithZeros>
void LinearI4(const LinearArgs& args, uint32_t row_begin, uint32_t row_end, uint32_t tile_begin,
              uint32_t tile_end) {
  (args.w.zeros == nullptr ? Linear<Plain> : Linear<WithZeros>)(args, row_begin, row_end,
                                                                tile_begin, tile_end);
}

// Parts of a `Weights` (see FloatBlock).
struct NoScales {
  static constexpr bool kHasScales = false, kHasZeros = false, kHasFactor = false;
};
struct FloatScales {
  static constexpr bool kHasScales = true, kHasZeros = false, kHasFactor = false;
  static void Scale(const PackedMatrix& w, uint32_t tile, uint32_t group, V* to) {
    const size_t at = (static_cast<size_t>(tile) * w.num_groups + group) * kTile;
    for (uint32_t h = 0; h < kTileVectors; ++h) to[h] = LoadScales(w, at + h * kLanes);
  }
};
// Of F8, which is decoded to its values / 256.
struct F8Scales : FloatScales {
  static constexpr bool kHasFactor = true;
  static float Factor(const PackedMatrix&) { return 256.0f; }
};
// Of F4: E4M3, likewise, under the outer scale.
struct F4Scales {
  static constexpr bool kHasScales = true, kHasZeros = false, kHasFactor = true;
  static void Scale(const PackedMatrix& w, uint32_t tile, uint32_t group, V* to) {
    const uint8_t* from = static_cast<const uint8_t*>(w.scales) +
                          (static_cast<size_t>(tile) * w.num_groups + group) * kTile;
    for (uint32_t h = 0; h < kTileVectors; ++h) to[h] = VLoadF8(from + h * kLanes);
  }
  static float Factor(const PackedMatrix& w) { return 256.0f * w.outer_scale; }
};
// One k to a line: it is read as it is decoded.
struct OneColumn {
  static constexpr uint32_t kStep = 1;
  using Line = const uint8_t*;
  static Line Load(const uint8_t* p) { return p; }
  static uint32_t Column(uint32_t) { return 0; }
};
// Two k to a line, the second first.
template <typename Weights>
struct InPairs : Weights {
  static constexpr uint32_t kStep = 2, kLineBytes = 2 * Weights::kLineBytes;
  using Line = typename Weights::Line;
  static Line Load(const uint8_t* p) { return p + Weights::kLineBytes; }
  static uint32_t Column(uint32_t i) { return 1 - i; }
  static void Next(Line* line, V* w) {
    Weights::Next(line, w);
    *line -= Weights::kLineBytes;
  }
};
// Nibbles of a 32-bit lane from the lowest: k0, k0+4, k0+1, k0+5, ...
struct NibbleColumns {
  static constexpr uint32_t kStep = 8, kLineBytes = 64;
  static uint32_t Column(uint32_t i) { return i / 2 + i % 2 * 4; }
};

}  // namespace
}  // namespace cpu
}  // namespace plansmith
