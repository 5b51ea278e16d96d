// Who runs in the next step, and with how many tokens.
//
// Memory. GUARANTEED_NO_EVICT promises a request all the blocks it may still need when it starts
// (they are taken as positions fill); a request starts when its own and all promised ones are free.
// Blocks that sequences share count once: whoever's holder ends keeps them, and then neither the
// promises nor the free blocks change. MAX_UTILIZATION promises a context the blocks of that
// context and no more, and pauses the last started of the lowest priority when a step does not fit.
//
// Tokens. Every generating request gets its one token first, then the contexts share the rest of
// the budget, drafts get what is left.
//
// Order. Within a priority and the tenants' shares: by arrival, or the shortest prompt first, and
// then those that were paused go on before anybody starts.
//
// Sharing. A request begins with what the cache holds of it. When a running request computes right
// now what it needs next, it is put off until that is there.
//
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <vector>

#include "kv_cache.h"
#include "prefix_makers.h"
#include "request.h"
#include "reserve.h"
#include "waiting_queue.h"

namespace plansmith {

struct SchedulerConfig {
  int32_t policy = PSM_GUARANTEED_NO_EVICT;
  int32_t max_batch_size =
      0;  // most running requests; <= max_num_tokens, so that all of them can generate in a step
  int32_t max_num_tokens = 0;
  int32_t max_logits_rows = 0;  // >= max_batch_size; 0 = no limit
  bool enable_chunked_context = true;
  int32_t chunking_policy = PSM_CHUNK_FIRST_COME_FIRST_SERVED;
  int32_t pause_policy = PSM_PAUSE_AUTO;
  float max_tenant_share = 1.0f;
  int32_t queue_order = PSM_QUEUE_ARRIVAL;
};

// PSM_QUEUE_SHORTEST: a prompt is overtaken only by those that come before as many tokens of
// context have been computed as it has, and at most so many: enough to order everything shorter
// than a document; documents go by arrival among themselves. It is no time: of context alone 8192
// take 3 s at 2,600 tokens/s, but whoever overtakes also holds a slot for its output, and what is
// cached of its prompt is not counted.
constexpr int32_t kMaxOvertakenTokens = 8192;

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
// owns it. Between two calls of Next the caller advances num_computed and tokens of what was
// planned, and publishes what was filled; it publishes nothing of beams but their prompt.
class Scheduler {
 public:
  Scheduler(const SchedulerConfig& config, KvCache* kv);

  // Most blocks a request can hold; more than the pool means that it can never run.
  int32_t FullLengthBlocks(const Request& request) const {
    return BlocksAtLength(request, request.max_len());
  }

  // Room for `num_requests` in all, so that Add and a pause cannot fail.
  void Reserve(size_t num_requests);
  void Add(Request* request);
  // Take out a request in whatever state and free its blocks.
  void Remove(Request* request);
  // Plan one step: pauses, starts and allocates. Empty only when there are no requests. The
  // reference is valid until the next call. Throws INTERNAL when nobody can run.
  StepPlan& Next();

  // Calls visit(request) for every request; it may Remove the one it is given.
  template <typename Visit>
  void ForEach(Visit&& visit) {
    for (size_t i = all_.size(); i-- > 0;) {
      if (i < all_.size()) visit(all_[i]);
    }
  }

  bool idle() const { return all_.empty(); }
  // Priority down, then order of start.
  const std::vector<Request*>& running() const { return running_; }
  // Those that have not started yet, put off or not.
  int32_t num_queued() const {
    return static_cast<int32_t>(all_.size() - running_.size()) - num_paused_;
  }
  int32_t num_paused() const { return num_paused_; }

  // Throws INTERNAL when the books do not balance. For tests.
  void CheckInvariants() const;

 private:
  bool guaranteed() const { return config_.policy == PSM_GUARANTEED_NO_EVICT; }
  bool equal_progress() const {
    return config_.enable_chunked_context && config_.chunking_policy == PSM_CHUNK_EQUAL_PROGRESS;
  }

  // scheduler_step.cc: one step.
  void BeginStep();
  void ScheduleGeneration();
  bool AllocateBeams(Request* request, size_t at);
  void ScheduleContext();
  void ScheduleContextEqually();
  void MakeRoomForContext(const Request& request);
  bool AddContext(Request* request, int32_t most);
  bool GrowContext(ScheduledSeq* seq, int32_t most);
  int32_t ContextChunk(const Request& request, int32_t begin, int32_t most, bool may_cut) const;
  int32_t ChunkWithinRows(const Request& request, int32_t begin) const;
  void StartWaiting();
  void NoteMakers();
  void PutOff(Request* request, const PrefixMakers::Found& found);
  bool CanBegin(const Request& request, int32_t begin) const;
  void ScheduleDrafts();
  int32_t DraftsEach(int32_t* left_over) const;
  int32_t DraftWithinBlocks(const ScheduledSeq& seq, int32_t num_draft) const;

  // scheduler.cc: the books.
  int32_t BlocksAtLength(const Request& request, int32_t length) const;
  PrefixMatch MatchFor(const Request& request) const;
  uint64_t ShortestRank(const Request& request) const;
  int32_t MissingBlocks(const Request& request, const PrefixMatch& match) const;
  int32_t AvailableBlocks();
  void Start(Request* request, const PrefixMatch& match);
  void PauseLast();
  void StopRunning(Request* request, OnEviction on_eviction);
  void AddAllocated(Request* request, int32_t num_blocks);
  void Allocate(Request* request, int64_t num_positions);
  int32_t FutureBlocks(const Request& request) const;
  int32_t ContextDebt(const Request& request) const {
    return kv_->BlocksFor(request.context_end) - static_cast<int32_t>(request.kv.blocks.size());
  }
  int32_t HeldBlocks(const Request& request) const;
  void CheckRequest(const Request& request, std::vector<const KvSequence*>* sequences) const;

  SchedulerConfig config_;
  KvCache* kv_;
  std::vector<Request*> all_;      // in no particular order
  std::vector<Request*> running_;  // priority down, then order of start: the tail is paused first
  WaitingQueue waiting_;
  PrefixMakers makers_;
  std::vector<Request*> awaited_;  // running requests that others were put off with
  std::vector<Request*> beams_;    // running requests with beams
  mutable std::vector<const KvSequence*> sequences_;  // scratch of HeldBlocks
  int32_t num_paused_ = 0;
  int32_t num_slots_ = 0;  // of max_batch_size, taken by running requests
  int64_t num_promised_ =
      0;  // GUARANTEED_NO_EVICT: future blocks of running requests without beams
  uint64_t next_start_order_ = 1;
  uint64_t num_context_tokens_ = 0;  // planned so far: the clock of PSM_QUEUE_SHORTEST
  // The first in line did not fit when this much was available: nobody looks again before there is
  // more or a running request leaves, so that a long line costs a step nothing. (What it could
  // share in between is a context that it would wait for, or just what another is generating: not
  // worth a look in every step.)
  uint64_t blocked_id_ = 0;
  int32_t blocked_available_ = 0;

  // Of the step being planned.
  std::vector<Request*> contexts_;  // in the order of running_
  int32_t budget_ = 0;              // tokens left
  int32_t rows_ = 0;                // rows of logits left
  int32_t num_wanted_drafts_ = 0;
  int32_t context_debt_ = 0;  // MAX_UTILIZATION: blocks that the contexts so far still need
  size_t turn_ = 0;           // EQUAL_PROGRESS: whose turn it is
  bool context_cut_ = false;  // a context did not get all it needs: those behind it wait
  StepPlan plan_;
};

}  // namespace plansmith
