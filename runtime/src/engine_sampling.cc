// How a step's rows are to be drawn, for an executor that draws them itself.
//
// SPDX-License-Identifier: Apache-2.0
#include "engine.h"
#include "status.h"

namespace plansmith {
namespace {

// The drafts of a request as a part of its tokens, row by row.
class DraftsAhead {
 public:
  explicit DraftsAhead(Request* request) : request_(request) {}
  ~DraftsAhead() {
    for (; num_pushed_ > 0; --num_pushed_) request_->PopToken();
  }
  DraftsAhead(const DraftsAhead&) = delete;
  DraftsAhead& operator=(const DraftsAhead&) = delete;
  void Push() { request_->PushToken(request_->draft[num_pushed_++]); }

 private:
  Request* request_;
  size_t num_pushed_ = 0;
};

bool CanDescribe(const Request& request) {
  return SamplingRows::CanDescribe(request) && !request.return_generation_logits;
}

}  // namespace

// All rows of the step in sampling_, in the batch's order; false when one of them has to be drawn
// from its logits.
bool Engine::DescribeRows(const StepPlan& plan) {
  const auto rows_of = [](const ScheduledSeq& seq) {
    const int32_t begin = seq.request->num_computed;
    return ContextRows(*seq.request, begin, begin + seq.num_tokens);
  };
  for (const ScheduledSeq& seq : plan.context) {
    const ContextRows rows = rows_of(seq);
    if (rows.context_begin < rows.context_end) return false;
    if (rows.reaches_last && !CanDescribe(*seq.request)) return false;
  }
  for (const ScheduledSeq& seq : plan.generation) {
    if (!CanDescribe(*seq.request)) return false;
  }
  sampling_->Clear();
  for (const ScheduledSeq& seq : plan.context) {
    if (rows_of(seq).reaches_last) DescribeSequence(seq.request);
  }
  for (const ScheduledSeq& seq : plan.generation) DescribeSequence(seq.request);
  return true;
}

void Engine::DescribeSequence(Request* request) {
  const int32_t num_draft = static_cast<int32_t>(request->draft.size());
  DraftsAhead ahead(request);
  for (int32_t row = 0; row <= num_draft; ++row) {
    const uint32_t* mask = nullptr;
    try {
      if (request->guide != nullptr) mask = guides_.Mask(*request, row);
    } catch (const StatusError&) {
      // The guide has failed: its request is told so when the row is used.
    }
    sampling_->Add(request, mask);
    if (row < num_draft) ahead.Push();
  }
}

}  // namespace plansmith
