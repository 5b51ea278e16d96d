// The engine: the inbox, the thread, and the step loop. engine.cc is what other threads call,
// engine_step.cc the loop on the stepping thread, engine_advance.cc what becomes of a step's rows,
// engine_publish.cc what the others see of it.
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

#include "adapter_table.h"
#include "batch_builder.h"
#include "engine_config.h"
#include "event_queue.h"
#include "guide.h"
#include "intrusive_heap.h"
#include "iteration_ring.h"
#include "kv_cache.h"
#include "plansmith/plansmith.h"
#include "request.h"
#include "run_step.h"
#include "sampler.h"
#include "sampling_rows.h"
#include "scheduler.h"
#include "speculator.h"
#include "step_cost.h"
#include "step_stats.h"

namespace plansmith {

// The sequences of one request, from its submission to its last event.
struct LiveRequest {
  std::vector<std::unique_ptr<Request>> sequences;
  bool is_cancelled = false;
};

// Threads: public functions from any thread, but StepOnce from one at a time. `mutex_` is held for
// moments only and guards what all threads see; `step_mutex_` guards the step state and is held
// through a step. The order is stop_mutex_, step_mutex_, mutex_; the event queue's is innermost.
//
// Memory: what a step needs is set aside when its requests come in, so that a machine without
// memory fails submissions, and a step that fails all the same can still end every request.
class Engine {
 public:
  // Opens the executors; throws EXECUTOR or OUT_OF_MEMORY. Owns them from then on.
  explicit Engine(const EngineConfig& config);
  ~Engine();
  Engine(const Engine&) = delete;
  Engine& operator=(const Engine&) = delete;

  const psm_model_info& info() const { return config_.info; }
  const EngineConfig& config() const { return config_; }
  EventQueue& events() { return events_; }

  // Takes the checked sequences of a request; its id comes back. Throws QUEUE_FULL, SHUTDOWN,
  // NOT_FOUND (the adapter); the caller's guide is then still the caller's.
  uint64_t Submit(std::vector<std::unique_ptr<Request>> sequences);
  // Throws NOT_FOUND.
  void Cancel(uint64_t request_id);
  void LoadAdapter(uint64_t adapter_id, const psm_lora_module* modules, size_t num_modules);
  void UnloadAdapter(uint64_t adapter_id);
  // One iteration; true when the executor ran. For manual_step. Throws INVALID_ARGUMENT when
  // another step is running.
  bool StepOnce();
  // Refuse new requests, wait for the step in progress, fail what is left, close the event queue.
  // Idempotent. Throws INVALID_ARGUMENT from inside a step.
  void Shutdown();

  psm_engine_stats Stats();
  size_t TakeIterationStats(psm_iteration_stats* records, size_t max_records);
  size_t TakeKvEvents(psm_kv_event* events, size_t max_events, int32_t* token_ids,
                      size_t max_token_ids) {
    return kv_.TakeEvents(events, max_events, token_ids, max_token_ids);
  }

  // Throws INTERNAL when blocks, lists or counts do not agree. For tests.
  void CheckInvariants();

 private:
  struct EarlierDeadline {
    bool operator()(const Request* a, const Request* b) const {
      return a->deadline_ns < b->deadline_ns;
    }
  };

  // engine.cc
  class BetweenSteps;

  // What the others are yet to see of a step.
  struct Unpublished {
    bool is_there = false;
    bool ran = false;
    psm_engine_stats totals{};
    psm_iteration_stats record{};
    std::vector<Request*> retired;
    std::vector<psm_event> events;
  };

  uint64_t Enqueue(std::vector<std::unique_ptr<Request>>* sequences);
  void StartThread();
  void RefuseInsideStep(const char* function);

  // engine_step.cc
  void Run();
  bool Step();
  bool StepWork();
  void TakeInbox();
  void ReserveForLive();
  void NoteDrafts();
  void ExpireOverdue(int64_t now_ns);
  bool LaunchMayBeFar(const StepPlan& plan) const;
  bool RunCopies(std::string* error);
  bool DraftAndExecute(StepPlan* plan, Rows* rows, std::string* error);
  bool Execute(const StepPlan& plan, const psm_batch& batch, Rows* rows, std::string* error);
  SamplingRows* WhileDeviceWorks(const StepPlan& plan, const psm_batch& batch);
  void LearnCosts();
  void FailStep(const StepPlan& plan, const std::string& message);
  void FailRunning(const std::string& message);
  void FailAll(psm_status status, const char* message);

