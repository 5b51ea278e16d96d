// The work of one step's attention, cut into items that threads take one by one.
//
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <vector>

#include "cpu/batch.h"
#include "cpu/kernels.h"
#include "cpu/pages.h"

namespace plansmith {
namespace cpu {

// Heads [head, head + num_heads) of rows [row, row + num_rows) of the output.
struct AttentionPart {
  uint32_t row, num_rows, head, num_heads;
};

// The cut for ops with `num_heads` query heads; made once a step, used by all layers. It decides
// who computes what, never what comes out.
//
// An item is a tile (rows of a sequence) x a KV head x a run of units of the context. Where there
// is more than one run, they write the units' parts, and whoever ends the last run joins them.
class AttentionWork {
 public:
  AttentionWork(uint32_t num_heads, const PlanHeader& model, int num_threads);

  void Set(const psm_batch& batch);

  uint32_t num_heads() const { return num_heads_; }
  uint32_t num_items() const { return num_items_; }

  // Whether every item holds whole multiples of `cols` of its op's output columns.
  bool HoldsWhole(uint32_t cols, uint32_t head_dim) const {
    return heads_per_item_ * head_dim % cols == 0 &&
           num_heads_ / num_kv_heads_ * head_dim % cols == 0;
  }

  // Attends item `idx` with a kernel of KernelTable.attend. `args` holds the op's pool, views and
  // numbers; q and out point to row 0. Any thread; every item once, before an item of the next op.
  // Returns what is complete in `out` now, by this item and those before it: no rows where other
  // runs are still missing.
  AttentionPart Run(void (*attend)(const AttentionArgs&), const psm_batch& batch, uint32_t idx,
                    AttentionArgs args) const;

 private:
  struct Tile {
    int64_t cost;  // of one KV head
    int32_t seq;
    uint32_t row;  // first row in the step
    uint32_t num_rows;
    int32_t first_pos;
    uint32_t num_units;  // of the whole context
    uint32_t num_runs;   // that they go to
    uint32_t first_item;
    uint32_t first_count;  // of runs_left_, where there are several runs
    size_t first_part;     // float of parts_
  };
  // KV heads of a tile, or parts of their groups.
  uint32_t num_pairs() const { return num_kv_heads_ * chunks_; }
  void CutIntoTiles(const psm_batch& batch, int32_t tile_rows);
  void CutIntoRuns();
  bool AttendRun(void (*attend)(const AttentionArgs&), const Tile& tile, uint32_t pair,
                 uint32_t run, AttentionArgs* args) const;

  const uint32_t num_heads_;
  const uint32_t num_kv_heads_;
  const uint32_t head_dim_;
  const uint32_t heads_per_item_;
  const uint32_t chunks_;  // of a group's heads
  const uint32_t num_threads_;
  uint32_t num_items_ = 0;
  size_t num_tiles_ = 0;
  std::vector<Tile> tiles_;
  std::unique_ptr<std::atomic<uint32_t>[]> runs_left_;  // [pairs of tiles of several runs]
  Pages parts_;
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
  return KvHasScales(kv_format) ? 1 : kv_format == kKvF16 ? 2 : sizeof(float);
}

}  // namespace cpu
}  // namespace plansmith
