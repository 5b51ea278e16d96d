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

// The rows of logits that one sequence in context gets in a step: those of the prompt that were
// asked for and are not out yet, [context_begin, context_end), and the one of its last token if it
// is not among them.
struct ContextRows {
  int32_t context_begin = 0;
  int32_t context_end = 0;
  bool reaches_last = false;  // the next token is drawn
  bool last_is_extra = false;

  ContextRows(const Request& request, int32_t begin, int32_t end) {
    if (request.wants_context_rows()) {
      context_begin = std::max(begin, request.num_context_rows);
      context_end = std::max(context_begin, std::min(end, request.num_prompt));
    }
    reaches_last = end == request.num_tokens();
    last_is_extra = reaches_last && (context_begin == context_end || context_end < end);
  }
};

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
    adapter_slots_.reserve(seqs);
    logits_rows_.reserve(tokens);
    // Address space only: pages that no step reaches are never touched.
    block_table_.reserve(seqs * static_cast<size_t>(max_blocks_per_seq));
  }

  // Context sequences first, then generation with its drafts, each in the plan's order. Valid until
  // the next call.
  const psm_batch& Build(const StepPlan& plan) {
    for (auto* array :
         {&input_ids_, &position_ids_, &query_lens_, &kv_lens_, &logits_rows_, &adapter_slots_})
      array->clear();
    cu_query_lens_.assign(1, 0);
    has_adapters_ = false;
    SizeBlockTable(plan);
    for (const ScheduledSeq& seq : plan.context) AddContext(seq);
    for (const ScheduledSeq& seq : plan.generation) AddGeneration(seq);
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
    batch_.adapter_slots = has_adapters_ ? adapter_slots_.data() : nullptr;
    return batch_;
  }

 private:
  static bool HasBeams(const Request& request) {
    return request.beams != nullptr && request.beams->running();
  }

  // The stride is the longest table of this step, not of the engine: short batches stay cheap to
  // fill and to copy.
  void SizeBlockTable(const StepPlan& plan) {
    size_t stride = 0, num_seqs = plan.context.size();
    for (const ScheduledSeq& seq : plan.context)
      stride = std::max(stride, seq.request->kv.blocks.size());
    for (const ScheduledSeq& seq : plan.generation) {
      num_seqs += static_cast<size_t>(seq.request->width());
      stride = std::max(stride, seq.request->kv.blocks.size());
      if (!HasBeams(*seq.request)) continue;
      for (const Beam& beam : seq.request->beams->beams())
        stride = std::max(stride, beam.kv.blocks.size());
    }
    batch_.block_table_stride = static_cast<int32_t>(stride);
    block_table_.assign(stride * num_seqs, -1);
  }

  void AddContext(const ScheduledSeq& seq) {
    const Request& request = *seq.request;
    const int32_t begin = request.num_computed;
    const int32_t end = begin + seq.num_tokens;
    const int32_t base = cu_query_lens_.back();
    AddTokens(request.tokens.data() + begin, begin, seq.num_tokens);
    const ContextRows rows(request, begin, end);
    for (int32_t p = rows.context_begin; p < rows.context_end; ++p)
      logits_rows_.push_back(base + p - begin);
    if (rows.last_is_extra) logits_rows_.push_back(base + seq.num_tokens - 1);
    EndSequence(request, request.kv, end);
  }

  void AddGeneration(const ScheduledSeq& seq) {
    const Request& request = *seq.request;
    const int32_t begin = request.num_computed;
    if (HasBeams(request)) {
      for (const Beam& beam : request.beams->beams()) {
        AddTokens(&beam.tokens.back(), begin, 1);
        logits_rows_.push_back(cu_query_lens_.back());
        EndSequence(request, beam.kv, begin + 1);
      }
      return;
    }
    const int32_t num_draft = static_cast<int32_t>(request.draft.size());
    AddTokens(&request.tokens.back(), begin, 1);
    AddTokens(request.draft.data(), begin + 1, num_draft);
    for (int32_t row = 0; row <= num_draft; ++row)
      logits_rows_.push_back(cu_query_lens_.back() + row);
    EndSequence(request, request.kv, begin + 1 + num_draft);
  }

  void AddTokens(const int32_t* tokens, int32_t position, int32_t n) {
    input_ids_.insert(input_ids_.end(), tokens, tokens + n);
    for (int32_t i = 0; i < n; ++i) position_ids_.push_back(position + i);
  }

  void EndSequence(const Request& request, const KvSequence& kv, int32_t kv_len) {
    const size_t row = query_lens_.size() * static_cast<size_t>(batch_.block_table_stride);
    std::copy(kv.blocks.begin(), kv.blocks.end(),
              block_table_.begin() + static_cast<ptrdiff_t>(row));
    const int32_t end = static_cast<int32_t>(input_ids_.size());
    query_lens_.push_back(end - cu_query_lens_.back());
    cu_query_lens_.push_back(end);
    kv_lens_.push_back(kv_len);
    adapter_slots_.push_back(request.adapter_slot);
    has_adapters_ = has_adapters_ || request.adapter_slot >= 0;
  }

  psm_batch batch_{};
  bool has_adapters_ = false;
  std::vector<int32_t> input_ids_, position_ids_, query_lens_, kv_lens_, cu_query_lens_,
      block_table_, logits_rows_, adapter_slots_;
};

}  // namespace plansmith