  // engine_publish.cc
  void PublishQueued();
  void BuryRetired();
  void Publish(bool ran, int64_t begin_ns, int64_t machine_begin_ns);
  void PublishPending();
  bool GoesOn();

  // engine_sampling.cc
  bool DescribeRows(const StepPlan& plan);
  void DescribeSequence(Request* request);

  // engine_advance.cc
  void AdvanceAll(const StepPlan& plan, Rows rows);
  // Each returns the rows it used.
  int32_t AdvanceContext(const ScheduledSeq& seq, Rows rows);
  int32_t AdvanceGeneration(Request* request, const Rows& rows);
  void FinishBeamsIfDone(Request* request);
  int32_t Verify(Request* request, Rows rows);
  int32_t DrawToken(Request* request, const Rows& row, int32_t row_idx);
  void DrawFromRow(const Rows& row, const Request& request, const uint32_t* mask, Sample* sample);
  void PublishBlocks(Request* request, bool with_tail);
  void EmitContext(Request* request, const float* row);
  float* CopyLogits(const float* row) const;
  void EmitToken(Request* request, const Sample& sample, const float* row);
  bool MakeRoomForBeams(const Request& request);
  void EmitBeams(Request* request, int32_t reason);
  void Finish(Request* request, int32_t reason);
  void Fail(Request* request, psm_status status, const char* message);
  void Retire(Request* request);
  void PushEnd(Request* request, psm_event* event);

  const EngineConfig config_;
  EventQueue events_;
  std::thread thread_;
  std::mutex stop_mutex_;
  std::atomic<std::thread::id> stepping_thread_{};  // none while no step runs

  std::mutex mutex_;
  std::condition_variable work_;
  bool stopping_ = false;
  int32_t num_between_steps_ = 0;  // threads that want to get in between two steps
  uint64_t next_id_ = 1;
  std::unordered_map<uint64_t, LiveRequest> requests_;  // by public id; all that have not ended
  size_t num_live_ = 0;                                 // sequences of them
  size_t num_guided_ = 0;                               // of num_live_
  size_t num_with_drafts_ = 0;                          // of num_live_: from their callers
  size_t max_edits_ = 0;                                // of a row, so far
  std::vector<Request*> inbox_;
  std::vector<LiveRequest*> cancels_;  // each once, in requests_
  int32_t num_waiting_ = 0;  // sequences in the inbox or queued: what max_queue_size limits
  uint64_t num_submitted_ = 0;
  psm_engine_stats published_{};  // as of the last step
  IterationRing iterations_;
  AdapterTable adapters_;

  std::mutex step_mutex_;
  KvCache kv_;
  Scheduler scheduler_;
  Sampler sampler_;
  GuideThread guides_;
  StepCost step_cost_;
  std::unique_ptr<Speculator> speculator_;
  bool drafts_ = false;  // whether there is anything for the speculator to do
  BatchBuilder batch_;
  std::unique_ptr<SamplingRows> sampling_;  // NULL = the executor does not draw
  StepStats stats_;
  double copy_ns_per_block_;  // to or from the host
  IntrusiveHeap<Request, &Request::deadline_slot, EarlierDeadline> deadlines_;
  std::vector<Request*> taken_;
  std::vector<LiveRequest*> taken_cancels_;
  std::vector<Request*> retired_;
  std::vector<LiveRequest> dead_;
  int32_t num_ended_requests_ = 0;   // in this step
  int32_t num_waiting_of_step_ = 0;  // num_waiting_ when it was last set
  std::vector<psm_event> new_events_;
  Unpublished pending_;
  size_t num_usual_events_ = 0;  // of a step at most: all but those of beams that end
  // A step that broke down: every request still has to be failed with this.
  psm_status breakdown_ = PSM_OK;
  char breakdown_text_[PSM_MAX_ERROR_TEXT] = "";
};

// Copies what fits, cut between UTF-8 characters.
void CopyMessage(const char* message, char* to);

}  // namespace plansmith
