// SPDX-License-Identifier: Apache-2.0
#include "engine.h"

#include <algorithm>
#include <exception>
#include <limits>
#include <new>
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
  s.chunking_policy = config.options.chunking_policy;
  s.pause_policy = config.options.pause_policy;
  s.max_tenant_share = config.options.max_tenant_share;
  s.queue_order = config.options.queue_order;
  return s;
}

KvCacheConfig MakeKvConfig(const EngineConfig& config) {
  KvCacheConfig c;
  c.num_blocks = config.num_blocks;
  c.tokens_per_block = config.info.tokens_per_block;
  c.num_host_blocks = config.num_host_blocks;
  c.host_offload_min_priority = config.options.host_offload_min_priority;
  c.can_copy = config.can_copy;
  c.enable_partial_reuse = config.options.enable_partial_reuse != 0;
  c.max_kv_events = config.options.max_kv_events;
  return c;
}

// What is assumed before copies have been measured: a PCIe 4.0 x16 link's. Too low a guess would
// never be corrected, because nothing would be copied.
constexpr double kAssumedCopyBytesPerNs = 25.0;

void CheckOpened(const EngineConfig& config, const psm_executor& executor, psm_status status,
                 const char* what, int32_t num_blocks, const char* option) {
  if (status == PSM_OK) return;
  const uint64_t bytes = static_cast<uint64_t>(num_blocks) * config.kv_bytes_per_block;
  throw StatusError(
      status == PSM_ERROR_OUT_OF_MEMORY ? status : PSM_ERROR_EXECUTOR,
      Format("%s could not open %d KV blocks (%llu bytes): %s: %s; lower %s if memory is short",
             what, num_blocks, static_cast<unsigned long long>(bytes), psm_status_name(status),
             ExecutorText(executor).c_str(), option));
}

void OpenExecutor(const EngineConfig& config, const psm_executor& executor, const char* what) {
  CheckOpened(config, executor, executor.open(executor.self, config.num_blocks), what,
              config.num_blocks, "kv_cache_bytes");
  if (config.num_host_blocks == 0) return;
  CheckOpened(config, executor, executor.open_host(executor.self, config.num_host_blocks), what,
              config.num_host_blocks, "host_cache_bytes");
}

}  // namespace

Engine::Engine(const EngineConfig& config)
    : config_(config),
      iterations_(static_cast<size_t>(config.options.iter_stats_max_iterations)),
      adapters_(config.executor.load_adapter != nullptr ? config.info.max_adapters : 0),
      kv_(MakeKvConfig(config)),
      scheduler_(MakeSchedulerConfig(config), &kv_),
      sampler_(config.info.vocab_size),
      batch_(config.info.max_batch_size, config.info.max_num_tokens,
             kv_.BlocksFor(config.info.max_seq_len),
             config.info.samples_rows == PSM_SAMPLES_CANDIDATES),
      stats_(config),
      copy_ns_per_block_(static_cast<double>(config.kv_bytes_per_block) / kAssumedCopyBytesPerNs) {
  speculator_ = std::make_unique<Speculator>(config_, &kv_, &sampler_, &guides_, &step_cost_);
  if (config_.info.samples_rows == PSM_SAMPLES_ALL) {
    sampling_ =
        std::make_unique<SamplingRows>(config_.info.vocab_size, config_.info.max_logits_rows);
  }
  NoteDrafts();
  LearnCosts();
  published_ = stats_.totals();
  OpenExecutor(config_, config_.executor, "the executor");
  if (config_.options.draft_mode == PSM_DRAFT_MODEL) {
    OpenExecutor(config_, config_.draft, "the draft executor");
  }
  if (config_.options.manual_step == 0) StartThread();
}

