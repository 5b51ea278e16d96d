// The tile registers of AMX and what is done with them, as instructions: GCC's own header tells the
// compiler of less memory than they read, so what was stored before might come too late.
//
// A thread has eight tiles of up to 16 rows x 64 bytes. For kernels_amx.cc only: everything is
// private to the file that includes it.
//
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <stddef.h>
#include <stdint.h>

namespace plansmith {
namespace cpu {
namespace {

constexpr uint32_t kTileRows = 16, kTileRowBytes = 64;

// What ldtilecfg reads: the shape of each tile.
struct alignas(64) TileShapes {
  uint8_t palette = 1;
  uint8_t start_row = 0;
  uint8_t reserved[14] = {};
  uint16_t row_bytes[16] = {};
  uint8_t rows[16] = {};

  void Set(uint32_t tile, uint32_t num_rows, uint32_t bytes) {
    rows[tile] = static_cast<uint8_t>(num_rows);
    row_bytes[tile] = static_cast<uint16_t>(bytes);
  }
};
static_assert(sizeof(TileShapes) == 64, "as the processor reads it");

// A thread's tiles while this lives, all zero at first. Without them the thread's state is small
// again: a switch to another thread saves no tiles.
class Tiles {
 public:
  explicit Tiles(const TileShapes& shapes) { asm volatile("ldtilecfg %0" : : "m"(shapes)); }
  ~Tiles() { asm volatile("tilerelease" : :); }
  Tiles(const Tiles&) = delete;
  Tiles& operator=(const Tiles&) = delete;

  template <int kTo>
  static void Zero() {
    asm volatile("tilezero %%tmm%c0" : : "i"(kTo));
  }
  // Rows lie `stride` bytes apart.
  template <int kTo>
  static void Load(const void* from, size_t stride) {
    asm volatile("tileloadd (%0,%1,1), %%tmm%c2" : : "r"(from), "r"(stride), "i"(kTo) : "memory");
  }
  template <int kFrom>
  static void Store(void* to, size_t stride) {
    asm volatile("tilestored %%tmm%c2, (%0,%1,1)" : : "r"(to), "r"(stride), "i"(kFrom) : "memory");
  }
  // sum[m][n] += a[m][4 k + j] * b[k][4 n + j] over k and j, of signed bytes, in int32.
  template <int kSum, int kA, int kB>
  static void Dot() {
    asm volatile("tdpbssd %%tmm%c2, %%tmm%c1, %%tmm%c0" : : "i"(kSum), "i"(kA), "i"(kB));
  }
};

}  // namespace
}  // namespace cpu
}  // namespace plansmith
