// What psm_engine_get_stats and psm_engine_iteration_stats tell, as the stepping thread counts it.
//
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>

#include "engine_config.h"
#include "kv_cache.h"
#include "plansmith/plansmith.h"
#include "scheduler.h"
#include "speculator.h"

namespace plansmith {

// Calls come in the order BeginStep, AddPlanTime, AddDrafts, AddExecutorTime, AddHeldPositions,
// AddToken..., EndStep; without a step EndStep alone. Not thread-safe: the thread that runs the
// step owns it.
class StepStats {
 public:
  explicit StepStats(const EngineConfig& config);

  // Also stamps the requests that the step schedules for the first time.
  void BeginStep(const StepPlan& plan, const KvCache& kv, int64_t begin_ns);
  // Time of the machine, whatever clock the engine has.
  void AddPlanTime(int64_t took_ns) { totals_.plan_time_ns += static_cast<uint64_t>(took_ns); }
  void AddCopyTime(int64_t took_ns);
  // machine_ns: what drafting took in the machine's time.
  void AddDrafts(const DraftOutcome& outcome, int64_t machine_ns);
  void AddAccepted(int32_t num_tokens);
  // took_ns: in the engine's clock; machine_ns: in the machine's.
  void AddExecutorTime(int64_t took_ns, int64_t machine_ns);
  // After the executor, before any request ends.
  void AddHeldPositions(const Scheduler& scheduler, const KvCache& kv);
  // A request was retired: what it reused and missed.
  void AddRetired(const psm_request_stats& stats);
  void AddToken() { ++totals_.num_generated_tokens; }
  // The state now, with `num_ended` requests more that have ended. took_ns is the whole step's in
  // the engine's clock and machine_ns in the machine's, 0 when none ran. The next record is then
  // taken with TakeRecord.
  void EndStep(const Scheduler& scheduler, const KvCache& kv, size_t num_ended, int64_t took_ns,
               int64_t machine_ns);

  uint64_t iter() const { return iteration_.iter; }
  const psm_engine_stats& totals() const { return totals_; }
  // The step's record, complete but for num_queued_requests; begins a new one.
  psm_iteration_stats TakeRecord();

 private:
  psm_engine_stats totals_{};
  psm_iteration_stats iteration_{};
  int64_t executors_machine_ns_ = 0;  // steps, drafts and copies
};

}  // namespace plansmith