Engine::~Engine() {
  try {
    Shutdown();
  } catch (const std::exception&) {
    // No memory for the last events, which nobody will read. The thread has ended.
    for (const auto* events : {&pending_.events, &new_events_}) {
      for (const psm_event& event : *events) psm_logits_free(event.logits);
    }
  }
  config_.executor.close(config_.executor.self);
  if (config_.options.draft_mode == PSM_DRAFT_MODEL) config_.draft.close(config_.draft.self);
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

uint64_t Engine::Submit(std::vector<std::unique_ptr<Request>> sequences) {
  try {
    return Enqueue(&sequences);
  } catch (...) {
    if (!sequences.empty() && sequences.front()->guide != nullptr) {
      sequences.front()->guide->Disown();
    }
    throw;
  }
}

uint64_t Engine::Enqueue(std::vector<std::unique_ptr<Request>>* sequences) {
  const size_t n = sequences->size();
  auto group = std::make_shared<RequestGroup>();
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
    const uint64_t adapter_id = sequences->front()->adapter_id;
    const int32_t slot = adapter_id == 0 ? -1 : adapters_.Use(adapter_id, 0);
    ReserveAtLeast(&inbox_, inbox_.size() + n);
    id = group->id = next_id_;
    group->num_live = group->num_open = static_cast<int32_t>(n);
    LiveRequest& live = requests_[id];  // the last that can fail
    live.sequences = std::move(*sequences);
    if (adapter_id != 0) adapters_.Use(adapter_id, 1);
    for (const auto& request : live.sequences) {
      request->id = next_id_++;
      request->group = group;
      request->adapter_slot = slot;
      if (config_.options.enable_block_reuse == 0) request->prefix_key.private_id = id;
      num_guided_ += request->guide != nullptr;
      num_with_drafts_ += !request->caller_draft.empty();
      max_edits_ =
          std::max(max_edits_, SamplingRows::EditsAtMost(*request, config_.info.vocab_size));
      inbox_.push_back(request.get());
    }
    num_live_ += n;
    num_waiting_ += static_cast<int32_t>(n);
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
    if (found->second.is_cancelled) return;
    cancels_.push_back(&found->second);
    found->second.is_cancelled = true;
  }
  work_.notify_one();
}

// Holds step_mutex_. The engine's thread waits meanwhile: it would have the mutex again before
// anyone else woke up, for as long as there is work.
class Engine::BetweenSteps {
 public:
  explicit BetweenSteps(Engine* engine) : engine_(engine) {
    Count(1);
    lock_ = std::unique_lock<std::mutex>(engine->step_mutex_);
    try {
      engine->PublishPending();  // nothing waits for what may take its time here
    } catch (const std::exception&) {
      // The events keep until there is memory. The count has to go down again in any case.
    }
  }
  ~BetweenSteps() {
    lock_.unlock();
    Count(-1);
    engine_->work_.notify_all();
  }
  BetweenSteps(const BetweenSteps&) = delete;
  BetweenSteps& operator=(const BetweenSteps&) = delete;

 private:
  void Count(int32_t change) {
    std::lock_guard<std::mutex> lock(engine_->mutex_);
    engine_->num_between_steps_ += change;
  }

  Engine* engine_;
  std::unique_lock<std::mutex> lock_;
};

void Engine::LoadAdapter(uint64_t adapter_id, const psm_lora_module* modules, size_t num_modules) {
  if (config_.executor.load_adapter == nullptr || config_.executor.unload_adapter == nullptr ||
      config_.info.max_adapters == 0) {
    throw StatusError(PSM_ERROR_UNSUPPORTED,
                      "the executor takes no adapters; merge the adapter into the checkpoint and "
                      "build that, or open the executor with max_adapters above 0");
  }
  RefuseInsideStep("psm_engine_load_adapter");
  const BetweenSteps between(this);
  int32_t slot;
  {
    std::lock_guard<std::mutex> lock(mutex_);
    slot = adapters_.FreeSlot(adapter_id);
  }
  const psm_status status =
      config_.executor.load_adapter(config_.executor.self, slot, modules, num_modules);
  if (status != PSM_OK) {
    throw StatusError(status, Format("adapter %llu was not loaded: %s",
                                     static_cast<unsigned long long>(adapter_id),
                                     ExecutorText(config_.executor).c_str()));
  }
  std::lock_guard<std::mutex> lock(mutex_);
  adapters_.Add(adapter_id, slot);
}

void Engine::UnloadAdapter(uint64_t adapter_id) {
  RefuseInsideStep("psm_engine_unload_adapter");
  const BetweenSteps between(this);
  int32_t slot;
  {
    std::lock_guard<std::mutex> lock(mutex_);
    slot = adapters_.UnusedSlot(adapter_id);
    adapters_.Remove(adapter_id);
  }
  kv_.Forget({0, adapter_id, 0});
  const psm_status status = config_.executor.unload_adapter(config_.executor.self, slot);
  if (status != PSM_OK) {
    throw StatusError(PSM_ERROR_EXECUTOR,
                      Format("the executor could not let go of adapter %llu: %s",
                             static_cast<unsigned long long>(adapter_id),
                             ExecutorText(config_.executor).c_str()));
  }
}

void Engine::RefuseInsideStep(const char* function) {
  if (stepping_thread_.load() != std::this_thread::get_id()) return;
  throw StatusError(PSM_ERROR_INVALID_ARGUMENT,
                    Format("%s was called by the engine's own executor inside a step, which it "
                           "would wait for; call it from another thread",
                           function));
}

void Engine::Shutdown() {
  RefuseInsideStep("psm_engine_shutdown");
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
  Publish(false, 0, 0);
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
