// Runs an Executor over a few sequences, each with blocks of its own.
//
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <vector>

#include "check.h"
#include "cpu/executor.h"

namespace plansmith {
namespace cpu {

// The arrays of a step. All sequences are as long as the model allows.
class Steps {
 public:
  Steps(const psm_model_info& info, int32_t num_seqs)
      : info_(info),
        num_columns_((info.max_seq_len - 1) / info.tokens_per_block + 1),
        done_(static_cast<size_t>(num_seqs)) {
    // All that a step needs is there before it.
    const size_t rows = static_cast<size_t>(info.max_num_tokens), n = done_.size();
    for (auto* v : {&ids_, &positions_, &logits_rows_}) v->reserve(rows);
    for (auto* v : {&query_lens_, &kv_lens_}) v->reserve(n);
    cu_.reserve(n + 1);
    table_.reserve(n * static_cast<size_t>(num_columns_));
    candidates_.resize(n * PSM_MAX_CANDIDATES);
  }

  int32_t num_blocks() const { return num_columns_ * static_cast<int32_t>(done_.size()); }
  int32_t done(size_t seq) const { return done_[seq]; }
  // How many candidates of each row the next steps want; needs PSM_SAMPLES_CANDIDATES.
  void WantCandidates(int32_t num) { num_candidates_ = num; }
  void Rewind(size_t seq, int32_t done) { done_[seq] = done; }

  // The next counts[i] tokens of sequence i, their ids a function of `seed`; logits of the last of
  // each, or of none.
  const psm_batch& Next(const std::vector<int32_t>& counts, uint32_t seed, bool with_logits) {
    for (auto* v : {&ids_, &positions_, &query_lens_, &kv_lens_, &table_, &logits_rows_}) {
      v->clear();
    }
    cu_.assign(1, 0);
    for (size_t i = 0; i < counts.size(); ++i) {
      if (counts[i] == 0) continue;
      for (int32_t t = 0; t < counts[i]; ++t) {
        seed = seed * 1664525u + 1013904223u;
        ids_.push_back(static_cast<int32_t>((seed >> 8) % static_cast<uint32_t>(info_.vocab_size)));
        positions_.push_back(done_[i]++);
      }
      query_lens_.push_back(counts[i]);
      kv_lens_.push_back(done_[i]);
      cu_.push_back(cu_.back() + counts[i]);
      for (int32_t c = 0; c < num_columns_; ++c) {
        table_.push_back(static_cast<int32_t>(i) + c * static_cast<int32_t>(done_.size()));
      }
      if (with_logits) logits_rows_.push_back(static_cast<int32_t>(ids_.size()) - 1);
    }
    batch_.struct_size = PSM_BATCH_SIZE;
    batch_.num_tokens = static_cast<int32_t>(ids_.size());
    batch_.num_seqs = static_cast<int32_t>(query_lens_.size());
    batch_.num_logits_rows = static_cast<int32_t>(logits_rows_.size());
    batch_.block_table_stride = num_columns_;
    batch_.input_ids = ids_.data();
    batch_.position_ids = positions_.data();
    batch_.query_lens = query_lens_.data();
    batch_.kv_lens = kv_lens_.data();
    batch_.cu_query_lens = cu_.data();
    batch_.block_table = table_.data();
    batch_.logits_rows = logits_rows_.data();
    batch_.num_candidates = num_candidates_;
    batch_.candidates = candidates_.data();
    return batch_;
  }

 private:
  const psm_model_info info_;
  const int32_t num_columns_;
  std::vector<int32_t> done_;
  std::vector<int32_t> ids_, positions_, query_lens_, kv_lens_, cu_, table_, logits_rows_;
  int32_t num_candidates_ = 0;
  std::vector<psm_candidate> candidates_;  // [R, num_candidates_]
  psm_batch batch_ = {};
};

}  // namespace cpu
}  // namespace plansmith
