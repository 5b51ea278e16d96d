// Drives a psm_executor over several sequences with scattered blocks, as a scheduler would.
//
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <algorithm>
#include <string>
#include <vector>

#include "check.h"
#include "give_candidates.h"
#include "plan_builder.h"
#include "plansmith/plansmith.h"

namespace plansmith {
namespace cpu {

// Owns an opened executor.
class Driver {
 public:
  Driver(const std::string& path, const char* isa, int32_t threads, int32_t num_blocks,
         uint64_t seed = 1, int32_t profile = 0)
      : random_(seed) {
    psm_cpu_options options = {};
    psm_cpu_options_init(&options);
    options.isa = isa;
    options.num_threads = threads;
    options.struct_size = PSM_CPU_OPTIONS_SIZE;
    options.weights = PSM_WEIGHTS_AUTO;
    options.profile = profile;
    CHECK_OK(psm_cpu_executor_create(path.c_str(), &options, &executor));
    info.struct_size = PSM_MODEL_INFO_SIZE;
    CHECK_OK(executor.describe(executor.self, &info));
    CHECK_OK(executor.open(executor.self, num_blocks));
    for (int32_t i = 0; i < num_blocks; ++i) free_.push_back(i);
  }
  ~Driver() { executor.close(executor.self); }
  Driver(const Driver&) = delete;
  Driver& operator=(const Driver&) = delete;

  struct Sequence {
    std::vector<int32_t> ids;
    std::vector<int32_t> blocks;
    int32_t done = 0;
    std::vector<float> logits;  // [done][vocab]
    int32_t adapter = -1;
  };

  // Runs the next counts[i] tokens of each sequence (0 = not in this step), with the logits of all
  // of them.
  void Step(std::vector<Sequence>* sequences, const std::vector<int32_t>& counts,
            bool last_only = false) {
    std::vector<int32_t> ids, positions, query_lens, kv_lens, cu = {0}, rows, table, adapters;
    const int32_t stride = (info.max_seq_len - 1) / info.tokens_per_block + 1;
    for (size_t i = 0; i < sequences->size(); ++i) {
      if (counts[i] == 0) continue;
      Sequence& s = (*sequences)[i];
      for (int32_t t = 0; t < counts[i]; ++t) {
        ids.push_back(s.ids[static_cast<size_t>(s.done + t)]);
        positions.push_back(s.done + t);
        if (!last_only || t + 1 == counts[i]) {
          rows.push_back(static_cast<int32_t>(ids.size()) - 1);
        }
      }
      query_lens.push_back(counts[i]);
      adapters.push_back(s.adapter);
      kv_lens.push_back(s.done + counts[i]);
      cu.push_back(cu.back() + counts[i]);
      while (static_cast<int32_t>(s.blocks.size()) * info.tokens_per_block < kv_lens.back()) {
        CHECK(!free_.empty());
        const size_t pick = random_.Below(static_cast<uint32_t>(free_.size()));
        s.blocks.push_back(free_[pick]);
        free_.erase(free_.begin() + static_cast<ptrdiff_t>(pick));
      }
      table.resize(table.size() + static_cast<size_t>(stride), -1);
      std::copy(s.blocks.begin(), s.blocks.end(), table.end() - stride);
    }
    psm_batch batch = {};
    batch.struct_size = PSM_BATCH_SIZE;
    batch.num_tokens = static_cast<int32_t>(ids.size());
    batch.num_seqs = static_cast<int32_t>(query_lens.size());
    batch.num_logits_rows = static_cast<int32_t>(rows.size());
    batch.block_table_stride = stride;
    batch.input_ids = ids.data();
    batch.position_ids = positions.data();
    batch.query_lens = query_lens.data();
    batch.kv_lens = kv_lens.data();
    batch.cu_query_lens = cu.data();
    batch.block_table = table.data();
    batch.logits_rows = rows.data();
    batch.adapter_slots = adapters.data();
    std::vector<psm_candidate> candidates;
    if (info.samples_rows == PSM_SAMPLES_CANDIDATES) {
      batch.num_candidates = static_cast<int32_t>(random_.Below(12));
      candidates.resize(rows.size() * static_cast<size_t>(batch.num_candidates));
      batch.candidates = candidates.data();
    }
    const float* logits = nullptr;
    CHECK_OK(executor.step(executor.self, &batch, &logits));
    for (int32_t row = 0; batch.num_candidates > 0 && row < batch.num_logits_rows; ++row) {
      CheckCandidates(logits + row * info.vocab_size, info.vocab_size, batch.num_candidates,
                      batch.candidates + row * batch.num_candidates);
    }
    for (size_t i = 0; i < sequences->size(); ++i) {
      if (counts[i] == 0) continue;
      Sequence& s = (*sequences)[i];
      const size_t n =
          static_cast<size_t>(last_only ? 1 : counts[i]) * static_cast<size_t>(info.vocab_size);
      s.logits.insert(s.logits.end(), logits, logits + n);
      logits += n;
      s.done += counts[i];
    }
  }

  // Against those found one by one. A row with what is not finite is left to its logits.
  static void CheckCandidates(const float* row, int32_t vocab_size, int32_t k,
                              const psm_candidate* given) {
    std::vector<psm_candidate> wanted(static_cast<size_t>(k));
    give_candidates(row, vocab_size, k, wanted.data());
    const bool is_finite =
        std::all_of(row, row + vocab_size, [](float x) { return x - x == 0.0f; });
    if (!is_finite) wanted[0].token_id = -1;
    for (size_t i = 0; i < wanted.size(); ++i) {
      CHECK(given[i].token_id == wanted[i].token_id);
      if (wanted[i].token_id < 0) return;
      CHECK(given[i].logit == wanted[i].logit);
    }
  }

  void Free(Sequence* s) {
    free_.insert(free_.end(), s->blocks.begin(), s->blocks.end());
    *s = Sequence();
  }

  psm_executor executor = {};
  psm_model_info info = {};

 private:
  std::vector<int32_t> free_;
  Random random_;
};

}  // namespace cpu
}  // namespace plansmith
