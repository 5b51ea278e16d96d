// Kernels for AMX: the other AVX-512 ones of the machine, but for products of int8 inputs of some
// rows. Compiled with those flags, called only where the machine has them.
//
// SPDX-License-Identifier: Apache-2.0
#include "cpu/simd_avx512.h"
// The vectors above come first: what follows is written over them.
#include "cpu/kernels_int_amx.h"

namespace plansmith {
namespace cpu {
namespace {

// Tiles cost the same for one row as for few: below this many, vectors are faster. (By arithmetic:
// a tile of m rows takes m cycles where 16 outputs of a row take 8 of VNNI's.)
constexpr uint32_t kMinRows = 4;

template <typename Weights, uint32_t kDType>
void LinearTiles(const LinearArgs& a, uint32_t row_begin, uint32_t row_end, uint32_t tile_begin,
                 uint32_t tile_end) {
  if (row_end - row_begin < kMinRows || TileLinear<Weights>::ChunkCols(a.w) == 0) {
    kAvx512VnniKernels.linear_int8[kDType](a, row_begin, row_end, tile_begin, tile_end);
  } else {
    TileLinear<Weights>(a).Run(row_begin, row_end, tile_begin, tile_end);
  }
}

void DotTiles(int64_t loops) {
  TileShapes shapes;
  for (uint32_t tile = 0; tile < 8; ++tile) shapes.Set(tile, kTileRows, kTileRowBytes);
  const Tiles tiles(shapes);
  for (int64_t i = 0; i < loops; ++i) {
    Tiles::Dot<0, kInputs, kWeights>();
    Tiles::Dot<1, kInputs, kWeights + 1>();
    Tiles::Dot<2, kInputs + 1, kWeights>();
    Tiles::Dot<3, kInputs + 1, kWeights + 1>();
  }
}

}  // namespace

const KernelTable& AmxKernels(const KernelTable& others) {
  static const KernelTable table = [&] {
    KernelTable t = others;
    t.name = "amx";
    t.linear_int8[kI8] = LinearTiles<TileI8, kI8>;
    t.linear_int8[kI4] = LinearTiles<TileI4, kI4>;
    t.dot_tiles = DotTiles;
    return t;
  }();
  return table;
}

}  // namespace cpu
}  // namespace plansmith
