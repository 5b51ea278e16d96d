// How each row of a step is to be drawn, as psm_step_sampling: for executors that draw themselves.
//
// A row says what Sampler::Draw would do with its logits, so that whoever follows it gives the same
// token: the mask, then every change of a single logit as one edit, then temperature, filters and
// the key of the draw.
//
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <utility>
#include <vector>

#include "lazy_array.h"
#include "plansmith/plansmith.h"
#include "request.h"

namespace plansmith {

// Keeps its arrays from step to step.
class SamplingRows {
 public:
  // Address space for max_rows rows and masks; pages that no step reaches are never touched.
  SamplingRows(int32_t vocab_size, int32_t max_rows);

  // Whether the request's rows can be described so: it has no beams, no logits processor, and no id
  // of its logit_bias comes twice.
  static bool CanDescribe(const Request& request);

  // Most edits of one row of the request.
  static size_t EditsAtMost(const Request& request, int32_t vocab_size);

  // Room for rows of so many edits each, within reason: beyond it, and where there is no memory, it
  // is found when it is needed.
  void Reserve(size_t num_rows, size_t edits_each) noexcept;
  void Clear();
  // The row of the request's next token. Its tokens are the history, drafts before the row
  // included. mask: NULL or (V + 31) / 32 words, copied. Throws INTERNAL beyond max_rows.
  void Add(Request* request, const uint32_t* mask, bool with_logprobs = true);

  int32_t num_rows() const { return sampling_.num_rows; }
  // Valid until the next Clear or Add.
  const psm_step_sampling& sampling() const { return sampling_; }
  // [num_rows], for the executor to fill.
  psm_row_sample* samples() { return &samples_[0]; }

 private:
  void AddEdits(Request* request);
  void CollectForbidden(const Request& request);

  psm_step_sampling sampling_{};
  LazyArray<psm_sampling_row> rows_;
  LazyArray<psm_row_sample> samples_;
  LazyArray<uint32_t> masks_;
  std::vector<psm_logit_edit> edits_;
  std::vector<int32_t> forbidden_;  // of one row: bad words, repeated n-grams, end ids
};

// What an executor drew for the request's next token, checked; mask as given for the row. Throws
// EXECUTOR where it is no token of the row, and what Sampler::Draw throws where there is none.
struct Sample;
void TakeSample(const psm_row_sample& drawn, const Request& request, const uint32_t* mask,
                int32_t vocab_size, Sample* out);

}  // namespace plansmith
