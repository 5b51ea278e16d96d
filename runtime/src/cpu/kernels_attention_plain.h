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
  KvHead<float> head;  // as if the unit were the first and only block of a sequence
  float* k;            // [D][kAttentionUnit]
  float* v;            // [kAttentionUnit][D]
  Unit<float> unit;
};

// `scratch` holds 2 * kAttentionUnit * D floats and two vectors: rows are written in whole vectors.
inline void StartPlain(const AttentionArgs& a, float* scratch, PlainUnit* p) {
  static const int32_t kFirst = 0;
  p->k = scratch;
  p->v = p->k + static_cast<size_t>(kAttentionUnit) * a.head_dim + 16;
  p->head = {p->k, p->v, 0, &kFirst, kAttentionUnit, 0, a.head_dim};
  p->head.block_shift = static_cast<uint32_t>(__builtin_ctz(kAttentionUnit));
}

// The first n positions. What a row's last vector has too much is overwritten by the next row's.
template <typename T>
inline void Decode(const KvHead<T>& head, const Unit<T>& unit, uint32_t n, PlainUnit* p) {
  for (uint32_t i = 0; i < unit.num_pieces; ++i) {
    const Piece<T>& piece = unit.pieces[i];
    // Pieces shorter than a vector: the next one's values come behind.
    for (uint32_t d = 0; d < head.head_dim; ++d) {
      const V v = LoadKv(piece.k + static_cast<size_t>(d) * head.block_size);
      float* to = p->k + static_cast<size_t>(d) * kAttentionUnit + piece.offset;
      const uint32_t room = kAttentionUnit - piece.offset;
      if (room < kLanes) {
        VStorePart(to, v, room);
      } else {
        VStore(to, v);
      }
    }
    const uint32_t end = i + 1 < unit.num_pieces ? unit.pieces[i + 1].offset : n;
    for (uint32_t j = piece.offset; j < end; ++j) {
      const T* from = piece.v + static_cast<size_t>(j - piece.offset) * head.head_dim;
      for (uint32_t d = 0; d < head.head_dim; d += kLanes) {
        VStore(p->v + static_cast<size_t>(j) * head.head_dim + d, LoadKv(from + d));
      }
    }
  }
  FindPieces(p->head, 0, n, &p->unit);
}

}  // namespace
}  // namespace cpu
}  // namespace plansmith
