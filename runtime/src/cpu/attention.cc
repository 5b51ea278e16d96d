// SPDX-License-Identifier: Apache-2.0
#include "cpu/attention.h"

#include <math.h>
#include <string.h>

#include <algorithm>

namespace plansmith {
namespace cpu {

AttentionWork::AttentionWork(uint32_t num_heads, const PlanHeader& model, int num_threads)
    : num_heads_(num_heads),
      num_kv_heads_(static_cast<uint32_t>(model.num_kv_heads)),
      min_items_(num_threads == 1 ? 1 : 4 * static_cast<uint32_t>(num_threads)) {
  // A tile has at least one row, so a step has no more tiles than tokens.
  tiles_.resize(static_cast<size_t>(model.max_num_tokens));
}

void AttentionWork::Set(const psm_batch& batch) {
  const uint32_t group = num_heads_ / num_kv_heads_;
  const uint32_t heads = std::min(group, kMaxAttentionQueries);
  const int32_t tile_rows = static_cast<int32_t>(kMaxAttentionQueries / heads);
  num_tiles_ = 0;
  for (int32_t b = 0; b < batch.num_seqs; ++b) {
    const int32_t past = batch.kv_lens[b] - batch.query_lens[b];
    for (int32_t row = 0; row < batch.query_lens[b]; row += tile_rows) {
      const int32_t rows = std::min(tile_rows, batch.query_lens[b] - row);
      tiles_[num_tiles_++] = {static_cast<int64_t>(past + row + rows) * (rows + 2), b,
                              static_cast<uint32_t>(batch.cu_query_lens[b] + row),
                              static_cast<uint32_t>(rows), past + row};
    }
  }
  // Long ones first, so that no thread begins one when the others are done.
  std::sort(tiles_.begin(), tiles_.begin() + static_cast<ptrdiff_t>(num_tiles_),
            [](const Tile& a, const Tile& b) { return a.cost > b.cost; });
  // With too few items for all threads, the heads of a group go to several of them, which then read
  // the same K and V.
  heads_per_item_ = heads;
  while (heads_per_item_ > 1 &&
         num_tiles_ * num_kv_heads_ * ((group + heads_per_item_ - 1) / heads_per_item_) <
             min_items_) {
    heads_per_item_ = (heads_per_item_ + 1) / 2;
  }
  items_per_tile_ = num_kv_heads_ * ((group + heads_per_item_ - 1) / heads_per_item_);
}

AttentionPart AttentionWork::Run(void (*attend)(const AttentionArgs&), const psm_batch& batch,
                                 uint32_t idx, AttentionArgs args) const {
  const Tile& tile = tiles_[idx / items_per_tile_];
  const uint32_t group = num_heads_ / num_kv_heads_;
  const uint32_t splits = items_per_tile_ / num_kv_heads_;
  const uint32_t in_tile = idx % items_per_tile_;
  const uint32_t first_head = in_tile % splits * heads_per_item_;
  args.kv_head = in_tile / splits;
  args.num_heads = std::min(heads_per_item_, group - first_head);
  args.num_rows = tile.num_rows;
  args.first_pos = tile.first_pos;
  args.blocks = batch.block_table +
                static_cast<size_t>(tile.seq) * static_cast<size_t>(batch.block_table_stride);
  const size_t column = (args.kv_head * group + first_head) * args.head_dim;
  args.q += tile.row * args.q_stride + column;
  args.out += tile.row * args.out_stride + column;
  attend(args);
  return {tile.row, tile.num_rows, args.kv_head * group + first_head, args.num_heads};
}

namespace {

// One head's K and V of one token into float pools, and into those of 8-bit codes.
struct FloatStore {
  void operator()(const float* k, const float* v, size_t k_at, size_t v_at) const {
    float* k_to = static_cast<float*>(args.k_pool) + k_at;
    for (size_t d = 0; k != nullptr && d < args.head_dim; ++d) k_to[d * args.block_size] = k[d];
    if (v == nullptr) return;
    memcpy(static_cast<float*>(args.v_pool) + v_at, v, args.head_dim * sizeof(float));
  }
  const KvWriteArgs& args;
};
struct CodeStore {
  void operator()(const float* k, const float* v, size_t k_at, size_t v_at) const {
    if (k != nullptr) {
      store(k, args.head_dim, args.k_scale, args.block_size,
            static_cast<uint8_t*>(args.k_pool) + k_at);
    }
    if (v == nullptr) return;
    store(v, args.head_dim, args.v_scale, 1, static_cast<uint8_t*>(args.v_pool) + v_at);
  }
  const KvWriteArgs& args;
  void (*store)(const float* x, uint32_t n, float scale, size_t stride, uint8_t* out);
};

bool HasNan(const float* x, size_t n) {
  bool found = false;
  for (size_t i = 0; i < n; ++i) found |= x[i] != x[i];
  return found;
}

template <typename Store>
void WriteRows(const Store& store, const KvWriteArgs& args, const BatchPlaces& places,
               uint32_t row_begin, uint32_t row_end) {
  const size_t dim = args.head_dim, size = args.block_size;
  for (uint32_t row = row_begin; row < row_end; ++row) {
    const KvPlace place = places.place(row);
    for (uint32_t h = 0; h < args.num_kv_heads; ++h) {
      const size_t head = place.block * args.block_stride + h * size * dim;
      store(args.k == nullptr ? nullptr : args.k + row * args.k_stride + h * dim,
            args.v == nullptr ? nullptr : args.v + row * args.v_stride + h * dim,
            head + place.offset, head + place.offset * dim);
    }
  }
}

}  // namespace

void WriteKv(const KernelTable& kernels, const KvWriteArgs& args, const BatchPlaces& places,
             uint32_t row_begin, uint32_t row_end) {
  if (args.kv_format == kKvF32) {
    WriteRows(FloatStore{args}, args, places, row_begin, row_end);
  } else {
    WriteRows(CodeStore{args, kernels.store_kv[args.kv_format]}, args, places, row_begin, row_end);
    if (args.kv_format != kKvI8) return;
    const size_t width = static_cast<size_t>(args.num_kv_heads) * args.head_dim;
    for (uint32_t row = row_begin; row < row_end; ++row) {
      if (HasNan(args.k + row * args.k_stride, width) ||
          HasNan(args.v + row * args.v_stride, width)) {
        args.q[row * args.q_stride] = NAN;
      }
    }
  }
}

}  // namespace cpu
}  // namespace plansmith
