// SPDX-License-Identifier: Apache-2.0
#include "engine.h"

#include <exception>
#include <limits>
#include <system_error>

#include "reserve.h"
#include "status.h"

namespace plansmith {
namespace {

SchedulerConfig MakeSchedulerConfig(const EngineConfig& config) {
  SchedulerConfig s;
  s.policy = config.options.scheduler_policy;
  s.max_batch_size = config.info.max_batch_size;
  s.max_num_tokens = config.info.max_num_tokens;
  s.max_logits_rows = config.info.max_logits_rows;
  s.enable_chunked_context = config.options.enable_chunked_context != 0;
  return s;
}

KvCacheConfig MakeKvConfig(const EngineConfig& config) {
  KvCacheConfig c;
  c.num_blocks = config.num_blocks;
  c.tokens_per_block = config.info.tokens_per_block;
  return c;
}

void OpenExecutor(const EngineConfig& config) {
  const psm_status status = config.executor.open(config.executor.self, config.num_blocks);
  if (status == PSM_OK) return;
  const uint64_t bytes = static_cast<uint64_t>(config.num_blocks) * config.info.kv_bytes_per_block;
  throw StatusError(status == PSM_ERROR_OUT_OF_MEMORY ? status : PSM_ERROR_EXECUTOR,
                    Format("the executor could not open %d KV blocks (%llu bytes): %s: %s; lower "
                           "kv_cache_bytes if memory is short",
                           config.num_blocks, static_cast<unsigned long long>(bytes),
                           psm_status_name(status), ExecutorText(config.executor).c_str()));
}

}  // namespace

Engine::Engine(const EngineConfig& config)
    : config_(config),
      iterations_(static_cast<size_t>(config.options.iter_stats_max_iterations)),
      kv_(MakeKvConfig(config)),
      scheduler_(MakeSchedulerConfig(config), &kv_),
      sampler_(config.info.vocab_size),
      batch_(config.info.max_batch_size, config.info.max_num_tokens,
             kv_.BlocksFor(config.info.max_seq_len)),
      stats_(config),
      next_deadline_ns_(std::numeric_limits<int64_t>::max()) {
  published_ = stats_.totals();
  OpenExecutor(config_);
  if (config_.options.manual_step == 0) StartThread();
}

Engine::~Engine() {
  try {
    Shutdown();
  } catch (const std::exception&) {
    // No memory for the last events, which nobody will read. The thread has ended.
  }
  config_.executor.close(config_.executor.self);
}

void Engine::StartThread() {
  try {
    thread_ = std::thread([this] { Run(); });
  } catch (const std::system_error& e) {
    throw StatusError(PSM_ERROR_OUT_OF_MEMORY,
                      Format("the engine's thread cannot start: %s; raise the limit of threads "
                             "(ulimit -u) or set manual_step",
                             e.what()));
  }
}

uint64_t Engine::Submit(std::unique_ptr<Request> request) {
  uint64_t id;
  {
    std::lock_guard<std::mutex> lock(mutex_);
    if (stopping_)
      throw StatusError(PSM_ERROR_SHUTDOWN, "the engine is shutting down and takes no requests");
    if (num_waiting_ >= config_.options.max_queue_size) {
      throw StatusError(PSM_ERROR_QUEUE_FULL,
                        Format("%d requests wait, max_queue_size is %d; try again later or raise "
                               "it",
                               num_waiting_, config_.options.max_queue_size));
    }
    ReserveAtLeast(&inbox_, inbox_.size() + 1);  // the last that can fail is the emplace
    id = request->id = next_id_;
    inbox_.push_back(requests_.emplace(id, std::move(request)).first->second.get());
    ++next_id_;
    ++num_waiting_;
    ++num_submitted_;
  }
  work_.notify_one();
  return id;
}

void Engine::Cancel(uint64_t request_id) {
  {
    std::lock_guard<std::mutex> lock(mutex_);
    const auto found = requests_.find(request_id);
    if (found == requests_.end()) {
      throw StatusError(PSM_ERROR_NOT_FOUND,
                        Format("no live request has the id %llu: it has finished or never was",
                               static_cast<unsigned long long>(request_id)));
    }
    Request* request = found->second.get();
    if (request->is_cancelled) return;
    cancels_.push_back(request);
    request->is_cancelled = true;
  }
  work_.notify_one();
}

void Engine::Shutdown() {
  if (stepping_thread_.load() == std::this_thread::get_id()) {
    throw StatusError(PSM_ERROR_INVALID_ARGUMENT,
                      "psm_engine_shutdown was called by the engine's own executor inside a step, "
                      "which it would wait for; call it from another thread");
  }
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

}  // namespace plansmith
