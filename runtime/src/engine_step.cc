// One step, on the thread that steps: the engine's own, or psm_engine_step's.
//
// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <chrono>
#include <cstring>
#include <exception>
#include <limits>
#include <new>

#include "clock.h"
#include "engine.h"
#include "reserve.h"
#include "status.h"

namespace plansmith {
namespace {

constexpr int64_t kNever = std::numeric_limits<int64_t>::max();

// Copies what fits, cut between UTF-8 characters.
void CopyMessage(const char* message, char* to) {
  const size_t size = std::strlen(message);
  size_t n = std::min<size_t>(size, PSM_MAX_ERROR_TEXT - 1);
  if (n < size) {
    while (n > 0 && (static_cast<unsigned char>(message[n]) & 0xC0) == 0x80) --n;
  }
  std::memcpy(to, message, n);
  to[n] = '\0';
}

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

psm_event TokenEvent(const Request& request, const Sample& sample) {
  psm_event event{};
  event.request_id = request.id;
  event.client_id = request.client_id;
  event.kind = PSM_EVENT_TOKEN;
  event.token_id = sample.token;
  event.output_idx = request.num_output();
  if (request.params.num_logprobs > 0) {
    event.logprob = sample.logprob;
    event.cum_logprob = static_cast<float>(request.cum_logprob);
    event.num_top_logprobs = sample.num_top;
    std::copy_n(sample.top_ids, sample.num_top, event.top_ids);
    std::copy_n(sample.top_logprobs, sample.num_top, event.top_logprobs);
  }
  return event;
}

}  // namespace

void Engine::Run() {
  for (;;) {
    {
      std::unique_lock<std::mutex> lock(mutex_);
      work_.wait(lock, [this] { return stopping_ || !requests_.empty() || breakdown_ != PSM_OK; });
      if (stopping_) return;
    }
    std::lock_guard<std::mutex> step_lock(step_mutex_);
    const SteppingHere here(&stepping_thread_);
    try {
      Step();
    } catch (const std::exception&) {
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
      CopyMessage("the host had no memory left for the step; lower the batch limits",
                  breakdown_text_);
    } catch (const std::exception& e) {
      breakdown_ = PSM_ERROR_INTERNAL;
      CopyMessage(e.what(), breakdown_text_);
    }
  }
  FailAll(breakdown_, breakdown_text_);
  Publish(false, 0);
  breakdown_ = PSM_OK;
  return false;
}

bool Engine::StepWork() {
  const int64_t begin_ns = NowNs();
  TakeInbox();
  ExpireOverdue(begin_ns);
  const StepPlan& plan = scheduler_.Next();
  if (plan.empty()) {
    Publish(false, begin_ns);
    return false;
  }
  stats_.BeginStep(plan, kv_, begin_ns);
  PublishQueued();
  const float* logits = nullptr;
  std::string error;
  if (Execute(batch_.Build(plan), &logits, &error)) {
    AdvanceAll(plan, logits);
  } else {
    FailStep(plan, error);
  }
  Publish(true, begin_ns);
  return true;
}

// Takes over what has been submitted and cancelled. All or nothing: when there is no memory for the
// lists that it may get into and the events it may cause, it stays where it is.
void Engine::TakeInbox() {
  {
    std::lock_guard<std::mutex> lock(mutex_);
    const size_t num_live = requests_.size();
    scheduler_.Reserve(num_live);
    ReserveAtLeast(&retired_, num_live);
    // A token for each running request and the end of every request.
    ReserveAtLeast(&new_events_,
                   new_events_.size() + num_live +
                       std::min(num_live, static_cast<size_t>(config_.info.max_batch_size)));
    taken_.swap(inbox_);
    taken_cancels_.swap(cancels_);
  }
  for (Request* request : taken_) {
    if (request->deadline_ns != 0)
      next_deadline_ns_ = std::min(next_deadline_ns_, request->deadline_ns);
    scheduler_.Add(request);
  }
  taken_.clear();
  for (Request* request : taken_cancels_) {
    if (request->state != RequestState::kRetired) Finish(request, PSM_FINISH_CANCELLED);
  }
  taken_cancels_.clear();
}

void Engine::ExpireOverdue(int64_t now_ns) {
  if (now_ns < next_deadline_ns_) return;
  next_deadline_ns_ = kNever;
  scheduler_.ForEach([&](Request* request) {
    if (request->deadline_ns == 0) return;
    if (request->deadline_ns <= now_ns) {
      Finish(request, PSM_FINISH_TIMED_OUT);
    } else {
      next_deadline_ns_ = std::min(next_deadline_ns_, request->deadline_ns);
    }
  });
}

bool Engine::Execute(const psm_batch& batch, const float** logits, std::string* error) {
  const int64_t begin_ns = NowNs();
  psm_status status = PSM_ERROR_EXECUTOR;
  bool threw = false;
  try {
    status = config_.executor.step(config_.executor.self, &batch, logits);
  } catch (...) {  // an executor written in C++ that forgot to translate: the engine must live on
    threw = true;
  }
  stats_.AddExecutorTime(NowNs() - begin_ns);
  if (threw) {
    *error = "the executor threw an exception; it must return a status instead";
  } else if (status != PSM_OK) {
    *error = Format("the executor failed in step %llu: %s: %s",
                    static_cast<unsigned long long>(stats_.iter()), psm_status_name(status),
                    ExecutorText(config_.executor).c_str());
  } else if (batch.num_logits_rows > 0 && *logits == nullptr) {
    *error = Format("the executor gave NULL for %d rows of logits", batch.num_logits_rows);
  }
  return error->empty();
}

void Engine::AdvanceAll(const StepPlan& plan, const float* logits) {
  const size_t vocab_size = static_cast<size_t>(config_.info.vocab_size);
  // First all positions, for the sum; a finished request gives its blocks back at once.
  for (const auto* seqs : {&plan.context, &plan.generation}) {
    for (const ScheduledSeq& seq : *seqs) seq.request->num_computed += seq.num_tokens;
  }
  stats_.AddHeldPositions(scheduler_);
  for (const auto* seqs : {&plan.context, &plan.generation}) {
    for (const ScheduledSeq& seq : *seqs) {
      if (Advance(seq, logits)) logits += vocab_size;
    }
  }
}

bool Engine::Advance(const ScheduledSeq& seq, const float* row) {
  Request* request = seq.request;
  request->stats.last_iter = stats_.iter();
  if (request->num_computed < request->num_tokens()) return false;
  Sample sample;
  try {
    sampler_.Draw(row, *request, nullptr, &sample);
  } catch (const StatusError& e) {
    Fail(request, e.code(), e.what());
    return true;
  }
  EmitToken(request, sample);
  const int32_t reason = FinishReason(*request);
  if (reason != PSM_FINISH_NOT_FINISHED) Finish(request, reason);
  return true;
}

void Engine::EmitToken(Request* request, const Sample& sample) {
  const int64_t now_ns = NowNs();
  if (request->stats.first_token_time_ns == 0) request->stats.first_token_time_ns = now_ns;
  request->stats.last_token_time_ns = now_ns;
  request->cum_logprob += static_cast<double>(sample.logprob);
  new_events_.push_back(TokenEvent(*request, sample));
  request->tokens.push_back(sample.token);
  if (request->params.has_penalties()) request->counts.AddOutput(sample.token);
  stats_.AddToken();
}

void Engine::Finish(Request* request, int32_t reason) {
  psm_event event{};
  event.kind = PSM_EVENT_FINISHED;
  event.finish_reason = reason;
  Retire(request, &event);
}

void Engine::Fail(Request* request, psm_status status, const char* message) {
  psm_event event{};
  event.kind = PSM_EVENT_FAILED;
  event.status = status;
  CopyMessage(message, event.message);
  Retire(request, &event);
}

void Engine::FailStep(const StepPlan& plan, const std::string& message) {
  for (const auto* seqs : {&plan.context, &plan.generation}) {
    for (const ScheduledSeq& seq : *seqs) Fail(seq.request, PSM_ERROR_EXECUTOR, message.c_str());
  }
}

void Engine::FailAll(psm_status status, const char* message) {
  scheduler_.ForEach([&](Request* request) { Fail(request, status, message); });
}

// The last event of a request. The request itself lives until Publish: the plan of the step still
// points to it.
void Engine::Retire(Request* request, psm_event* event) {
  scheduler_.Remove(request);
  request->state = RequestState::kRetired;
  request->stats.num_prompt_tokens = request->num_prompt;
  request->stats.num_generated_tokens = request->num_output();
  event->request_id = request->id;
  event->client_id = request->client_id;
  event->stats = request->stats;
  new_events_.push_back(*event);
  retired_.push_back(request);
}

void Engine::PublishQueued() {
  std::lock_guard<std::mutex> lock(mutex_);
  num_waiting_ = static_cast<int32_t>(inbox_.size()) + scheduler_.num_queued();
}

// Makes the step visible: counts and live ids first, then its events, so that whoever has seen an
// event also sees the state behind it.
void Engine::Publish(bool ran, int64_t begin_ns) {
  stats_.EndStep(scheduler_, kv_, retired_.size(), ran ? NowNs() - begin_ns : 0);
  psm_iteration_stats record = stats_.TakeRecord();
  {
    std::lock_guard<std::mutex> lock(mutex_);
    if (!retired_.empty()) {
      const auto is_retired = [](const Request* r) { return r->state == RequestState::kRetired; };
      cancels_.erase(std::remove_if(cancels_.begin(), cancels_.end(), is_retired), cancels_.end());
      for (const Request* request : retired_) requests_.erase(request->id);
      retired_.clear();
    }
    record.num_queued_requests = num_waiting_ =
        static_cast<int32_t>(inbox_.size()) + scheduler_.num_queued();
    published_ = stats_.totals();
    if (ran) iterations_.Push(record);
  }
  events_.Push(new_events_);
  new_events_.clear();
}

}  // namespace plansmith
