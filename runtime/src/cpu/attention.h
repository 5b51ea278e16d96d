// The work of one step's attention, cut into items that threads take one by one.
//
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <vector>

#include "cpu/batch.h"
#include "cpu/kernels.h"

namespace plansmith {
namespace cpu {

// Heads [head, head + num_heads) of rows [row, row + num_rows) of the output.
struct AttentionPart {
  uint32_t row, num_rows, head, num_heads;
};

// The cut for ops with `num_heads` query heads; made once a step, used by all layers. It decides
// who computes what, never what comes out.
class AttentionWork {
 public:
  AttentionWork(uint32_t num_heads, const PlanHeader& model, int num_threads);

  void Set(const psm_batch& batch);

  uint32_t num_heads() const { return num_heads_; }
  uint32_t num_items() const { return static_cast<uint32_t>(num_tiles_) * items_per_tile_; }

  // Whether every item holds whole multiples of `cols` of its op's output columns.
  bool HoldsWhole(uint32_t cols, uint32_t head_dim) const {
    return heads_per_item_ * head_dim % cols == 0 &&
           num_heads_ / num_kv_heads_ * head_dim % cols == 0;
  }

  // Attends item `idx` with a kernel of KernelTable.attend. `args` holds the op's pool, views and
  // numbers; q and out point to row 0. Returns what is complete in `out` now.
  AttentionPart Run(void (*attend)(const AttentionArgs&), const psm_batch& batch, uint32_t idx,
                    AttentionArgs args) const;

 private:
  struct Tile {
    int64_t cost;
    int32_t seq;
    uint32_t row;  // first row in the step
    uint32_t num_rows;
    int32_t first_pos;
  };
  const uint32_t num_heads_;
  const uint32_t num_kv_heads_;
  const uint32_t min_items_;
  uint32_t heads_per_item_ = 1;
  uint32_t items_per_tile_ = 1;
  size_t num_tiles_ = 0;
  std::vector<Tile> tiles_;
};

// Rows of k and v ([rows][stride], KVH * D columns) and the pools of one layer that they go to.
struct KvWriteArgs {
  const float* k;
  size_t k_stride;
  const float* v;
  size_t v_stride;
  uint32_t kv_format;      // KvFormat of the pools
  float k_scale, v_scale;  // of F8 and I8
  void* k_pool;            // of block 0 and this layer: [KVH][D][BS]
  void* v_pool;            // [KVH][BS][D]
  size_t block_stride;     // values from one block to the next
  // int8 has no NaN: with I8 pools a token whose k or v holds one gets it into its q, so that its
  // logits tell. Row 0.
  float* q;
  size_t q_stride;
  uint32_t num_kv_heads;
  uint32_t head_dim;
  uint32_t block_size;
};
// Writes rows [row_begin, row_end). k or v may be null: then only the other is written.
void WriteKv(const KernelTable& kernels, const KvWriteArgs& args, const BatchPlaces& places,
             uint32_t row_begin, uint32_t row_end);

// Bytes of a value of a pool.
constexpr size_t KvValueBytes(uint32_t kv_format) {
  return kv_format == kKvF32 ? sizeof(float) : 1;
}

}  // namespace cpu
}  // namespace plansmith
