// Cuts a matrix product into blocks that fit in registers. Private to the file that includes it.
//
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "cpu/kernels.h"

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
  if constexpr (NT > 1) {
    if (tile < tile_end) RunTiles<Block, NT - 1>(args, row_begin, row_end, tile, tile_end);
  }
}

template <typename Block>
void Linear(const LinearArgs& args, uint32_t row_begin, uint32_t row_end, uint32_t tile_begin,
            uint32_t tile_end) {
  if (row_end - row_begin == 1) {
    // One row is bound by reading the weights, which is fastest as one stream.
    RunTiles<Block, 1>(args, row_begin, row_end, tile_begin, tile_end);
  } else {
    RunTiles<Block>(args, row_begin, row_end, tile_begin, tile_end);
  }
}

}  // namespace
}  // namespace cpu
}  // namespace plansmith
