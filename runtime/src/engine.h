// The engine: the inbox, the thread, and the step loop expire - schedule - pack - execute - sample
// - emit. engine.cc is what other threads call, engine_step.cc what the stepping thread does.
//
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <unordered_map>
#include <vector>

#include "batch_builder.h"
#include "engine_config.h"
#include "event_queue.h"
#include "iteration_ring.h"
#include "kv_cache.h"
#include "plansmith/plansmith.h"
#include "request.h"
#include "sampler.h"
#include "scheduler.h"
#include "step_stats.h"

namespace plansmith {

// Threads: public functions from any thread, but StepOnce from one at a time. `mutex_` is held for
// moments only and guards what all threads see; `step_mutex_` guards the step state and is held
// through a step. The order is stop_mutex_, step_mutex_, mutex_; the event queue's is innermost.
//
// Memory: what a step needs is set aside when its requests come in, so that a machine without
// memory fails submissions, and a step that fails all the same can still end every request.
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
  // One iteration; true when the executor ran. For manual_step. Throws INVALID_ARGUMENT when
  // another step is running.
  bool StepOnce();
  // Refuse new requests, wait for the step in progress, fail what is left, close the event queue.
  // Idempotent. Throws INVALID_ARGUMENT from inside a step.
  void Shutdown();

  psm_engine_stats Stats();
  size_t TakeIterationStats(psm_iteration_stats* records, size_t max_records);

  // Throws INTERNAL when blocks, lists or counts do not agree. For tests.
  void CheckInvariants();

 private:
  void StartThread();
  void Run();
  bool Step();
  bool StepWork();
  void TakeInbox();
  void ExpireOverdue(int64_t now_ns);
  bool Execute(const psm_batch& batch, const float** logits, std::string* error);
  void AdvanceAll(const StepPlan& plan, const float* logits);
  // Samples when the sequence is at its end; returns whether it used a row.
  bool Advance(const ScheduledSeq& seq, const float* row);
  void EmitToken(Request* request, const Sample& sample);
  void Finish(Request* request, int32_t reason);
  void Fail(Request* request, psm_status status, const char* message);
  void FailStep(const StepPlan& plan, const std::string& message);
  void FailAll(psm_status status, const char* message);
  void Retire(Request* request, psm_event* event);
  void PublishQueued();
  void Publish(bool ran, int64_t begin_ns);

  const EngineConfig config_;
  EventQueue events_;
  std::thread thread_;
  std::mutex stop_mutex_;
  std::atomic<std::thread::id> stepping_thread_{};  // none while no step runs

  std::mutex mutex_;
  std::condition_variable work_;
  bool stopping_ = false;
  uint64_t next_id_ = 1;
  std::unordered_map<uint64_t, std::unique_ptr<Request>> requests_;  // all that have not ended
  std::vector<Request*> inbox_;
  std::vector<Request*> cancels_;  // each once, in requests_
  int32_t num_waiting_ = 0;        // in the inbox or queued: what max_queue_size limits
  uint64_t num_submitted_ = 0;
  psm_engine_stats published_{};  // as of the last step
  IterationRing iterations_;

  std::mutex step_mutex_;
  KvCache kv_;
  Scheduler scheduler_;
  Sampler sampler_;
  BatchBuilder batch_;
  StepStats stats_;
  std::vector<Request*> taken_;
  std::vector<Request*> taken_cancels_;
  std::vector<Request*> retired_;
  std::vector<psm_event> new_events_;
  int64_t next_deadline_ns_;  // no request is overdue before
  // A step that broke down: every request still has to be failed with this.
  psm_status breakdown_ = PSM_OK;
  char breakdown_text_[PSM_MAX_ERROR_TEXT] = "";
};

}  // namespace plansmith
