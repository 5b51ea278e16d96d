// A step plan as the psm_batch that an executor takes.
//
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <algorithm>
#include <cstdint>

#include "lazy_array.h"
#include "plansmith/plansmith.h"
#include "sampler.h"
#include "scheduler.h"
#include "status.h"

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

// Keeps its arrays from step to step, so that packing allocates nothing. Written by index: with
// 2048 sequences, appending to vectors took more time than all the rest of planning.
class BatchBuilder {
 public:
  // with_candidates: the executor gives psm_batch.candidates. The block table and the candidates
  // are address space only: pages that no step reaches are never touched.
  BatchBuilder(int32_t max_batch_size, int32_t max_num_tokens, int32_t max_blocks_per_seq,
               bool with_candidates)
      : BatchBuilder(static_cast<size_t>(max_batch_size), static_cast<size_t>(max_num_tokens),
                     static_cast<size_t>(max_blocks_per_seq), with_candidates) {}

  // Context sequences first, then generation, each in the plan's order and with its drafts. Valid
  // until the next call.
  const psm_batch& Build(const StepPlan& plan) {
    num_tokens_ = num_seqs_ = num_rows_ = 0;
    has_adapters_ = false;
    batch_.num_candidates = 0;
    Measure(plan);
    for (const ScheduledSeq& seq : plan.context) AddContext(seq);
    for (const ScheduledSeq& seq : plan.generation) AddGeneration(seq);
    batch_.num_tokens = static_cast<int32_t>(num_tokens_);
    batch_.num_seqs = static_cast<int32_t>(num_seqs_);
    batch_.num_logits_rows = static_cast<int32_t>(num_rows_);
    batch_.adapter_slots = has_adapters_ ? &adapter_slots_[0] : nullptr;
    return batch_;
  }

 private:
  BatchBuilder(size_t seqs, size_t tokens, size_t blocks, bool with_candidates)
      : input_ids_(tokens, "a step's tokens"),
        position_ids_(tokens, "a step's positions"),
        logits_rows_(tokens, "a step's rows"),
        query_lens_(seqs, "a step's sequences"),
        kv_lens_(seqs, "a step's sequences"),
        cu_query_lens_(seqs + 1, "a step's sequences"),
        adapter_slots_(seqs, "a step's sequences"),
        block_table_(seqs * blocks, "a step's block table"),
        candidates_(with_candidates ? tokens * PSM_MAX_CANDIDATES : 0, "a step's candidates") {
    batch_.struct_size = PSM_BATCH_SIZE;
    batch_.input_ids = &input_ids_[0];
    batch_.position_ids = &position_ids_[0];
    batch_.query_lens = &query_lens_[0];
    batch_.kv_lens = &kv_lens_[0];
    batch_.cu_query_lens = &cu_query_lens_[0];
    batch_.block_table = &block_table_[0];
    batch_.logits_rows = &logits_rows_[0];
    batch_.candidates = with_candidates ? &candidates_[0] : nullptr;
  }

  static bool HasBeams(const Request& request) {
    return request.beams != nullptr && request.beams->running();
  }

  // The stride is the longest table of this step, not of the engine: short batches stay cheap to
  // fill and to copy. A plan beyond the limits would write past the arrays.
  void Measure(const StepPlan& plan) {
    size_t stride = 0, num_seqs = plan.context.size(), num_tokens = 0;
    for (const ScheduledSeq& seq : plan.context) {
      num_tokens += static_cast<size_t>(seq.num_tokens) + seq.request->draft.size();
      stride = std::max(stride, seq.request->kv.blocks.size());
    }
    for (const ScheduledSeq& seq : plan.generation) {
      const size_t width = static_cast<size_t>(seq.request->width());
      num_seqs += width;
      num_tokens += width + seq.request->draft.size();
      stride = std::max(stride, seq.request->kv.blocks.size());
      if (!HasBeams(*seq.request)) continue;
      for (const Beam& beam : seq.request->beams->beams())
        stride = std::max(stride, beam.kv.blocks.size());
    }
    if (num_seqs > query_lens_.size() || num_tokens > input_ids_.size() ||
        stride * num_seqs > block_table_.size()) {
      throw StatusError(PSM_ERROR_INTERNAL,
                        Format("a step of %zu sequences, %zu tokens and %zu blocks each is beyond "
                               "the engine's limits",
                               num_seqs, num_tokens, stride));
    }
    batch_.block_table_stride = static_cast<int32_t>(stride);
  }

