// One step, on the thread that steps: the engine's own, or psm_engine_step's.
//
// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <chrono>
#include <cstring>
#include <exception>
#include <new>

#include "clock.h"
#include "engine.h"
#include "reserve.h"
#include "status.h"

namespace plansmith {
namespace {

// Says which thread is inside a step, for as long as it is.
class SteppingHere {
 public:
  explicit SteppingHere(std::atomic<std::thread::id>* thread) : thread_(thread) {
    thread_->store(std::this_thread::get_id());
  }
  ~SteppingHere() { thread_->store(std::thread::id()); }
  SteppingHere(const SteppingHere&) = delete;
  SteppingHere& operator=(const SteppingHere&) = delete;

 private:
  std::atomic<std::thread::id>* thread_;
};

}  // namespace

void CopyMessage(const char* message, char* to) {
  const size_t size = std::strlen(message);
  size_t n = std::min<size_t>(size, PSM_MAX_ERROR_TEXT - 1);
  if (n < size) {
    while (n > 0 && (static_cast<unsigned char>(message[n]) & 0xC0) == 0x80) --n;
  }
  std::memcpy(to, message, n);
  to[n] = '\0';
}

void Engine::Run() {
  bool is_behind = false;  // with events that there was no memory for
  for (;;) {
    {
      std::unique_lock<std::mutex> lock(mutex_);
      work_.wait(lock, [&] {
        const bool has_work = !requests_.empty() || breakdown_ != PSM_OK || is_behind;
        return stopping_ || (has_work && num_between_steps_ == 0);
      });
      if (stopping_) return;
    }
    std::lock_guard<std::mutex> step_lock(step_mutex_);
    const SteppingHere here(&stepping_thread_);
    try {
      Step();
      if (!GoesOn()) PublishPending();
      is_behind = false;
    } catch (const std::exception&) {
      is_behind = true;
      // There is no memory even for the last events: they keep until there is some.
      std::this_thread::sleep_for(std::chrono::milliseconds(10));
    }
  }
}

bool Engine::StepOnce() {
  // To try a lock that this thread holds is undefined, so look first.
  std::unique_lock<std::mutex> lock(step_mutex_, std::defer_lock);
  if (stepping_thread_.load() == std::this_thread::get_id() || !lock.try_lock()) {
    throw StatusError(PSM_ERROR_INVALID_ARGUMENT,
                      "psm_engine_step is running already; call it from one thread at a time and "
                      "not from inside the executor's step");
  }
  const SteppingHere here(&stepping_thread_);
  return Step();
}

bool Engine::Step() {
  if (breakdown_ == PSM_OK) {
    try {
      return StepWork();
    } catch (const std::bad_alloc&) {
      breakdown_ = PSM_ERROR_OUT_OF_MEMORY;
      CopyMessage("the host had no memory left for the step; free some, or lower max_num_tokens",
                  breakdown_text_);
    } catch (const std::exception& e) {
      breakdown_ = PSM_ERROR_INTERNAL;
      CopyMessage(e.what(), breakdown_text_);
    }
  }
  FailAll(breakdown_, breakdown_text_);
  // Nobody knows how far the step came: the cache begins anew, as when copies fail.
  taken_cancels_.clear();
  kv_.ForgetAll();
  kv_.ClearCopies();
  Publish(false, 0, 0);
  breakdown_ = PSM_OK;
  return false;
}

bool Engine::StepWork() {
  const int64_t begin_ns = config_.NowNs();
  const int64_t machine_begin_ns = NowNs();
  TakeInbox();
  ExpireOverdue(begin_ns);
  kv_.SetNow(begin_ns);
  if (drafts_) speculator_->PlanLengths(scheduler_.running());
  StepPlan& plan = scheduler_.Next();
  if (plan.empty()) {
    Publish(false, begin_ns, machine_begin_ns);
    return false;
  }
  stats_.BeginStep(plan, kv_, begin_ns);
  stats_.AddPlanTime(NowNs() - machine_begin_ns);
  PublishQueued();
  Rows rows;
  std::string error;
  if (LaunchMayBeFar(plan)) PublishPending();
  if (!RunCopies(&error)) {
    FailRunning(error);
  } else if (DraftAndExecute(&plan, &rows, &error)) {
    AdvanceAll(plan, rows);
  } else {
    FailStep(plan, error);
  }
  Publish(true, begin_ns, machine_begin_ns);
  return true;
}

bool Engine::DraftAndExecute(StepPlan* plan, Rows* rows, std::string* error) {
  if (drafts_) {
    const int64_t draft_begin_ns = NowNs();
    const DraftOutcome outcome = speculator_->Draft(plan);  // first: arguments have no order
    stats_.AddDrafts(outcome, NowNs() - draft_begin_ns);
  }
  const int64_t begin_ns = NowNs();
  const psm_batch& batch = batch_.Build(*plan);
  stats_.AddPlanTime(NowNs() - begin_ns);
  for (const auto* seqs : {&plan->context, &plan->generation}) {
    for (const ScheduledSeq& seq : *seqs) {
      Request* request = seq.request;
      if (request->guide == nullptr) continue;
      if (request->num_computed + seq.num_tokens == request->num_tokens()) guides_.Prepare(request);
    }
  }
  return Execute(*plan, batch, rows, error);
}

// Takes over what has been submitted and cancelled. All or nothing: when there is no memory for the
// lists that it may get into and the events it may cause, it stays where it is.
void Engine::TakeInbox() {
  {
    std::lock_guard<std::mutex> lock(mutex_);
    if (inbox_.empty() && cancels_.empty()) return;
    ReserveForLive();
    NoteDrafts();
    taken_.swap(inbox_);
    taken_cancels_.swap(cancels_);
  }
  for (Request* request : taken_) {
    if (request->deadline_ns != 0) deadlines_.Push(request);
    scheduler_.Add(request);
  }
  taken_.clear();
  for (LiveRequest* live : taken_cancels_) {
    for (const auto& request : live->sequences) {
      if (request->state != RequestState::kRetired) Finish(request.get(), PSM_FINISH_CANCELLED);
    }
  }
  taken_cancels_.clear();
}

// With mutex_ held.
void Engine::ReserveForLive() {
  const size_t max_batch_size = static_cast<size_t>(config_.info.max_batch_size);
  const size_t max_num_tokens = static_cast<size_t>(config_.info.max_num_tokens);
  const size_t tokens_each = config_.options.draft_mode == PSM_DRAFT_OFF
                                 ? 1
                                 : 1 + static_cast<size_t>(config_.options.max_draft_len);
  // With drafts from callers, as many as a step has rows.
  size_t num_tokens = tokens_each * std::min(num_live_, max_batch_size);
  if (num_with_drafts_ > 0) num_tokens = std::max(num_tokens, max_num_tokens);
  scheduler_.Reserve(num_live_);
  deadlines_.Reserve(num_live_);
  guides_.Reserve(num_guided_);
  if (sampling_ != nullptr) sampling_->Reserve(num_tokens, max_edits_);
  speculator_->ReserveEdits(std::min(num_live_, max_batch_size), max_edits_);
  ReserveAtLeast(&retired_, num_live_);
  ReserveAtLeast(&pending_.retired, num_live_);
  ReserveAtLeast(&dead_, dead_.size() + requests_.size());
  // Tokens for each running request, the rows of a context (each is a token of the step), and the
  // end of every request. A beam search that ends makes room for its beams by itself.
  num_usual_events_ = num_live_ + num_tokens + max_num_tokens;
  ReserveAtLeast(&new_events_, new_events_.size() + num_usual_events_);
  ReserveAtLeast(&pending_.events, num_usual_events_);
}

// With mutex_ held.
void Engine::NoteDrafts() {
  drafts_ = config_.options.draft_mode != PSM_DRAFT_OFF || num_with_drafts_ > 0;
}

void Engine::ExpireOverdue(int64_t now_ns) {
  while (!deadlines_.empty() && deadlines_.top()->deadline_ns <= now_ns) {
    Finish(deadlines_.top(), PSM_FINISH_TIMED_OUT);
  }
}

// Whether something comes before the launch that may take long: copies, a draft model, a guide that
// is asked what it thinks of drafts. What is pending does not wait for that.
bool Engine::LaunchMayBeFar(const StepPlan& plan) const {
  if (!kv_.copies().empty() || config_.options.draft_mode == PSM_DRAFT_MODEL) return true;
  const auto asks_guide = [](const ScheduledSeq& seq) {
    return seq.num_draft > 0 && seq.request->guide != nullptr;
  };
  return std::any_of(plan.context.begin(), plan.context.end(), asks_guide) ||
         std::any_of(plan.generation.begin(), plan.generation.end(), asks_guide);
}

// The copies that sharing, swapping and forking caused, in the pools of target and draft.
bool Engine::RunCopies(std::string* error) {
  const std::vector<psm_block_copy>& copies = kv_.copies();
  if (copies.empty()) return true;
  const int64_t begin_ns = config_.NowNs(), machine_begin_ns = NowNs();
  const psm_executor* executors[] = {
      &config_.executor, config_.options.draft_mode == PSM_DRAFT_MODEL ? &config_.draft : nullptr};
  for (const psm_executor* executor : executors) {
    if (executor == nullptr) continue;
    psm_status status = PSM_ERROR_EXECUTOR;
    try {
      status = executor->copy_blocks(executor->self, copies.data(), copies.size());
    } catch (...) {  // as in Execute
    }
    if (status != PSM_OK) {
      *error = Format("the executor could not copy %zu KV blocks: %s: %s", copies.size(),
                      psm_status_name(status), ExecutorText(*executor).c_str());
      break;
    }
  }
  const auto of_host = [](const psm_block_copy& c) { return c.kind != PSM_COPY_DEVICE; };
  const auto num_host = std::count_if(copies.begin(), copies.end(), of_host);
  if (num_host > 0 && error->empty()) {
    // A running mean over the last some steps that copied.
    const double each =
        static_cast<double>(config_.NowNs() - begin_ns) / static_cast<double>(copies.size());
    copy_ns_per_block_ += 0.2 * (each - copy_ns_per_block_);
  }
  stats_.AddCopyTime(NowNs() - machine_begin_ns);
  kv_.ClearCopies();
  return error->empty();
}

bool Engine::Execute(const StepPlan& plan, const psm_batch& batch, Rows* rows, std::string* error) {
  const int64_t begin_ns = config_.NowNs(), machine_begin_ns = NowNs();
  const StepOutcome outcome = RunStep(config_.executor, batch, config_.info.vocab_size,
                                      [&] { return WhileDeviceWorks(plan, batch); });
  *rows = outcome.rows;
  const int64_t took_ns = config_.NowNs() - begin_ns;
  stats_.AddExecutorTime(took_ns, NowNs() - machine_begin_ns);
  if (outcome.threw) {
    *error = "the executor threw an exception; it must return a status instead";
  } else if (outcome.status != PSM_OK) {
    *error = Format("the executor failed in step %llu: %s: %s",
                    static_cast<unsigned long long>(stats_.iter()), psm_status_name(outcome.status),
                    ExecutorText(config_.executor).c_str());
  } else if (batch.num_logits_rows > 0 && rows->samples == nullptr && rows->logits == nullptr) {
    *error = Format("the executor gave NULL for %d rows of logits", batch.num_logits_rows);
  }
  if (error->empty()) {
    step_cost_.Observe(batch.num_tokens, took_ns);
    LearnCosts();
  }
  return error->empty();
}

// Between launch and collect: what does not depend on the step's result.
SamplingRows* Engine::WhileDeviceWorks(const StepPlan& plan, const psm_batch& batch) {
  PublishPending();
  if (sampling_ == nullptr || batch.num_logits_rows == 0) return nullptr;
  try {
    return DescribeRows(plan) ? sampling_.get() : nullptr;
  } catch (const std::bad_alloc&) {
    return nullptr;  // no room for the edits: the logits need none
  }
}

// What the cache weighs: a block fetched from the host against one computed again.
void Engine::LearnCosts() {
  if (config_.num_host_blocks == 0) return;
  // With nothing learnt yet, too: computing is the slower one almost everywhere.
  if (config_.options.pause_policy == PSM_PAUSE_SWAP || !step_cost_.known()) {
    return kv_.SetCosts(0.0, 1.0);
  }
  kv_.SetCosts(copy_ns_per_block_, step_cost_.PerTokenNs() * config_.info.tokens_per_block);
}

void Engine::FailStep(const StepPlan& plan, const std::string& message) {
  for (const auto* seqs : {&plan.context, &plan.generation}) {
    for (const ScheduledSeq& seq : *seqs) Fail(seq.request, PSM_ERROR_EXECUTOR, message.c_str());
  }
}

// Copies failed, so nobody knows what their blocks hold: whoever has blocks ends, and the cache
// begins anew.
void Engine::FailRunning(const std::string& message) {
  while (!scheduler_.running().empty()) {
    Fail(scheduler_.running().back(), PSM_ERROR_EXECUTOR, message.c_str());
  }
  kv_.ForgetAll();
}

void Engine::FailAll(psm_status status, const char* message) {
  scheduler_.ForEach([&](Request* request) { Fail(request, status, message); });
}

}  // namespace plansmith
