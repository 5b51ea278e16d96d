// Masks from psm_guide, made beside the model's step on a thread of their own.
//
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "plansmith/plansmith.h"

namespace plansmith {

struct Request;

// The guide of one sequence and the masks of its coming rows. Closes it.
class Guide {
 public:
  // Owns `table.self` from here on. Room for 1 + max_draft_len masks.
  Guide(const psm_guide& table, int32_t vocab_size, int32_t max_draft_len);
  ~Guide();
  Guide(const Guide&) = delete;
  Guide& operator=(const Guide&) = delete;

  // A guide at the same beginning, for a further sequence. Throws INVALID_ARGUMENT.
  std::unique_ptr<Guide> Clone() const;

 private:
  friend class GuideThread;
  psm_guide table_;
  int32_t mask_words_;
  int32_t max_draft_len_;
  std::vector<uint32_t> masks_;  // [1 + max_draft_len, mask_words]
  std::string error_;            // of the last call that failed; the request fails with it
};

// One for an engine; starts its thread with the first guide. Calls come from the stepping thread.
class GuideThread {
 public:
  GuideThread();
  ~GuideThread();
  GuideThread(const GuideThread&) = delete;
  GuideThread& operator=(const GuideThread&) = delete;

  // Room for the jobs of `num_requests` live guided requests; a step then allocates nothing.
  void Reserve(size_t num_requests);
  // Queue the masks of the request's rows in this step: row j follows its tokens and
  // request->draft[0..j). Rows 0..request->draft.size().
  void Prepare(Request* request);
  // Wait for it: the mask of row j. Throws EXECUTOR with the guide's text when it failed.
  const uint32_t* Mask(const Request& request, int32_t row);
  // Queue: tokens [num_before..request.num_output()) of the output were generated.
  void Accept(Request* request, int32_t num_before);
  // At once: the mask behind its tokens and ahead[0..num_ahead), for the drafter.
  const uint32_t* MaskAhead(Request* request, const int32_t* ahead, int32_t num_ahead);
  // Wait until nothing of the request is queued or running: before it goes away.
  void Finish(Request* request);

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace plansmith
