// SPDX-License-Identifier: Apache-2.0
#include "engine.h"

#include <time.h>

#include <algorithm>
#include <cstring>
#include <exception>
#include <limits>

#include "status.h"

namespace plansmith {
namespace {

int64_t NowNs() {
  timespec now;
  clock_gettime(CLOCK_MONOTONIC, &now);
  return int64_t{now.tv_sec} * 1000000000 + now.tv_nsec;
}

constexpr int64_t kNever = std::numeric_limits<int64_t>::max();

double Ms(int64_t ns) { return static_cast<double>(ns) * 1e-6; }

SchedulerConfig MakeSchedulerConfig(const EngineConfig& config) {
  SchedulerConfig s;
  s.policy = config.options.scheduler_policy;
  s.max_batch_size = config.info.max_batch_size;
  s.max_num_tokens = config.info.max_num_tokens;
  s.enable_chunked_context = config.options.enable_chunked_context != 0;
  return s;
}

// Copies what fits, cut between UTF-8 characters.
void CopyMessage(const std::string& message, char* to) {
  size_t n = std::min<size_t>(message.size(), PSM_MAX_ERROR_TEXT - 1);
  if (n < message.size()) {
    while (n > 0 && (static_cast<unsigned char>(message[n]) & 0xC0) == 0x80) --n;
  }
  std::memcpy(to, message.data(), n);
  to[n] = '\0';
}

std::string ExecutorText(const psm_executor& executor) {
  const char* text = executor.last_error != nullptr ? executor.last_error(executor.self) : nullptr;
  return text != nullptr && *text != '\0' ? text : "it gave no reason";
}

}  // namespace

Engine::Engine(const EngineConfig& config)
    : config_(config),
      iterations_(static_cast<size_t>(config.options.iter_stats_max_iterations)),
      kv_(config.num_blocks, config.info.tokens_per_block),
      scheduler_(MakeSchedulerConfig(config), &kv_),
      sampler_(config.info.vocab_size),
      batch_(config.info.max_batch_size, config.info.max_num_tokens,
             kv_.BlocksFor(config.info.max_seq_len)),
      next_deadline_ns_(kNever) {
  new_events_.reserve(2 * static_cast<size_t>(config.info.max_batch_size));
  retired_ids_.reserve(static_cast<size_t>(config.info.max_batch_size));
  totals_.max_num_blocks = totals_.free_num_blocks = config.num_blocks;
  totals_.tokens_per_block = config.info.tokens_per_block;
  totals_.max_num_active_requests = config.info.max_batch_size;
  totals_.kv_cache_bytes =
      static_cast<uint64_t>(config.num_blocks) * config.info.kv_bytes_per_block;
  published_ = totals_;

  const psm_status status = config_.executor.open(config_.executor.self, config_.num_blocks);
  if (status != PSM_OK) {
    throw StatusError(
        status == PSM_ERROR_OUT_OF_MEMORY ? status : PSM_ERROR_EXECUTOR,
        Format("the executor could not open %d KV blocks (%llu bytes): %s: %s; lower "
               "kv_cache_bytes if "
               "memory is short",
               config_.num_blocks, static_cast<unsigned long long>(totals_.kv_cache_bytes),
               psm_status_name(status), ExecutorText(config_.executor).c_str()));
  }
  if (config_.options.manual_step == 0) thread_ = std::thread([this] { Run(); });
}

Engine::~Engine() {
  Shutdown();
  config_.executor.close(config_.executor.self);
}

// ---------------------------------------------------------------- any thread

uint64_t Engine::Submit(std::unique_ptr<Request> request) {
  std::unique_lock<std::mutex> lock(mutex_);
  if (stopping_)
    throw StatusError(PSM_ERROR_SHUTDOWN, "the engine is shutting down and takes no requests");
  if (num_waiting_ >= config_.options.max_queue_size) {
    throw StatusError(PSM_ERROR_QUEUE_FULL,
                      Format("%d requests wait, max_queue_size is %d; try again later or raise it",
                             num_waiting_, config_.options.max_queue_size));
  }
  const uint64_t id = next_id_;
  request->id = id;
  live_ids_.insert(id);
  inbox_.push_back(std::move(request));
  ++next_id_;
  ++num_waiting_;
  ++num_submitted_;
  lock.unlock();
  work_.notify_one();
  return id;
}

void Engine::Cancel(uint64_t request_id) {
  {
    std::lock_guard<std::mutex> lock(mutex_);
    if (live_ids_.count(request_id) == 0) {
      throw StatusError(PSM_ERROR_NOT_FOUND,
                        Format("no live request has the id %llu: it has finished or never was",
                               static_cast<unsigned long long>(request_id)));
    }
    cancels_.push_back(request_id);
  }
  work_.notify_one();
}

bool Engine::StepOnce() {
  std::unique_lock<std::mutex> lock(step_mutex_, std::try_to_lock);
  if (!lock.owns_lock()) {
    throw StatusError(
        PSM_ERROR_INVALID_ARGUMENT,
        "psm_engine_step is running in another thread; call it from one thread at a time");
  }
  return Step();
}

void Engine::Shutdown() {
  std::lock_guard<std::mutex> stop_lock(stop_mutex_);
  {
    std::lock_guard<std::mutex> lock(mutex_);
    stopping_ = true;
  }
  work_.notify_all();
  if (thread_.joinable()) thread_.join();
  std::lock_guard<std::mutex> step_lock(step_mutex_);
  TakeInbox();
  FailAll(PSM_ERROR_SHUTDOWN, "the engine was shut down before the request was done");
  Publish(false, 0);
  events_.Close();
}

psm_engine_stats Engine::Stats() {
  std::lock_guard<std::mutex> lock(mutex_);
  psm_engine_stats stats = published_;
  stats.num_submitted_requests = num_submitted_;
  stats.num_queued_requests = num_waiting_;
  return stats;
}

size_t Engine::TakeIterationStats(psm_iteration_stats* records, size_t max_records) {
  std::lock_guard<std::mutex> lock(mutex_);
  return iterations_.Take(records, max_records);
}

void Engine::CheckInvariants() {
  std::lock_guard<std::mutex> lock(step_mutex_);
  scheduler_.CheckInvariants();
}

// ---------------------------------------------------------------- the step

void Engine::Run() {
  for (;;) {
    {
      std::unique_lock<std::mutex> lock(mutex_);
      work_.wait(lock, [this] {
        return stopping_ || !inbox_.empty() || !cancels_.empty() || !requests_.empty();
      });
      if (stopping_) return;
    }
    std::lock_guard<std::mutex> step_lock(step_mutex_);
    Step();
  }
}

bool Engine::Step() {
  try {
    return StepWork();
  } catch (const std::bad_alloc&) {
    FailAll(PSM_ERROR_OUT_OF_MEMORY,
            "the host had no memory left for the step; lower the batch limits");
  } catch (const std::exception& e) {
    FailAll(PSM_ERROR_INTERNAL, std::string("unexpected: ") + e.what());
  }
  Publish(false, 0);
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
  BeginIteration(plan, begin_ns);
  PublishQueued();
  const float* logits = nullptr;
  std::string error;
  const bool ok = Execute(batch_.Build(plan), &logits, &error);
  if (ok) {
    AdvanceAll(plan, logits);
  } else {
    FailStep(plan, error);
  }
  Publish(true, begin_ns);
  return true;
}

void Engine::TakeInbox() {
  {
    std::lock_guard<std::mutex> lock(mutex_);
    taken_.swap(inbox_);
    taken_cancels_.swap(cancels_);
  }
  for (std::unique_ptr<Request>& request : taken_) {
    if (request->deadline_ns != 0)
      next_deadline_ns_ = std::min(next_deadline_ns_, request->deadline_ns);
    scheduler_.Add(request.get());
    requests_.emplace(request->id, std::move(request));
  }
  taken_.clear();
  for (uint64_t id : taken_cancels_) {
    const auto found = requests_.find(id);
    if (found != requests_.end() && found->second->state != RequestState::kRetired) {
      Finish(found->second.get(), PSM_FINISH_CANCELLED);
    }
  }
  taken_cancels_.clear();
}

void Engine::ExpireOverdue(int64_t now_ns) {
  if (now_ns < next_deadline_ns_) return;
  next_deadline_ns_ = kNever;
  for (const auto& [id, request] : requests_) {
    if (request->deadline_ns == 0 || request->state == RequestState::kRetired) continue;
    if (request->deadline_ns <= now_ns) {
      Finish(request.get(), PSM_FINISH_TIMED_OUT);
    } else {
      next_deadline_ns_ = std::min(next_deadline_ns_, request->deadline_ns);
    }
  }
}

void Engine::BeginIteration(const StepPlan& plan, int64_t begin_ns) {
  iteration_.iter = totals_.iter++;
  iteration_.timestamp_ns = begin_ns;
  iteration_.num_context_requests = static_cast<int32_t>(plan.context.size());
  iteration_.num_gen_requests = static_cast<int32_t>(plan.generation.size());
  iteration_.num_scheduled_requests = iteration_.num_context_requests + iteration_.num_gen_requests;
  iteration_.num_ctx_tokens = plan.num_context_tokens;
  iteration_.num_gen_tokens = iteration_.num_gen_requests;
  for (const ScheduledSeq& seq : plan.context) {
    psm_request_stats& stats = seq.request->stats;
    if (stats.first_scheduled_time_ns != 0) continue;
    stats.first_scheduled_time_ns = begin_ns;
    stats.first_iter = iteration_.iter;
    ++iteration_.num_new_active_requests;
    iteration_.new_active_requests_queue_latency_ms += Ms(begin_ns - stats.arrival_time_ns);
  }
  totals_.num_pauses += static_cast<uint64_t>(plan.num_paused);
  totals_.num_prompt_tokens += static_cast<uint64_t>(plan.num_context_tokens);
  totals_.kv_allocated_token_steps +=
      static_cast<uint64_t>(kv_.num_used()) * static_cast<uint64_t>(kv_.tokens_per_block());
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
  const int64_t took_ns = NowNs() - begin_ns;
  totals_.step_time_ns += static_cast<uint64_t>(took_ns);
  iteration_.executor_latency_ms = Ms(took_ns);
  if (threw) {
    *error = "the executor threw an exception; it must return a status instead";
  } else if (status != PSM_OK) {
    *error = Format("the executor failed in step %llu: %s: %s",
                    static_cast<unsigned long long>(iteration_.iter), psm_status_name(status),
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
  for (const Request* request : scheduler_.running()) {
    totals_.kv_used_token_steps += static_cast<uint64_t>(request->num_computed);
  }
  for (const auto* seqs : {&plan.context, &plan.generation}) {
    for (const ScheduledSeq& seq : *seqs) {
      if (Advance(seq, logits)) logits += vocab_size;
    }
  }
}

bool Engine::Advance(const ScheduledSeq& seq, const float* row) {
  Request* request = seq.request;
  request->stats.last_iter = iteration_.iter;
  if (request->num_computed < request->num_tokens()) return false;
  Sample sample;
  try {
    sampler_.Draw(row, *request, &sample);
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
  psm_event event{};
  event.request_id = request->id;
  event.client_id = request->client_id;
  event.kind = PSM_EVENT_TOKEN;
  event.token_id = sample.token;
  event.output_idx = request->num_output();
  if (request->params.num_logprobs > 0) {
    request->cum_logprob += static_cast<double>(sample.logprob);
    event.logprob = sample.logprob;
    event.cum_logprob = static_cast<float>(request->cum_logprob);
    event.num_top_logprobs = sample.num_top;
    std::copy_n(sample.top_ids, sample.num_top, event.top_ids);
    std::copy_n(sample.top_logprobs, sample.num_top, event.top_logprobs);
  }
  new_events_.push_back(event);
  request->tokens.push_back(sample.token);
  if (request->params.has_penalties()) request->counts.AddOutput(sample.token);
  ++totals_.num_generated_tokens;
}

int32_t Engine::FinishReason(const Request& request) {
  const SamplingParams& params = request.params;
  const int32_t n = request.num_output();
  const int32_t token = request.tokens.back();
  if (std::find(params.end_ids.begin(), params.end_ids.end(), token) != params.end_ids.end()) {
    return PSM_FINISH_END_ID;
  }
  for (size_t i = 0; n >= params.min_tokens && i < params.stop_words.size(); ++i) {
    const auto [word, length] = params.stop_words.word(i);
    if (length <= n && std::equal(word, word + length, request.tokens.end() - length)) {
      return PSM_FINISH_STOP_WORDS;
    }
  }
  return n >= request.max_tokens ? PSM_FINISH_LENGTH : PSM_FINISH_NOT_FINISHED;
}

void Engine::Finish(Request* request, int32_t reason) {
  psm_event event{};
  event.kind = PSM_EVENT_FINISHED;
  event.finish_reason = reason;
  Retire(request, &event);
}

void Engine::Fail(Request* request, psm_status status, const std::string& message) {
  psm_event event{};
  event.kind = PSM_EVENT_FAILED;
  event.status = status;
  CopyMessage(message, event.message);
  Retire(request, &event);
}

void Engine::FailStep(const StepPlan& plan, const std::string& message) {
  for (const auto* seqs : {&plan.context, &plan.generation}) {
    for (const ScheduledSeq& seq : *seqs) Fail(seq.request, PSM_ERROR_EXECUTOR, message);
  }
}

void Engine::FailAll(psm_status status, const std::string& message) {
  for (const auto& [id, request] : requests_) {
    if (request->state != RequestState::kRetired) Fail(request.get(), status, message);
  }
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
  retired_ids_.push_back(request->id);
}

void Engine::PublishQueued() {
  std::lock_guard<std::mutex> lock(mutex_);
  num_waiting_ = static_cast<int32_t>(inbox_.size()) + scheduler_.num_queued();
}

// Makes the step visible: counts and live ids first, then its events, so that whoever has seen an
// event also sees the state behind it.
void Engine::Publish(bool ran, int64_t begin_ns) {
  for (uint64_t id : retired_ids_) requests_.erase(id);
  totals_.num_completed_requests += retired_ids_.size();
  totals_.num_paused_requests = iteration_.num_paused_requests = scheduler_.num_paused();
  totals_.num_active_requests = iteration_.num_active_requests =
      static_cast<int32_t>(scheduler_.running().size()) + scheduler_.num_paused();
  totals_.free_num_blocks = iteration_.free_num_blocks = kv_.num_free();
  totals_.used_num_blocks = iteration_.used_num_blocks = kv_.num_used();
  totals_.alloc_total_blocks = totals_.alloc_new_blocks = kv_.num_allocations();
  iteration_.num_completed_requests = static_cast<int32_t>(retired_ids_.size());
  if (ran) {
    const int64_t took_ns = NowNs() - begin_ns;
    iteration_.iter_latency_ms = Ms(took_ns);
    totals_.schedule_time_ns +=
        static_cast<uint64_t>(std::max(0.0, (Ms(took_ns) - iteration_.executor_latency_ms) * 1e6));
  }
  {
    std::lock_guard<std::mutex> lock(mutex_);
    for (uint64_t id : retired_ids_) live_ids_.erase(id);
    num_waiting_ = static_cast<int32_t>(inbox_.size()) + scheduler_.num_queued();
    iteration_.num_queued_requests = num_waiting_;
    published_ = totals_;
    if (ran) iterations_.Push(iteration_);
  }
  retired_ids_.clear();
  iteration_ = {};
  events_.Push(new_events_);
  new_events_.clear();
}

}  // namespace plansmith
