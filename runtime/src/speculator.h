// Who proposes draft tokens, and how many are worth it.
//
// A draft token is verified by drawing from the target's own row with the request's own random
// numbers and comparing: the output is, token for token, what the target alone would have given,
// greedy or sampled. So nothing here can change an output, only how fast it comes.
//
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "engine_config.h"
#include "guide.h"
#include "kv_cache.h"
#include "sampler.h"
#include "scheduler.h"
#include "step_cost.h"

namespace plansmith {

// What one step's drafting did, for the statistics.
struct DraftOutcome {
  int32_t num_draft_tokens = 0;
  int32_t num_requests = 0;
  int64_t took_ns = 0;
  bool failed = false;  // the draft executor did; the step goes on without drafts
};

// Owned and called by the stepping thread.
class Speculator {
 public:
  // With draft_mode OFF there are the callers' own drafts alone. Borrows the rest; target_cost is
  // what the target's steps take, learnt by the engine. The draft executor is open.
  Speculator(const EngineConfig& config, KvCache* kv, Sampler* sampler, GuideThread* guides,
             const StepCost* target_cost);
  ~Speculator();

  // Requests that may be drafted for, and most edits of a row of theirs.
  void ReserveEdits(size_t num_requests, size_t edits_each);
  // Before scheduling: sets spec.want of every running request that generates (0 = none).
  void PlanLengths(const std::vector<Request*>& running);
  // After scheduling, before packing: fills request->draft of the plan's sequences with at most
  // num_draft tokens each (in context the caller's alone), and sets num_draft to what there are.
  // The target's blocks for them are allocated.
  DraftOutcome Draft(StepPlan* plan);
  // After the step: what became of the drafts of a request.
  void Observe(Request* request, int32_t num_drafted, int32_t num_accepted);

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace plansmith
