// Who runs in the next step, and with how many tokens.
//
// Two questions, memory and tokens. Memory: GUARANTEED_NO_EVICT counts a request's full length as
// reserved from its start (the blocks themselves are taken as positions fill), MAX_UTILIZATION
// takes blocks as they come and pauses the tail of the running list when a step does not fit.
// Tokens: every generating request gets its one token first, then context is cut into the rest of
// the budget, first come first served.
//
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <vector>

#include "kv_cache.h"
#include "request.h"
#include "reserve.h"

namespace plansmith {

struct SchedulerConfig {
  int32_t policy = PSM_GUARANTEED_NO_EVICT;
  int32_t max_batch_size =
      0;  // most running requests; <= max_num_tokens, so that all of them can generate in a step
  int32_t max_num_tokens = 0;
  int32_t max_logits_rows = 0;  // >= max_batch_size
  bool enable_chunked_context = true;
  int32_t chunking_policy = PSM_CHUNK_FIRST_COME_FIRST_SERVED;
  int32_t pause_policy = PSM_PAUSE_AUTO;
  float max_tenant_share = 1.0f;
};

struct ScheduledSeq {
  Request* request;
  int32_t num_tokens;     // >= 1 known tokens of each of its sequences, from num_computed on
  int32_t num_draft = 0;  // draft tokens that may follow; blocks and budget for them are there
};

// One step. Blocks for all its positions are allocated.
struct StepPlan {
  std::vector<ScheduledSeq> context;
  std::vector<ScheduledSeq> generation;
  int32_t num_context_tokens = 0;
  int32_t num_started = 0;  // first starts and returns from a pause
  int32_t num_paused = 0;   // paused to make this step fit
  bool empty() const { return context.empty() && generation.empty(); }
};

// Borrows requests; each stays valid until Remove. Not thread-safe: the thread that runs the step
// owns it.
class Scheduler {
 public:
  Scheduler(const SchedulerConfig& config, KvCache* kv);

  // Blocks the whole length of a request takes; more than the pool means that it can never run.
  int32_t FullLengthBlocks(const Request& request) const {
    return kv_->BlocksFor(request.max_len());
  }

  // Room for `num_requests` in all, so that Add and a pause cannot fail.
  void Reserve(size_t num_requests) { ReserveAtLeast(&waiting_, num_requests); }
  void Add(Request* request);
  // Take out a queued, running or paused request and free its blocks.
  void Remove(Request* request);
  // Plan one step: pauses, starts and allocates. Empty only when there are no requests. The
  // reference is valid until the next call.
  StepPlan& Next();

  // Calls visit(request) for every request; it may Remove the one it is given.
  template <typename Visit>
  void ForEach(Visit&& visit) {
    for (const std::vector<Request*>* list : {&running_, &waiting_}) {
      for (size_t i = list->size(); i-- > 0;) visit((*list)[i]);
    }
  }

  bool idle() const { return running_.empty() && waiting_.empty(); }
  const std::vector<Request*>& running() const { return running_; }
  int32_t num_queued() const { return static_cast<int32_t>(waiting_.size()) - num_paused_; }
  int32_t num_paused() const { return num_paused_; }

  // Throws INTERNAL when the books do not balance. For tests.
  void CheckInvariants() const;

 private:
  void ScheduleGeneration();
  void ScheduleContext();
  void StartWaiting();
  int32_t ContextChunk(const Request& request) const;
  void AddContext(Request* request, int32_t num_tokens);
  bool CanStart(const Request& request) const;
  void Start(Request* request);
  void PauseLast();
  void InsertWaiting(Request* request);
  void Allocate(Request* request, int32_t num_tokens);

  SchedulerConfig config_;
  KvCache* kv_;
  std::vector<Request*> running_;  // priority down, then order of start: the tail is paused first
  std::vector<Request*> waiting_;  // the BACK starts next: priority up, then id down
  int32_t num_paused_ = 0;
  int64_t reserved_blocks_ = 0;
  uint64_t next_start_order_ = 1;
  int32_t budget_ = 0;        // tokens left in the step being planned
  bool context_cut_ = false;  // a context did not fit the budget: those behind it wait
  StepPlan plan_;
};

}  // namespace plansmith
