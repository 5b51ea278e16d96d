// The draft executor's rounds as psm_batches: some positions of some sequences, over the target's
// block tables.
//
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <vector>

#include "plansmith/plansmith.h"
#include "request.h"

namespace plansmith {

// Positions [begin, end) of a request, all of whose tokens are known.
struct DraftRange {
  Request* request;
  int32_t begin;
  int32_t end;
};

// Keeps its arrays from round to round, so that packing allocates nothing.
class DraftBatch {
 public:
  DraftBatch(int32_t max_batch_size, int32_t max_num_tokens, int32_t max_blocks_per_seq) {
    const size_t seqs = static_cast<size_t>(max_batch_size);
    const size_t tokens = static_cast<size_t>(max_num_tokens);
    input_ids_.reserve(tokens);
    position_ids_.reserve(tokens);
    for (auto* array : {&query_lens_, &kv_lens_, &logits_rows_}) array->reserve(seqs);
    cu_query_lens_.reserve(seqs + 1);
    block_table_.reserve(seqs * static_cast<size_t>(max_blocks_per_seq));
  }

  // In the order given, which has those of several tokens first. A range that reaches its request's
  // last token gets a row of logits. Valid until the next call.
  const psm_batch& Build(const std::vector<DraftRange>& ranges, int32_t tokens_per_block) {
    for (auto* array : {&input_ids_, &position_ids_, &query_lens_, &kv_lens_, &logits_rows_})
      array->clear();
    cu_query_lens_.assign(1, 0);
    int32_t stride = 0;
    for (const DraftRange& r : ranges)
      stride = std::max(stride, (r.end + tokens_per_block - 1) / tokens_per_block);
    block_table_.assign(static_cast<size_t>(stride) * ranges.size(), -1);
    for (size_t row = 0; row < ranges.size(); ++row) {
      const DraftRange& r = ranges[row];
      // Not the whole table: it already has the blocks of the target's step.
      std::copy_n(r.request->kv.blocks.begin(), (r.end + tokens_per_block - 1) / tokens_per_block,
                  block_table_.begin() + static_cast<ptrdiff_t>(row) * stride);
      input_ids_.insert(input_ids_.end(), r.request->tokens.begin() + r.begin,
                        r.request->tokens.begin() + r.end);
      for (int32_t p = r.begin; p < r.end; ++p) position_ids_.push_back(p);
      query_lens_.push_back(r.end - r.begin);
      kv_lens_.push_back(r.end);
      cu_query_lens_.push_back(cu_query_lens_.back() + r.end - r.begin);
      if (r.end == r.request->num_tokens()) logits_rows_.push_back(cu_query_lens_.back() - 1);
    }
    batch_.struct_size = PSM_BATCH_SIZE;
    batch_.num_tokens = static_cast<int32_t>(input_ids_.size());
    batch_.num_seqs = static_cast<int32_t>(ranges.size());
    batch_.num_logits_rows = static_cast<int32_t>(logits_rows_.size());
    batch_.block_table_stride = stride;
    batch_.input_ids = input_ids_.data();
    batch_.position_ids = position_ids_.data();
    batch_.query_lens = query_lens_.data();
    batch_.kv_lens = kv_lens_.data();
    batch_.cu_query_lens = cu_query_lens_.data();
    batch_.block_table = block_table_.data();
    batch_.logits_rows = logits_rows_.data();
    batch_.adapter_slots = nullptr;  // adapters are the target's
    return batch_;
  }

 private:
  psm_batch batch_{};
  std::vector<int32_t> input_ids_, position_ids_, query_lens_, kv_lens_, cu_query_lens_,
      block_table_, logits_rows_;
};

}  // namespace plansmith
