// A step plan as the psm_batch that an executor takes.
//
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <algorithm>
#include <cstdint>
#include <vector>

#include "plansmith/plansmith.h"
#include "scheduler.h"

namespace plansmith {

// Keeps its arrays from step to step, so that packing allocates nothing.
class BatchBuilder {
 public:
  BatchBuilder(int32_t max_batch_size, int32_t max_num_tokens, int32_t max_blocks_per_seq) {
    const size_t seqs = static_cast<size_t>(max_batch_size);
    const size_t tokens = static_cast<size_t>(max_num_tokens);
    input_ids_.reserve(tokens);
    position_ids_.reserve(tokens);
    query_lens_.reserve(seqs);
    kv_lens_.reserve(seqs);
    cu_query_lens_.reserve(seqs + 1);
    logits_rows_.reserve(seqs);
    // Address space only: pages that no step reaches are never touched.
    block_table_.reserve(seqs * static_cast<size_t>(max_blocks_per_seq));
  }

  // Context sequences first, then generation, each in the plan's order. A sequence gets a row of
  // logits when the step reaches its last token. Valid until the next call.
  const psm_batch& Build(const StepPlan& plan) {
    for (auto* array : {&input_ids_, &position_ids_, &query_lens_, &kv_lens_, &logits_rows_})
      array->clear();
    cu_query_lens_.assign(1, 0);
    SizeBlockTable(plan);
    for (const ScheduledSeq& seq : plan.context) Add(seq);
    for (const ScheduledSeq& seq : plan.generation) Add(seq);
    batch_.struct_size = PSM_BATCH_SIZE;
    batch_.num_tokens = static_cast<int32_t>(input_ids_.size());
    batch_.num_seqs = static_cast<int32_t>(query_lens_.size());
    batch_.num_logits_rows = static_cast<int32_t>(logits_rows_.size());
    batch_.input_ids = input_ids_.data();
    batch_.position_ids = position_ids_.data();
    batch_.query_lens = query_lens_.data();
    batch_.kv_lens = kv_lens_.data();
    batch_.cu_query_lens = cu_query_lens_.data();
    batch_.block_table = block_table_.data();
    batch_.logits_rows = logits_rows_.data();
    return batch_;
  }

 private:
  // The stride is the longest table of this step, not of the engine: short batches stay cheap to
  // fill and to copy.
  void SizeBlockTable(const StepPlan& plan) {
    size_t stride = 0;
    for (const auto* seqs : {&plan.context, &plan.generation}) {
      for (const ScheduledSeq& seq : *seqs)
        stride = std::max(stride, seq.request->kv.blocks.size());
    }
    batch_.block_table_stride = static_cast<int32_t>(stride);
    block_table_.assign(stride * (plan.context.size() + plan.generation.size()), -1);
  }

  void Add(const ScheduledSeq& seq) {
    const Request& request = *seq.request;
    const int32_t begin = request.num_computed;
    const int32_t end = begin + seq.num_tokens;
    const size_t row = query_lens_.size();
    std::copy(request.kv.blocks.begin(), request.kv.blocks.end(),
              block_table_.begin() +
                  static_cast<ptrdiff_t>(row * static_cast<size_t>(batch_.block_table_stride)));
    input_ids_.insert(input_ids_.end(), request.tokens.begin() + begin,
                      request.tokens.begin() + end);
    for (int32_t p = begin; p < end; ++p) position_ids_.push_back(p);
    query_lens_.push_back(seq.num_tokens);
    kv_lens_.push_back(end);
    cu_query_lens_.push_back(cu_query_lens_.back() + seq.num_tokens);
    if (end == request.num_tokens()) logits_rows_.push_back(cu_query_lens_.back() - 1);
  }

  psm_batch batch_{};
  std::vector<int32_t> input_ids_, position_ids_, query_lens_, kv_lens_, cu_query_lens_,
      block_table_, logits_rows_;
};

}  // namespace plansmith
