// SPDX-License-Identifier: Apache-2.0
#include "step_stats.h"

#include <algorithm>

namespace plansmith {
namespace {

double Ms(int64_t ns) { return static_cast<double>(ns) * 1e-6; }

}  // namespace

StepStats::StepStats(const EngineConfig& config) {
  totals_.max_num_blocks = totals_.free_num_blocks = config.num_blocks;
  totals_.tokens_per_block = config.info.tokens_per_block;
  totals_.max_num_active_requests = config.info.max_batch_size;
  totals_.kv_cache_bytes =
      static_cast<uint64_t>(config.num_blocks) * config.info.kv_bytes_per_block;
}

void StepStats::BeginStep(const StepPlan& plan, const KvCache& kv, int64_t begin_ns) {
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
      static_cast<uint64_t>(kv.num_used()) * static_cast<uint64_t>(kv.tokens_per_block());
}

void StepStats::AddExecutorTime(int64_t took_ns) {
  executor_ns_ = took_ns;
  totals_.step_time_ns += static_cast<uint64_t>(took_ns);
  iteration_.executor_latency_ms = Ms(took_ns);
}

void StepStats::AddHeldPositions(const Scheduler& scheduler) {
  for (const Request* request : scheduler.running()) {
    totals_.kv_used_token_steps += static_cast<uint64_t>(request->num_computed);
  }
}

void StepStats::EndStep(const Scheduler& scheduler, const KvCache& kv, size_t num_ended,
                        int64_t took_ns) {
  totals_.num_completed_requests += num_ended;
  iteration_.num_completed_requests = static_cast<int32_t>(num_ended);
  totals_.num_paused_requests = iteration_.num_paused_requests = scheduler.num_paused();
  totals_.num_active_requests = iteration_.num_active_requests =
      static_cast<int32_t>(scheduler.running().size()) + scheduler.num_paused();
  totals_.free_num_blocks = iteration_.free_num_blocks = kv.num_free();
  totals_.used_num_blocks = iteration_.used_num_blocks = kv.num_used();
  totals_.alloc_total_blocks = totals_.alloc_new_blocks = kv.num_allocations();
  iteration_.iter_latency_ms = Ms(took_ns);
  totals_.schedule_time_ns += static_cast<uint64_t>(std::max<int64_t>(0, took_ns - executor_ns_));
}

psm_iteration_stats StepStats::TakeRecord() {
  const psm_iteration_stats record = iteration_;
  iteration_ = {};
  executor_ns_ = 0;
  return record;
}

}  // namespace plansmith
