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
  totals_.kv_cache_bytes = static_cast<uint64_t>(config.num_blocks) * config.kv_bytes_per_block;
  totals_.host_max_num_blocks = config.num_host_blocks;
}

void StepStats::BeginStep(const StepPlan& plan, const KvCache& kv, int64_t begin_ns) {
  iteration_.iter = totals_.iter++;
  iteration_.timestamp_ns = begin_ns;
  iteration_.num_context_requests = static_cast<int32_t>(plan.context.size());
  iteration_.num_gen_requests = static_cast<int32_t>(plan.generation.size());
  iteration_.num_scheduled_requests = iteration_.num_context_requests + iteration_.num_gen_requests;
  iteration_.num_ctx_tokens = plan.num_context_tokens;
  for (const ScheduledSeq& seq : plan.generation) {
    iteration_.num_gen_tokens += seq.request->width();
  }
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

void StepStats::AddCopyTime(int64_t took_ns) {
  executors_machine_ns_ += took_ns;
  totals_.copy_time_ns += static_cast<uint64_t>(took_ns);
}

void StepStats::AddDrafts(const DraftOutcome& outcome, int64_t machine_ns) {
  executors_machine_ns_ += machine_ns;
  totals_.num_draft_tokens += static_cast<uint64_t>(outcome.num_draft_tokens);
  totals_.num_requests_with_draft_tokens += static_cast<uint64_t>(outcome.num_requests);
  totals_.num_failed_drafts += outcome.failed;
  totals_.draft_time_ns += static_cast<uint64_t>(outcome.took_ns);
  iteration_.num_draft_tokens = outcome.num_draft_tokens;
  iteration_.num_requests_with_draft_tokens = outcome.num_requests;
  iteration_.draft_latency_ms = Ms(outcome.took_ns);
}

void StepStats::AddAccepted(int32_t num_tokens) {
  totals_.num_accepted_draft_tokens += static_cast<uint64_t>(num_tokens);
  iteration_.num_accepted_draft_tokens += num_tokens;
}

void StepStats::AddExecutorTime(int64_t took_ns, int64_t machine_ns) {
  executors_machine_ns_ += machine_ns;
  totals_.step_time_ns += static_cast<uint64_t>(took_ns);
  iteration_.executor_latency_ms = Ms(took_ns);
}

// What is not used is the rest behind each sequence's last position; the blocks there are its own.
void StepStats::AddHeldPositions(const Scheduler& scheduler, const KvCache& kv) {
  int64_t unused = 0;
  const auto count = [&](const KvSequence& sequence, int32_t num_positions) {
    unused += static_cast<int64_t>(sequence.blocks.size()) * kv.tokens_per_block() - num_positions;
  };
  for (const Request* request : scheduler.running()) {
    if (request->beams == nullptr || !request->beams->running()) {
      count(request->kv, request->num_computed);
    } else {
      for (const Beam& beam : request->beams->beams()) count(beam.kv, request->num_computed);
    }
  }
  const int64_t held = static_cast<int64_t>(kv.num_used()) * kv.tokens_per_block();
  totals_.kv_used_token_steps += static_cast<uint64_t>(std::max<int64_t>(0, held - unused));
}

void StepStats::AddRetired(const psm_request_stats& stats) {
  totals_.reused_blocks += static_cast<uint64_t>(stats.reused_blocks);
  totals_.missed_blocks += static_cast<uint64_t>(stats.missed_blocks);
  totals_.reused_tokens += static_cast<uint64_t>(stats.reused_tokens);
}

void StepStats::EndStep(const Scheduler& scheduler, const KvCache& kv, size_t num_ended,
                        int64_t took_ns, int64_t machine_ns) {
  totals_.num_completed_requests += num_ended;
  iteration_.num_completed_requests = static_cast<int32_t>(num_ended);
  totals_.num_paused_requests = iteration_.num_paused_requests = scheduler.num_paused();
  totals_.num_active_requests = iteration_.num_active_requests =
      static_cast<int32_t>(scheduler.running().size()) + scheduler.num_paused();
  totals_.free_num_blocks = iteration_.free_num_blocks = kv.num_free();
  totals_.used_num_blocks = iteration_.used_num_blocks = kv.num_used();
  totals_.alloc_total_blocks = totals_.alloc_new_blocks = kv.num_allocations();
  totals_.cached_num_blocks = kv.num_cached();
  totals_.host_used_num_blocks = kv.num_host_used();
  totals_.offloaded_blocks = kv.num_offloaded();
  totals_.onboarded_blocks = kv.num_onboarded();
  iteration_.iter_latency_ms = Ms(took_ns);
  totals_.schedule_time_ns +=
      static_cast<uint64_t>(std::max<int64_t>(0, machine_ns - executors_machine_ns_));
}

psm_iteration_stats StepStats::TakeRecord() {
  const psm_iteration_stats record = iteration_;
  iteration_ = {};
  executors_machine_ns_ = 0;
  return record;
}

}  // namespace plansmith
