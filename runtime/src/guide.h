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
  // Give `table.self` back to its owner, as a submission that fails must: the destructor will not
  // close it. Nothing else may be called afterwards.
  void Disown() { table_.close = nullptr; }

 private:
  friend class GuideThread;
  friend struct GuideWork;

  psm_guide table_;
  int32_t vocab_size_;
  int32_t mask_words_;
  int32_t max_draft_len_;
  std::vector<uint32_t> masks_;  // [1 + max_draft_len, mask_words]
  std::string error_;            // of the first call that failed; the request fails with it

  // What the thread is to do, in this order: accept, then the masks of rows num_known..num_wanted.
  // Written by the stepping thread while the guide is idle or queued, by the guide thread while it
  // is running.
  std::vector<int32_t> to_accept_;
  std::vector<int32_t> draft_;  // row j stands behind draft[0..j)
  int32_t num_known_ = 0;       // rows whose masks are there
  int32_t num_wanted_ = 0;

  enum class State { kIdle, kQueued, kRunning };
  State state_ = State::kIdle;
  Guide* next_ = nullptr;  // in the queue: a list through the guides, so that it never allocates
  Guide* previous_ = nullptr;
};

// One for an engine; starts its thread with the first guide. Calls come from the stepping thread.
// The thread holds no lock while it is inside a guide, so a guide may itself wait for locks
// (Python's, say). A guide that never returns is waited for: by the step that needs its mask, by
// Finish, and by the destructor.
class GuideThread {
 public:
  GuideThread();
  // No guide may be in use any more. Waits for the call in progress, if any.
  ~GuideThread();
  GuideThread(const GuideThread&) = delete;
  GuideThread& operator=(const GuideThread&) = delete;

  // `num_requests` guided requests live: with the first the thread starts. Where it cannot, each
  // guide's Mask says so.
  void Reserve(size_t num_requests);
  // Queue the masks of the request's rows in this step: row j follows its tokens and
  // request->draft[0..j). Rows 0..request->draft.size().
  void Prepare(Request* request);
  // Wait for it: the mask of row j, valid until the next Prepare or MaskAhead. All zeros behind a
  // draft token that is not allowed. Throws EXECUTOR with the guide's text when it failed.
  const uint32_t* Mask(const Request& request, int32_t row);
  // Tokens [num_before..request.num_output()) of the output were generated. The guide hears of them
  // before its next mask, beside the next step; the masks of Prepare stay as they are.
  void Accept(Request* request, int32_t num_before);
  // At once: the mask behind its tokens and ahead[0..num_ahead), num_ahead <= max_draft_len, for
  // the drafter. A Prepare with a draft that begins alike does not make it again. Throws like Mask.
  const uint32_t* MaskAhead(Request* request, const int32_t* ahead, int32_t num_ahead);
  // Before the request goes away: drop what is queued, wait for what is running.
  void Finish(Request* request);

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace plansmith
