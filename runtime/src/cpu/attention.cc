// SPDX-License-Identifier: Apache-2.0
#include "cpu/attention.h"

#include <math.h>
#include <string.h>

#include <algorithm>

namespace plansmith {
namespace cpu {

namespace {

// Items of a thread: enough that the last ones to end keep nobody waiting, and
// few, since the first unit of each is not fetched ahead (16 instead of 6: 20 %
// longer at 1024 positions). A tile of many queries takes longer to write its
// parts than one of few.
constexpr uint32_t kFewRowsItems = 6, kManyRowsItems = 4;
// Below that many queries a tile waits for memory, so rows are not spread over
// more tiles.
constexpr uint32_t kMinTileQueries = 12;
constexpr size_t kPartFloatsPerThread = 1 << 20;

uint32_t Up(uint32_t x, uint32_t by) { return (x + by - 1) / by; }

}  // namespace

AttentionWork::AttentionWork(uint32_t num_heads, const PlanHeader& model, int num_threads)
    : num_heads_(num_heads),
      num_kv_heads_(static_cast<uint32_t>(model.num_kv_heads)),
      head_dim_(static_cast<uint32_t>(model.head_dim)),
      heads_per_item_(std::min(num_heads / num_kv_heads_, kMaxAttentionQueries)),
      chunks_(Up(num_heads / num_kv_heads_, heads_per_item_)),
      num_threads_(static_cast<uint32_t>(num_threads)) {
  // A tile has at least one row, so a step has no more tiles than tokens.
  tiles_.resize(static_cast<size_t>(model.max_num_tokens));
  if (num_threads == 1) return;
  // Each tile of several runs has two shares of kFewRowsItems x threads.
  runs_left_ = std::make_unique<std::atomic<uint32_t>[]>(kFewRowsItems * num_threads_);
  parts_ = Pages(kPartFloatsPerThread * num_threads_ * sizeof(float), "parts of attention");
}

void AttentionWork::Set(const psm_batch& batch) {
  int32_t tile_rows = static_cast<int32_t>(kMaxAttentionQueries / heads_per_item_);
  CutIntoTiles(batch, tile_rows);
  // Threads that would have nothing to do get rows of others, which then read K
  // and V once more.
  const uint32_t wanted = num_threads_ == 1 ? 1 : kManyRowsItems * num_threads_;
  while (num_tiles_ < static_cast<size_t>(batch.num_tokens) && num_tiles_ * num_pairs() < wanted &&
         static_cast<uint32_t>(tile_rows) * heads_per_item_ >= 2 * kMinTileQueries) {
    tile_rows = (tile_rows + 1) / 2;
    CutIntoTiles(batch, tile_rows);
  }
  // Long ones first, so that no thread begins one when the others are done.
  std::sort(tiles_.begin(), tiles_.begin() + static_cast<ptrdiff_t>(num_tiles_),
            [](const Tile& a, const Tile& b) { return a.cost > b.cost; });
  CutIntoRuns();
}

void AttentionWork::CutIntoTiles(const psm_batch& batch, int32_t tile_rows) {
  num_tiles_ = 0;
  for (int32_t b = 0; b < batch.num_seqs; ++b) {
    const int32_t past = batch.kv_lens[b] - batch.query_lens[b];
    for (int32_t row = 0; row < batch.query_lens[b]; row += tile_rows) {
      const int32_t rows = std::min(tile_rows, batch.query_lens[b] - row);
      Tile& tile = tiles_[num_tiles_++];
      tile = {};
      tile.cost = static_cast<int64_t>(past + row + rows) * (rows + 2);
      tile.seq = b;
      tile.row = static_cast<uint32_t>(batch.cu_query_lens[b] + row);
      tile.num_rows = static_cast<uint32_t>(rows);
      tile.first_pos = past + row;
      tile.num_units = Up(static_cast<uint32_t>(past + row + rows), kAttentionUnit);
    }
  }
}

// A tile that takes much of the step is shared: as many runs as it has shares
// of the whole.
void AttentionWork::CutIntoRuns() {
  int64_t total = 0;
  for (size_t i = 0; i < num_tiles_; ++i) total += tiles_[i].cost * num_pairs();
  size_t used = 0;
  uint32_t num_counts = 0;
  num_items_ = 0;
  for (size_t i = 0; i < num_tiles_; ++i) {
    Tile& tile = tiles_[i];
    const uint32_t queries = tile.num_rows * heads_per_item_;
    const uint32_t shares =
        num_threads_ * (queries <= kMinTileQueries ? kFewRowsItems : kManyRowsItems);
    const size_t floats =
        num_pairs() * static_cast<size_t>(tile.num_units) * AttentionPartFloats(queries, head_dim_);
    tile.num_runs = 1;
    if (num_threads_ > 1 && used + floats <= kPartFloatsPerThread * num_threads_) {
      tile.num_runs = static_cast<uint32_t>(
          std::clamp<int64_t>(tile.cost * shares / total, 1, static_cast<int64_t>(tile.num_units)));
    }
    if (tile.num_runs > 1) {
      tile.first_part = used;
      used += floats;
      tile.first_count = num_counts;
      for (uint32_t p = 0; p < num_pairs(); ++p) {
        runs_left_[num_counts++].store(tile.num_runs, std::memory_order_relaxed);
      }
    }
    tile.first_item = num_items_;
    num_items_ += num_pairs() * tile.num_runs;
  }
}

AttentionPart AttentionWork::Run(void (*attend)(const AttentionArgs&), const psm_batch& batch,
                                 uint32_t idx, AttentionArgs args) const {
  const auto after =
      std::upper_bound(tiles_.begin(), tiles_.begin() + static_cast<ptrdiff_t>(num_tiles_), idx,
                       [](uint32_t item, const Tile& tile) { return item < tile.first_item; });
  const Tile& tile = *(after - 1);
  args.blocks = batch.block_table +
                static_cast<size_t>(tile.seq) * static_cast<size_t>(batch.block_table_stride);
  const uint32_t in_tile = idx - tile.first_item;
  const uint32_t pair = in_tile / tile.num_runs;
  if (!AttendRun(attend, tile, pair, in_tile % tile.num_runs, &args)) return {};
  return {tile.row, tile.num_rows,
          args.kv_head * (num_heads_ / num_kv_heads_) + pair % chunks_ * heads_per_item_,
          args.num_heads};
}

// Returns whether the pair's rows are complete.
bool AttentionWork::AttendRun(void (*attend)(const AttentionArgs&), const Tile& tile, uint32_t pair,
                              uint32_t run, AttentionArgs* args) const {
  const uint32_t group = num_heads_ / num_kv_heads_;
  const uint32_t first_head = pair % chunks_ * heads_per_item_;
  args->kv_head = pair / chunks_;
  args->num_heads = std::min(heads_per_item_, group - first_head);
  args->num_rows = tile.num_rows;
  args->first_pos = tile.first_pos;
  const size_t column = (args->kv_head * group + first_head) * args->head_dim;
  args->q += tile.row * args->q_stride + column;
  args->out += tile.row * args->out_stride + column;
  const uint32_t first =
      args->window > 0 && tile.first_pos >= args->window
          ? static_cast<uint32_t>(tile.first_pos - args->window + 1) / kAttentionUnit
          : 0;
  args->first_unit = first;
  args->end_unit = tile.num_units;
  args->parts = nullptr;
  args->join = false;
  if (tile.num_runs == 1) {
    attend(*args);
    return true;
  }
  const size_t part_floats = AttentionPartFloats(args->num_rows * args->num_heads, args->head_dim);
  const size_t pair_floats =
      tile.num_units * AttentionPartFloats(tile.num_rows * heads_per_item_, head_dim_);
  float* const parts = parts_.as<float>() + tile.first_part + pair * pair_floats;
  const uint64_t units = tile.num_units - first;
  const uint32_t begin = static_cast<uint32_t>(units * run / tile.num_runs);
  const uint32_t end = static_cast<uint32_t>(units * (run + 1) / tile.num_runs);
  args->first_unit = first + begin;
  args->end_unit = first + end;
  args->parts = parts + begin * part_floats;
  if (begin < end) attend(*args);
  std::atomic<uint32_t>& left = runs_left_[tile.first_count + pair];
  if (left.fetch_sub(1, std::memory_order_acq_rel) != 1) return false;
  left.store(tile.num_runs, std::memory_order_relaxed);
  args->first_unit = first;
  args->end_unit = tile.num_units;
  args->parts = parts;
  args->join = true;
  attend(*args);
  return true;
}

namespace {

// One head's K and V of one token into float pools, and into those of smaller
// values.
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
            static_cast<uint8_t*>(args.k_pool) + k_at * value_bytes);
    }
    if (v == nullptr) return;
    store(v, args.head_dim, args.v_scale, 1,
          static_cast<uint8_t*>(args.v_pool) + v_at * value_bytes);
  }
  const KvWriteArgs& args;
  void (*store)(const float* x, uint32_t n, float scale, size_t stride, void* out);
  size_t value_bytes;
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
    const CodeStore store = {args, kernels.store_kv[args.kv_format], KvValueBytes(args.kv_format)};
    WriteRows(store, args, places, row_begin, row_end);
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
