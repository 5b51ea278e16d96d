// What psm_engine_get_stats and psm_engine_iteration_stats tell, as the stepping thread counts it.
//
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>

#include "engine_config.h"
#include "kv_cache.h"
#include "plansmith/plansmith.h"
#include "scheduler.h"

namespace plansmith {

// Calls come in the order BeginStep, AddExecutorTime, AddHeldPositions, AddToken..., EndStep;
// without a step EndStep alone. Not thread-safe: the thread that runs the step owns it.
class StepStats {
 public:
  explicit StepStats(const EngineConfig& config);

  // Also stamps the requests that the step schedules for the first time.
  void BeginStep(const StepPlan& plan, const KvCache& kv, int64_t begin_ns);
  void AddExecutorTime(int64_t took_ns);
  // After the executor, before any request ends.
  void AddHeldPositions(const Scheduler& scheduler);
  void AddToken() { ++totals_.num_generated_tokens; }
  // The state now, with `num_ended` requests more that have ended. took_ns is the whole step's, 0
  // when none ran. The next record is then taken with TakeRecord.
  void EndStep(const Scheduler& scheduler, const KvCache& kv, size_t num_ended, int64_t took_ns);

  uint64_t iter() const { return iteration_.iter; }
  const psm_engine_stats& totals() const { return totals_; }
  // The step's record, complete but for num_queued_requests; begins a new one.
  psm_iteration_stats TakeRecord();

 private:
  psm_engine_stats totals_{};
  psm_iteration_stats iteration_{};
  int64_t executor_ns_ = 0;
};

}  // namespace plansmith
