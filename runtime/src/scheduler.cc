// SPDX-License-Identifier: Apache-2.0
#include "scheduler.h"

#include <algorithm>

#include "status.h"

namespace plansmith {
namespace {

// Order of waiting_: true when `a` starts after `b`.
bool StartsAfter(const Request* a, const Request* b) {
  if (a->priority != b->priority) return a->priority < b->priority;
  return a->id > b->id;
}

// Order of running_: true when `a` is paused after `b`.
bool OutranksRunning(const Request* a, const Request* b) {
  if (a->priority != b->priority) return a->priority > b->priority;
  return a->start_order < b->start_order;
}

}  // namespace

Scheduler::Scheduler(const SchedulerConfig& config, KvCache* kv) : config_(config), kv_(kv) {
  const size_t n = static_cast<size_t>(config.max_batch_size);
  running_.reserve(n);
  plan_.context.reserve(n);
  plan_.generation.reserve(n);
}

void Scheduler::Add(Request* request) { InsertWaiting(request); }

void Scheduler::InsertWaiting(Request* request) {
  waiting_.insert(std::lower_bound(waiting_.begin(), waiting_.end(), request, StartsAfter),
                  request);
}

void Scheduler::Remove(Request* request) {
  if (request->state == RequestState::kRunning) {
    running_.erase(std::find(running_.begin(), running_.end(), request));
    if (config_.policy == PSM_GUARANTEED_NO_EVICT) reserved_blocks_ -= FullLengthBlocks(*request);
    kv_->Release(&request->kv);
    return;
  }
  if (request->state == RequestState::kPaused) --num_paused_;
  waiting_.erase(std::lower_bound(waiting_.begin(), waiting_.end(), request, StartsAfter));
}

StepPlan& Scheduler::Next() {
  plan_.context.clear();
  plan_.generation.clear();
  plan_.num_context_tokens = plan_.num_started = plan_.num_paused = 0;
  budget_ = config_.max_num_tokens;
  context_cut_ = false;
  ScheduleGeneration();
  ScheduleContext();
  StartWaiting();
  if (plan_.empty() && !idle()) {
    throw StatusError(PSM_ERROR_INTERNAL,
                      Format("scheduler: %zu running and %zu waiting requests, but none can run",
                             running_.size(), waiting_.size()));
  }
  return plan_;
}

void Scheduler::ScheduleGeneration() {
  // Victims come from the tail, so none of them has been given its token yet.
  for (size_t i = 0; i < running_.size(); ++i) {
    Request* request = running_[i];
    if (request->in_context()) continue;
    while (i < running_.size() && kv_->PositionsWithin(request->kv) < request->num_computed + 1) {
      PauseLast();
    }
    if (i == running_.size()) return;  // it was the tail itself
    Allocate(request, 1);
    plan_.generation.push_back({request, 1, 0});
    --budget_;
  }
}

void Scheduler::ScheduleContext() {
  for (size_t i = 0; i < running_.size() && budget_ > 0 && !context_cut_; ++i) {
    Request* request = running_[i];
    if (!request->in_context()) continue;
    const int32_t chunk = ContextChunk(*request);
    if (chunk == 0)
      return;  // no block is left: the generating requests end or pause before it can go on
    AddContext(request, chunk);
  }
}

void Scheduler::StartWaiting() {
  while (!waiting_.empty() && budget_ > 0 && !context_cut_) {
    Request* request = waiting_.back();
    if (!CanStart(*request)) return;
    waiting_.pop_back();
    Start(request);
    AddContext(request, ContextChunk(*request));
  }
}

// Tokens of its context that `request` gets now: what budget and blocks allow. A cut that leaves a
// rest ends on a block boundary unless that would leave nothing.
int32_t Scheduler::ContextChunk(const Request& request) const {
  const int32_t end =
      request.state == RequestState::kRunning ? request.context_end : request.num_tokens();
  const int32_t remaining = end - request.num_computed;
  const int64_t room = kv_->PositionsWithin(request.kv) - request.num_computed;
  const int32_t chunk =
      static_cast<int32_t>(std::min<int64_t>({remaining, budget_, std::max<int64_t>(room, 0)}));
  if (chunk == remaining) return chunk;
  // Without chunking only a recomputed context that outgrew the budget is cut; no other way could
  // run it.
  if (!config_.enable_chunked_context && remaining <= config_.max_num_tokens &&
      request.num_computed == 0) {
    return 0;
  }
  const int32_t cut_end = request.num_computed + chunk;
  const int32_t aligned_end = cut_end - cut_end % kv_->tokens_per_block();
  return aligned_end > request.num_computed ? aligned_end - request.num_computed : chunk;
}

void Scheduler::AddContext(Request* request, int32_t num_tokens) {
  Allocate(request, num_tokens);
  plan_.context.push_back({request, num_tokens, 0});
  plan_.num_context_tokens += num_tokens;
  budget_ -= num_tokens;
  context_cut_ = request->num_computed + num_tokens < request->context_end;
}

bool Scheduler::CanStart(const Request& request) const {
  if (static_cast<int32_t>(running_.size()) >= config_.max_batch_size) return false;
  if (ContextChunk(request) == 0) return false;
  if (config_.policy == PSM_GUARANTEED_NO_EVICT) {
    return reserved_blocks_ + FullLengthBlocks(request) <= kv_->num_blocks();
  }
  // Its whole context, or the next pause would mostly throw work away. Only one context at a time
  // is half-read (a cut one ends its step's context), so contexts cannot block each other: what it
  // lacks, generating requests hold.
  return kv_->BlocksFor(request.num_tokens()) <= kv_->num_free();
}

void Scheduler::Start(Request* request) {
  if (request->state == RequestState::kPaused) --num_paused_;
  request->state = RequestState::kRunning;
  request->start_order = next_start_order_++;
  request->context_end = request->num_tokens();
  if (config_.policy == PSM_GUARANTEED_NO_EVICT) {
    reserved_blocks_ += FullLengthBlocks(*request);
  }
  running_.insert(std::upper_bound(running_.begin(), running_.end(), request, OutranksRunning),
                  request);
  ++plan_.num_started;
}

void Scheduler::PauseLast() {
  Request* request = running_.back();
  running_.pop_back();
  kv_->Release(&request->kv);
  request->num_computed = 0;
  request->context_end = 0;
  request->state = RequestState::kPaused;
  ++request->stats.num_pauses;
  ++num_paused_;
  ++plan_.num_paused;
  InsertWaiting(request);
}

void Scheduler::Allocate(Request* request, int32_t num_tokens) {
  const int32_t added = kv_->Extend(&request->kv, int64_t{request->num_computed} + num_tokens);
  request->stats.alloc_total_blocks += added;
  request->stats.alloc_new_blocks += added;
}

void Scheduler::CheckInvariants() const {
  std::vector<const KvSequence*> sequences;
  int64_t reserved = 0;
  for (const Request* request : running_) {
    sequences.push_back(&request->kv);
    if (config_.policy == PSM_GUARANTEED_NO_EVICT) reserved += FullLengthBlocks(*request);
    const int32_t held = static_cast<int32_t>(request->kv.blocks.size());
    if (request->state != RequestState::kRunning || held < kv_->BlocksFor(request->num_computed) ||
        held > FullLengthBlocks(*request)) {
      throw StatusError(
          PSM_ERROR_INTERNAL,
          Format("scheduler: request %llu holds %d blocks for %d positions",
                 static_cast<unsigned long long>(request->id), held, request->num_computed));
    }
  }
  int32_t paused = 0;
  for (const Request* request : waiting_) {
    paused += request->state == RequestState::kPaused;
    if (request->state == RequestState::kRunning || !request->kv.blocks.empty()) {
      throw StatusError(PSM_ERROR_INTERNAL, "scheduler: a waiting request holds blocks");
    }
  }
  if (reserved != reserved_blocks_ || reserved > kv_->num_blocks() || paused != num_paused_ ||
      !std::is_sorted(running_.begin(), running_.end(), OutranksRunning) ||
      !std::is_sorted(waiting_.begin(), waiting_.end(), StartsAfter)) {
    throw StatusError(PSM_ERROR_INTERNAL, "scheduler: its lists or counts do not agree");
  }
  kv_->CheckInvariants(sequences);
}

}  // namespace plansmith
