// One step of an executor, be it one call or two halves.
//
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <algorithm>
#include <cstddef>
#include <exception>

#include "plansmith/plansmith.h"
#include "sampling_rows.h"

namespace plansmith {

// A step's rows from one on: as logits, or as what the executor drew from them.
struct Rows {
  const float* logits = nullptr;            // [.., V]
  const psm_row_sample* samples = nullptr;  // set = logits is not
  // Beside the logits, where they were wanted: [.., num_candidates].
  const psm_candidate* candidates = nullptr;
  size_t num_candidates = 0;
  size_t vocab_size = 0;

  void Skip(int32_t n) {
    if (samples != nullptr) {
      samples += n;
    } else if (logits != nullptr) {
      logits += static_cast<size_t>(n) * vocab_size;
      if (candidates != nullptr) candidates += static_cast<size_t>(n) * num_candidates;
    }
  }
};

struct StepOutcome {
  psm_status status = PSM_ERROR_EXECUTOR;
  bool threw = false;  // an executor written in C++ that forgot to translate
  Rows rows;
};

// `between` runs while the device works, and only for an executor with halves: it returns the
// sampling of every row, or NULL when their logits are wanted. What it throws comes out once the
// step has been collected, as every launched step must be.
template <typename Between>
StepOutcome RunStep(const psm_executor& executor, const psm_batch& batch, int32_t vocab_size,
                    Between&& between) {
  StepOutcome outcome;
  outcome.rows.vocab_size = static_cast<size_t>(vocab_size);
  std::exception_ptr failure;
  try {
    if (executor.launch == nullptr) {
      // An executor that leaves a row out is found out.
      for (int32_t i = 0; batch.num_candidates > 0 && i < batch.num_logits_rows; ++i) {
        batch.candidates[i * batch.num_candidates].token_id = -1;
      }
      outcome.status = executor.step(executor.self, &batch, &outcome.rows.logits);
      outcome.rows.candidates = batch.num_candidates > 0 ? batch.candidates : nullptr;
      outcome.rows.num_candidates = static_cast<size_t>(batch.num_candidates);
      return outcome;
    }
    outcome.status = executor.launch(executor.self, &batch);
    if (outcome.status != PSM_OK) return outcome;
    SamplingRows* drawn = nullptr;
    try {
      drawn = between();
    } catch (...) {
      failure = std::current_exception();
    }
    outcome.status = PSM_ERROR_EXECUTOR;
    if (drawn == nullptr) {
      outcome.status = executor.collect(executor.self, nullptr, nullptr, &outcome.rows.logits);
    } else {
      psm_row_sample* samples = drawn->samples();
      // An executor that leaves a row out is found out.
      for (int32_t i = 0; i < drawn->num_rows(); ++i) samples[i].token = PSM_ROW_BAD_LOGITS;
      const float* unused = nullptr;
      outcome.status = executor.collect(executor.self, &drawn->sampling(), samples, &unused);
      outcome.rows.samples = samples;
    }
  } catch (...) {
    outcome.status = PSM_ERROR_EXECUTOR;
    outcome.threw = true;
  }
  if (failure) std::rethrow_exception(failure);
  return outcome;
}

}  // namespace plansmith
