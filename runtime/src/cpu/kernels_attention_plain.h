// A unit of codes as floats: a tile of many queries reads it many times, and decodes it once.
// The same floats meet in the same order, so the results have the same bits.
//
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "cpu/kernels_attention_unit.h"

namespace plansmith {
namespace cpu {
namespace {

struct PlainUnit {
  AttentionArgs args;  // as if the unit were the first and only block of a sequence
  float* k;            // [D][kAttentionUnit]
  float* v;            // [kAttentionUnit][D]
  Unit<float> unit;
};

// `scratch` holds 2 * kAttentionUnit * D floats and two vectors: rows are written in whole vectors.
inline PlainUnit StartPlain(const AttentionArgs& a, float* scratch) {
  static const int32_t kFirst = 0;
  PlainUnit p;
  p.k = scratch;
  p.v = p.k + static_cast<size_t>(kAttentionUnit) * a.head_dim + kLanes;
  p.args = a;
  p.args.k_pool = p.k;
  p.args.v_pool = p.v;
  p.args.blocks = &kFirst;
  p.args.block_stride = 0;
  p.args.block_size = kAttentionUnit;
  p.args.kv_head = 0;
  return p;
}

// The first n positions. What a row's last vector has too much is overwritten by the next row's.
template <typename T>
inline void Decode(const AttentionArgs& a, const Unit<T>& unit, uint32_t n, PlainUnit* p) {
  for (uint32_t d = 0; d < a.head_dim; ++d) {
    for (uint32_t i = 0; i < unit.num_pieces; ++i) {
      const Piece<T>& piece = unit.pieces[i];
      VStore(p->k + d * kAttentionUnit + piece.offset,
             LoadKv(piece.k + static_cast<size_t>(d) * a.block_size));
    }
  }
  for (uint32_t i = 0; i < unit.num_pieces; ++i) {
    const Piece<T>& piece = unit.pieces[i];
    const uint32_t end = i + 1 < unit.num_pieces ? unit.pieces[i + 1].offset : n;
    for (uint32_t j = piece.offset; j < end; ++j) {
      const T* from = piece.v + static_cast<size_t>(j - piece.offset) * a.head_dim;
      for (uint32_t d = 0; d < a.head_dim; d += kLanes)
        VStore(p->v + j * a.head_dim + d, LoadKv(from + d));
    }
  }
  FindPieces(p->args, 0, n, &p->unit);
}

}  // namespace
}  // namespace cpu
}  // namespace plansmith