  void AddContext(const ScheduledSeq& seq) {
    const Request& request = *seq.request;
    const int32_t begin = request.num_computed;
    const int32_t end = begin + seq.num_tokens;
    const int32_t base = static_cast<int32_t>(num_tokens_);
    AddTokens(request.tokens.data() + begin, begin, seq.num_tokens);
    const ContextRows rows(request, begin, end);
    for (int32_t p = rows.context_begin; p < rows.context_end; ++p) AddRow(base + p - begin);
    if (rows.last_is_extra) AddRow(base + seq.num_tokens - 1);
    if (rows.reaches_last) WantCandidates(request);
    const int32_t num_draft = static_cast<int32_t>(request.draft.size());
    AddTokens(request.draft.data(), end, num_draft);
    for (int32_t i = 0; i < num_draft; ++i) AddRow(base + seq.num_tokens + i);
    EndSequence(request, request.kv, end + num_draft, base);
  }

  void AddGeneration(const ScheduledSeq& seq) {
    const Request& request = *seq.request;
    const int32_t begin = request.num_computed;
    int32_t base = static_cast<int32_t>(num_tokens_);
    if (HasBeams(request)) {
      for (const Beam& beam : request.beams->beams()) {
        AddTokens(&beam.tokens.back(), begin, 1);
        AddRow(base);
        EndSequence(request, beam.kv, begin + 1, base++);
      }
      return;
    }
    WantCandidates(request);
    const int32_t num_draft = static_cast<int32_t>(request.draft.size());
    AddTokens(&request.last_token, begin, 1);
    AddTokens(request.draft.data(), begin + 1, num_draft);
    for (int32_t row = 0; row <= num_draft; ++row) AddRow(base + row);
    EndSequence(request, request.kv, begin + 1 + num_draft, base);
  }

  void AddTokens(const int32_t* tokens, int32_t position, int32_t n) {
    for (int32_t i = 0; i < n; ++i, ++num_tokens_) {
      input_ids_[num_tokens_] = tokens[i];
      position_ids_[num_tokens_] = position + i;
    }
  }

  void WantCandidates(const Request& request) {
    if (batch_.candidates == nullptr) return;
    batch_.num_candidates = std::max(batch_.num_candidates, Sampler::CandidatesFor(request));
  }

  void AddRow(int32_t row) { logits_rows_[num_rows_++] = row; }

  void EndSequence(const Request& request, const KvSequence& kv, int32_t kv_len, int32_t base) {
    const size_t stride = static_cast<size_t>(batch_.block_table_stride);
    int32_t* row = &block_table_[num_seqs_ * stride];
    std::fill(std::copy(kv.blocks.begin(), kv.blocks.end(), row), row + stride, -1);
    query_lens_[num_seqs_] = static_cast<int32_t>(num_tokens_) - base;
    kv_lens_[num_seqs_] = kv_len;
    adapter_slots_[num_seqs_] = request.adapter_slot;
    has_adapters_ = has_adapters_ || request.adapter_slot >= 0;
    cu_query_lens_[++num_seqs_] = static_cast<int32_t>(num_tokens_);
  }

  psm_batch batch_{};
  bool has_adapters_ = false;
  size_t num_tokens_ = 0, num_seqs_ = 0, num_rows_ = 0;
  LazyArray<int32_t> input_ids_, position_ids_, logits_rows_;  // [max_num_tokens]
  LazyArray<int32_t> query_lens_, kv_lens_, cu_query_lens_, adapter_slots_, block_table_;
  LazyArray<psm_candidate> candidates_;
};

}  // namespace plansmith
