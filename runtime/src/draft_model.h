// Drives the draft executor: for a whole batch, a token a round.
//
// Its KV pool has the target's block numbers, so a request's block table is good for both. What the
// draft has not computed of a request it computes before the first round, in chunks; until then the
// request gets no drafts.
//
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "draft_batch.h"
#include "engine_config.h"
#include "guide.h"
#include "kv_cache.h"
#include "run_step.h"
#include "sampler.h"
#include "sampling_rows.h"
#include "scheduler.h"
#include "step_cost.h"

namespace plansmith {

// Allocates nothing after its creation. Borrows what it is given; the draft executor is open.
class DraftModel {
 public:
  DraftModel(const EngineConfig& config, KvCache* kv, Sampler* sampler, GuideThread* guides);

  void ReserveEdits(size_t num_requests, size_t edits_each) {
    if (sampling_ != nullptr) sampling_->Reserve(num_requests, edits_each);
  }
  // Fills request->draft (empty before) of each sequence with at most num_draft tokens. Draws with
  // the request's own parameters, seed and positions, as the target's rows will be: where the two
  // models agree, so do the tokens. False when the executor failed: there are no drafts then.
  bool Draft(std::vector<ScheduledSeq>* sequences);
  // The drafts of `request` have been verified, and its tokens are its own again.
  void Observe(const Request& request, int32_t num_drafted, int32_t num_accepted);
  // Positions the draft would have to compute before it can draft for `request`.
  int32_t Pending(const Request& request) const {
    return request.num_tokens() - kv_->DraftPositions(request.kv);
  }
  // The draft's clock: its own, if it has one (a simulated one does).
  int64_t NowNs() const;
  // Of a round, over its tokens.
  const StepCost& cost() const { return cost_; }

 private:
  void CollectCatchUp(std::vector<ScheduledSeq>* sequences);
  void AddRange(Request* request, int32_t begin, int32_t end);
  bool ClaimBlocks(const DraftRange& range);
  void CollectRound(std::vector<ScheduledSeq>* sequences, size_t round);
  bool RunRound();
  bool Step(Rows* rows);
  SamplingRows* DescribeRows();
  const uint32_t* MaskOf(Request* request);
  void NoteComputed();
  void DrawAll(Rows rows);
  void DrawOne(const Rows& row, Request* request);

  const EngineConfig& config_;
  KvCache* kv_;
  Sampler* sampler_;
  GuideThread* guides_;
  DraftBatch batch_;
  std::unique_ptr<SamplingRows> sampling_;  // NULL = the executor does not draw
  StepCost cost_;
  std::vector<DraftRange> ranges_;  // of the round
  int32_t num_range_tokens_ = 0;
  std::vector<uint32_t> claims_;  // [num_blocks] the last catch-up that wrote a block
  uint32_t catch_up_id_ = 0;
};

}  // namespace plansmith
