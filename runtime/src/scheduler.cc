// The scheduler's books: who runs, who waits, what is promised. One step is in scheduler_step.cc.
//
// SPDX-License-Identifier: Apache-2.0
#include "scheduler.h"

#include <algorithm>

#include "status.h"

namespace plansmith {
namespace {

// Order of running_: true when `a` is paused after `b`.
bool OutranksRunning(const Request* a, const Request* b) {
  if (a->priority != b->priority) return a->priority > b->priority;
  return a->start_order < b->start_order;
}

template <typename T>
void EraseUnordered(std::vector<T>* v, const T& item) {
  const auto at = std::find(v->begin(), v->end(), item);
  if (at == v->end()) return;
  *at = v->back();
  v->pop_back();
}

[[noreturn]] void Broken(const std::string& what) {
  throw StatusError(PSM_ERROR_INTERNAL, "scheduler: " + what);
}

}  // namespace

Scheduler::Scheduler(const SchedulerConfig& config, KvCache* kv)
    : config_(config),
      kv_(kv),
      waiting_(config.max_batch_size, config.max_tenant_share),
      makers_(config.max_batch_size, kv->tokens_per_block()) {
  if (config.max_logits_rows == 0) config_.max_logits_rows = config.max_num_tokens;
  const size_t n = static_cast<size_t>(config.max_batch_size);
  for (auto* list : {&running_, &awaited_, &beams_, &contexts_}) list->reserve(n);
  sequences_.reserve(n);
  plan_.context.reserve(n);
  plan_.generation.reserve(n);
}

void Scheduler::Reserve(size_t num_requests) {
  ReserveAtLeast(&all_, num_requests);
  waiting_.Reserve(num_requests);
}

void Scheduler::Add(Request* request) {
  Reserve(all_.size() + 1);
  request->sched.list_slot = static_cast<int32_t>(all_.size());
  all_.push_back(request);
  if (config_.queue_order == PSM_QUEUE_SHORTEST) request->sched.rank = ShortestRank(*request);
  waiting_.Join(request);
  waiting_.Push(request);
}

void Scheduler::Remove(Request* request) {
  if (request->state == RequestState::kRunning) {
    const auto at = std::lower_bound(running_.begin(), running_.end(), request, OutranksRunning);
    running_.erase(at);
    StopRunning(request, OnEviction::kKeepIfReused);
  } else if (request->sched.waits_for != nullptr) {
    WaitingQueue::Forget(request);
  } else {
    waiting_.Remove(request);
  }
  num_paused_ -= request->state == RequestState::kPaused;
  waiting_.Leave(request);
  const size_t slot = static_cast<size_t>(request->sched.list_slot);
  all_[slot] = all_.back();
  all_[slot]->sched.list_slot = request->sched.list_slot;
  all_.pop_back();
  request->sched.list_slot = -1;
}

// Of a request that has been taken out of running_: its slots, its blocks, those that wait for it.
void Scheduler::StopRunning(Request* request, OnEviction on_eviction) {
  if (request->beams == nullptr) {
    if (guaranteed()) num_promised_ -= FutureBlocks(*request);
  } else {
    EraseUnordered(&beams_, request);
    request->beams->Release(kv_);
  }
  kv_->Release(&request->kv, on_eviction);
  num_slots_ -= request->width();
  waiting_.AddSlots(*request, -request->width());
  if (request->sched.put_off != nullptr) waiting_.TakeBack(request, true);
  EraseUnordered(&awaited_, request);
  blocked_id_ = 0;
}

void Scheduler::PauseLast() {
  Request* request = running_.back();
  running_.pop_back();
  if (request->in_context() && !contexts_.empty() && contexts_.back() == request) {
    contexts_.pop_back();
    context_debt_ -= ContextDebt(*request);
  }
  StopRunning(request,
              config_.pause_policy == PSM_PAUSE_RECOMPUTE ? OnEviction::kDrop : OnEviction::kKeep);
  if (request->beams != nullptr) request->beams->Restart(kv_, request);
  request->num_computed = 0;
  request->context_end = 0;
  request->state = RequestState::kPaused;
  ++request->stats.num_pauses;
  request->sched.rank = 0;  // it goes on before anybody starts
  ++num_paused_;
  ++plan_.num_paused;
  waiting_.Push(request);
}

PrefixMatch Scheduler::MatchFor(const Request& request) const {
  return kv_->Match(request.prefix_key, request.tokens.data(), request.num_tokens());
}

// When what it has to compute would be done if it were begun now and alone. A rank that never
// changes keeps the queue a heap, and is why nobody starves: whoever comes after that has a later
// one.
uint64_t Scheduler::ShortestRank(const Request& request) const {
  const int32_t num_cached = request.computes_all() ? 0 : MatchFor(request).num_tokens;
  return num_context_tokens_ +
         static_cast<uint64_t>(std::min(request.num_tokens() - num_cached, kMaxOvertakenTokens));
}

// Beams share the full blocks of the prompt, and have the rest each for itself.
int32_t Scheduler::BlocksAtLength(const Request& request, int32_t length) const {
  const int32_t all = kv_->BlocksFor(length);
  if (request.beams == nullptr) return all;
  const int32_t shared = request.num_prompt / kv_->tokens_per_block();
  return shared + request.width() * (all - shared);
}

// Free blocks that its start asks for: those that reuse takes out of the free ones, and those that
// it may need (GUARANTEED_NO_EVICT), or that its context and its next token need
// (MAX_UTILIZATION; without that token's it might be paused at once).
int32_t Scheduler::MissingBlocks(const Request& request, const PrefixMatch& match) const {
  const int32_t held = match.num_blocks + (match.num_partial_tokens > 0);
  const int32_t length = guaranteed() ? request.max_len() : request.num_tokens() + 1;
  return BlocksAtLength(request, length) - held + match.num_blocks_taken;
}

// Free blocks that nobody has been promised.
int32_t Scheduler::AvailableBlocks() {
  if (!guaranteed()) return kv_->num_free() - context_debt_;
  int64_t promised = num_promised_;
  for (const Request* request : beams_) promised += FutureBlocks(*request);
  return static_cast<int32_t>(kv_->num_free() - promised);
}

void Scheduler::Start(Request* request, const PrefixMatch& match) {
  waiting_.Remove(request);
  num_paused_ -= request->state == RequestState::kPaused;
  request->state = RequestState::kRunning;
  request->start_order = next_start_order_++;
  request->context_end = request->num_tokens();
  if (match.num_tokens > 0) {
    request->num_computed = kv_->Attach(request->prefix_key, request->tokens.data(),
                                        request->num_tokens(), &request->kv);
  }
  psm_request_stats& stats = request->stats;
  stats.reused_blocks += match.num_blocks;
  stats.reused_tokens += request->num_computed;
  stats.missed_blocks += request->context_end / kv_->tokens_per_block() - match.num_blocks;
  stats.alloc_total_blocks += match.num_blocks;
  const bool copied = match.num_partial_tokens > 0;
  stats.alloc_total_blocks += copied;
  stats.alloc_new_blocks += copied;

  num_slots_ += request->width();
  waiting_.AddSlots(*request, request->width());
  if (request->beams != nullptr) {
    beams_.push_back(request);
  } else if (guaranteed()) {
    num_promised_ += FutureBlocks(*request);
  }
  context_debt_ += ContextDebt(*request);
  running_.insert(std::upper_bound(running_.begin(), running_.end(), request, OutranksRunning),
                  request);
  ++plan_.num_started;
}

void Scheduler::Allocate(Request* request, int64_t num_positions) {
  const int32_t added = kv_->Extend(&request->kv, num_positions);
  AddAllocated(request, added);
  if (guaranteed() && request->beams == nullptr) num_promised_ -= added;
}

void Scheduler::AddAllocated(Request* request, int32_t num_blocks) {
  request->stats.alloc_total_blocks += num_blocks;
  request->stats.alloc_new_blocks += num_blocks;
}

int32_t Scheduler::HeldBlocks(const Request& request) const {
  if (request.beams == nullptr || !request.beams->running()) {
    return static_cast<int32_t>(request.kv.blocks.size());
  }
  sequences_.clear();
  for (const Beam& beam : request.beams->beams()) sequences_.push_back(&beam.kv);
  return kv_->CountDistinct(sequences_.data(), sequences_.size());
}

// Most blocks that a running request may still take.
int32_t Scheduler::FutureBlocks(const Request& request) const {
  return FullLengthBlocks(request) - HeldBlocks(request);
}

void Scheduler::CheckRequest(const Request& request,
                             std::vector<const KvSequence*>* sequences) const {
  const bool is_running = request.state == RequestState::kRunning;
  const bool has_beams = request.beams != nullptr && request.beams->running();
  const KvSequence& first = has_beams ? request.beams->beams()[0].kv : request.kv;
  const int32_t held = static_cast<int32_t>(first.blocks.size());
  const SchedulerNotes& notes = request.sched;
  if (is_running ? held < kv_->BlocksFor(request.num_computed) || FutureBlocks(request) < 0
                 : held != 0 || notes.put_off != nullptr) {
    Broken(Format("request %llu holds %d blocks for %d positions",
                  static_cast<unsigned long long>(request.id), held, request.num_computed));
  }
  const Request* other = notes.waits_for;
  if (other != nullptr && (is_running || other->state != RequestState::kRunning ||
                           std::find(awaited_.begin(), awaited_.end(), other) == awaited_.end())) {
    Broken("a request is put off with one that does not run");
  }
  sequences->push_back(&request.kv);
  if (!has_beams) return;
  for (const Beam& beam : request.beams->beams()) sequences->push_back(&beam.kv);
}

void Scheduler::CheckInvariants() const {
  std::vector<const KvSequence*> sequences;
  int64_t promised = 0, future = 0;
  int32_t num_slots = 0, num_running = 0, num_paused = 0, num_put_off = 0, num_waiting = 0;
  for (size_t i = 0; i < all_.size(); ++i) {
    const Request& request = *all_[i];
    CheckRequest(request, &sequences);
    if (request.sched.list_slot != static_cast<int32_t>(i)) Broken("a request is not at its place");
    num_paused += request.state == RequestState::kPaused;
    num_put_off += request.sched.waits_for != nullptr;
    if (request.state != RequestState::kRunning) continue;
    ++num_running;
    num_slots += request.width();
    future += FutureBlocks(request);
    if (request.beams == nullptr) promised += FutureBlocks(request);
  }
  waiting_.CheckInvariants([&](const Request* request) {
    ++num_waiting;
    if (request->state == RequestState::kRunning || request->sched.waits_for != nullptr)
      Broken("a request that does not wait is in the queue");
  });
  if (num_running + num_put_off + num_waiting != static_cast<int32_t>(all_.size()) ||
      num_running != static_cast<int32_t>(running_.size()) || num_paused != num_paused_ ||
      num_slots != num_slots_ || num_slots > config_.max_batch_size ||
      !std::is_sorted(running_.begin(), running_.end(), OutranksRunning)) {
    Broken("its lists or counts do not agree");
  }
  if (guaranteed() && (promised != num_promised_ || future > kv_->num_free())) {
    Broken(Format("%lld blocks promised (noted: %lld), %lld with beams, but %d free",
                  static_cast<long long>(promised), static_cast<long long>(num_promised_),
                  static_cast<long long>(future), kv_->num_free()));
  }
  kv_->CheckInvariants(sequences);
}

}  // namespace plansmith
