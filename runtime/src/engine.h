// The engine: the inbox, the thread, and the step loop expire - schedule - pack - execute - sample
// - emit.
//
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <condition_variable>
#include <cstdint>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <unordered_map>
#include <unordered_set>
#include <vector>

#include "batch_builder.h"
#include "event_queue.h"
#include "iteration_ring.h"
#include "kv_cache.h"
#include "plansmith/plansmith.h"
#include "request.h"
#include "sampler.h"
#include "scheduler.h"

namespace plansmith {

// Everything an engine needs, checked: see capi.cc.
struct EngineConfig {
  psm_executor executor;
  psm_model_info info;         // limits as narrowed by the options
  psm_engine_options options;  // defaults filled in
  int32_t num_blocks = 0;
};

// Threads: public functions from any thread, but StepOnce from one at a time. `mutex_` is held for
// moments only and guards what all threads see; `step_mutex_` guards the step state and is held
// through a step. The order is stop_mutex_, step_mutex_, mutex_.
class Engine {
 public:
  // Opens the executor; throws EXECUTOR or OUT_OF_MEMORY. Owns it from then on.
  explicit Engine(const EngineConfig& config);
  ~Engine();
  Engine(const Engine&) = delete;
  Engine& operator=(const Engine&) = delete;

  const psm_model_info& info() const { return config_.info; }
  const EngineConfig& config() const { return config_; }
  EventQueue& events() { return events_; }

  // Takes a checked request; its id comes back. Throws QUEUE_FULL, SHUTDOWN.
  uint64_t Submit(std::unique_ptr<Request> request);
  // Throws NOT_FOUND.
  void Cancel(uint64_t request_id);
  // One iteration; true when the executor ran. For manual_step.
  bool StepOnce();
  // Refuse new requests, wait for the step in progress, fail what is left, close the event queue.
  // Idempotent.
  void Shutdown();

  psm_engine_stats Stats();
  size_t TakeIterationStats(psm_iteration_stats* records, size_t max_records);

  // Throws INTERNAL when blocks, lists or counts do not agree. For tests.
  void CheckInvariants();

 private:
  void Run();
  bool Step();
  bool StepWork();
  void TakeInbox();
  void ExpireOverdue(int64_t now_ns);
  void BeginIteration(const StepPlan& plan, int64_t begin_ns);
  bool Execute(const psm_batch& batch, const float** logits, std::string* error);
  void AdvanceAll(const StepPlan& plan, const float* logits);
  // Samples when the sequence is at its end; returns whether it used a row.
  bool Advance(const ScheduledSeq& seq, const float* row);
  void EmitToken(Request* request, const Sample& sample);
  static int32_t FinishReason(const Request& request);
  void Finish(Request* request, int32_t reason);
  void Fail(Request* request, psm_status status, const std::string& message);
  void FailStep(const StepPlan& plan, const std::string& message);
  void FailAll(psm_status status, const std::string& message);
  void Retire(Request* request, psm_event* event);
  void PublishQueued();
  void Publish(bool ran, int64_t begin_ns);

  const EngineConfig config_;
  EventQueue events_;
  std::thread thread_;
  std::mutex stop_mutex_;

  std::mutex mutex_;
  std::condition_variable work_;
  bool stopping_ = false;
  uint64_t next_id_ = 1;
  std::vector<std::unique_ptr<Request>> inbox_;
  std::vector<uint64_t> cancels_;
  std::unordered_set<uint64_t> live_ids_;
  int32_t num_waiting_ = 0;  // in the inbox or queued: what max_queue_size limits
  uint64_t num_submitted_ = 0;
  psm_engine_stats published_{};  // totals_ as of the last step
  IterationRing iterations_;

  std::mutex step_mutex_;
  KvCache kv_;
  Scheduler scheduler_;
  Sampler sampler_;
  BatchBuilder batch_;
  std::unordered_map<uint64_t, std::unique_ptr<Request>> requests_;
  std::vector<std::unique_ptr<Request>> taken_;
  std::vector<uint64_t> taken_cancels_;
  std::vector<uint64_t> retired_ids_;
  std::vector<psm_event> new_events_;
  int64_t next_deadline_ns_;  // no request is overdue before
  psm_engine_stats totals_{};
  psm_iteration_stats iteration_{};
};

}  // namespace plansmith
