// KV blocks copied within the pool, and to and from host blocks: a second pool, for what the first
// has no room to keep.
//
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstddef>
#include <cstdint>

#include "cpu/pages.h"
#include "plansmith/plansmith.h"

namespace plansmith {
namespace cpu {

// How a block lies in memory: [layers][K, V], K as [KVH][D][BS], V as [KVH][BS][D], values of
// value_bytes each.
struct BlockLayout {
  size_t num_layers, num_kv_heads, head_dim, block_size, value_bytes;
  size_t layer_values() const { return num_kv_heads * head_dim * block_size; }  // of K alone
  size_t values() const { return 2 * layer_values() * num_layers; }
  size_t bytes() const { return values() * value_bytes; }
};

// Copies the first `num_tokens` positions, all layers. A whole block is one piece; of fewer
// positions K is num_tokens values in each row of BS, V one piece a head.
void CopyPositions(const BlockLayout& layout, const uint8_t* src, size_t num_tokens, uint8_t* dst);

// The device pool is borrowed, the host pool owned.
class BlockCopier {
 public:
  BlockCopier(const BlockLayout& layout, uint8_t* pool, int32_t num_blocks)
      : layout_(layout), pool_(pool), num_blocks_(num_blocks) {}

  // Once. Pages that no copy reaches are never touched. Throws INVALID_ARGUMENT, OUT_OF_MEMORY.
  void OpenHost(int32_t num_blocks);
  // In order. All are checked before the first is made; throws INVALID_ARGUMENT naming the one that
  // is wrong.
  void Copy(const psm_block_copy* copies, size_t num_copies);

 private:
  struct Side {
    uint8_t* base;
    int32_t num_blocks;
    const char* name;
  };
  Side Source(const psm_block_copy& copy) const;
  Side Target(const psm_block_copy& copy) const;
  void Check(const psm_block_copy& copy, size_t idx) const;

  const BlockLayout layout_;
  uint8_t* const pool_;
  const int32_t num_blocks_;
  Pages host_;
  int32_t num_host_blocks_ = 0;
};

}  // namespace cpu
}  // namespace plansmith
