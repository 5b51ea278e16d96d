// The C API: argument checks, and exceptions to status codes.
//
// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <cmath>
#include <cstring>
#include <memory>

#include "abi.h"
#include "engine.h"
#include "request_check.h"
#include "status.h"

struct psm_engine {
  explicit psm_engine(const plansmith::EngineConfig& config) : impl(config) {}
  plansmith::Engine impl;
};

namespace plansmith {
namespace {

constexpr uint64_t kDefaultMaxKvBytes = uint64_t{1} << 30;

#define END(field) PSM_FIELD_END(psm_executor, field)
const FieldEnds kExecutorEnds = {END(close), END(last_error)};
#undef END
#define END(field) PSM_FIELD_END(psm_model_info, field)
const FieldEnds kModelInfoEnds = {
    END(vocab_size),  END(num_layers),       END(num_heads),         END(num_kv_heads),
    END(head_dim),    END(max_batch_size),   END(max_num_tokens),    END(max_input_len),
    END(max_seq_len), END(tokens_per_block), END(kv_bytes_per_block)};
#undef END
#define END(field) PSM_FIELD_END(psm_engine_options, field)
const FieldEnds kEngineOptionsEnds = {sizeof(size_t),
                                      END(scheduler_policy),
                                      END(max_batch_size),
                                      END(max_num_tokens),
                                      END(enable_chunked_context),
                                      END(max_queue_size),
                                      END(iter_stats_max_iterations),
                                      END(kv_cache_bytes),
                                      END(manual_step)};
#undef END
#define END(field) PSM_FIELD_END(psm_engine_stats, field)
const FieldEnds kEngineStatsEnds = {END(iter), END(schedule_time_ns)};
#undef END

void CheckPointer(const void* pointer, const char* name) {
  if (pointer == nullptr) {
    throw StatusError(PSM_ERROR_INVALID_ARGUMENT, Format("%s is NULL; pass a valid pointer", name));
  }
}

psm_executor ReadExecutor(const psm_executor* executor) {
  const psm_executor e = ReadStruct("psm_executor", executor, psm_executor{}, kExecutorEnds);
  const struct {
    const char* name;
    bool present;
  } functions[] = {{"describe", e.describe != nullptr},
                   {"open", e.open != nullptr},
                   {"step", e.step != nullptr},
                   {"close", e.close != nullptr}};
  for (const auto& f : functions) {
    if (!f.present) {
      throw StatusError(PSM_ERROR_INVALID_ARGUMENT,
                        Format("psm_executor.%s is NULL; only last_error may be left out", f.name));
    }
  }
  return e;
}

void CheckInfoField(const char* name, int64_t value, int64_t least) {
  if (value < least) {
    throw StatusError(
        PSM_ERROR_EXECUTOR,
        Format(
            "the executor describes %s = %lld, at least %lld is wanted; fix its describe function",
            name, static_cast<long long>(value), static_cast<long long>(least)));
  }
}

psm_model_info Describe(const psm_executor& executor) {
  psm_model_info info{};
  info.struct_size = PSM_MODEL_INFO_SIZE;
  const psm_status status = executor.describe(executor.self, &info);
  if (status != PSM_OK) {
    const char* text =
        executor.last_error != nullptr ? executor.last_error(executor.self) : nullptr;
    throw StatusError(PSM_ERROR_EXECUTOR,
                      Format("the executor could not describe itself: %s: %s",
                             psm_status_name(status), text != nullptr ? text : "no reason given"));
  }
  CheckInfoField("vocab_size", info.vocab_size, 1);
  CheckInfoField("num_layers", info.num_layers, 0);
  CheckInfoField("num_heads", info.num_heads, 0);
  CheckInfoField("num_kv_heads", info.num_kv_heads, 0);
  CheckInfoField("head_dim", info.head_dim, 0);
  CheckInfoField("max_batch_size", info.max_batch_size, 1);
  CheckInfoField("max_num_tokens", info.max_num_tokens, 1);
  CheckInfoField("max_input_len", info.max_input_len, 1);
  CheckInfoField("max_seq_len", info.max_seq_len, info.max_input_len);
  CheckInfoField("tokens_per_block", info.tokens_per_block, 1);
  CheckInfoField("kv_bytes_per_block", info.kv_bytes_per_block != 0, 1);
  info.struct_size = PSM_MODEL_INFO_SIZE;
  return info;
}

int32_t NarrowLimit(const char* name, int32_t asked, int32_t executors) {
  if (asked < 0 || asked > executors) {
    throw StatusError(PSM_ERROR_INVALID_ARGUMENT,
                      Format("%s is %d, the executor takes 1 to %d (0 = all of it); ask for less "
                             "or rebuild the plan "
                             "with a higher limit",
                             name, asked, executors));
  }
  return asked == 0 ? executors : asked;
}

void CheckFlag(const char* name, int32_t value) {
  if (value != 0 && value != 1) {
    throw StatusError(PSM_ERROR_INVALID_ARGUMENT, Format("%s is %d, wanted 0 or 1", name, value));
  }
}

void CheckOptions(psm_engine_options* o) {
  if (o->scheduler_policy != PSM_GUARANTEED_NO_EVICT &&
      o->scheduler_policy != PSM_MAX_UTILIZATION) {
    throw StatusError(PSM_ERROR_INVALID_ARGUMENT,
                      Format("scheduler_policy is %d, wanted PSM_GUARANTEED_NO_EVICT (%d) or "
                             "PSM_MAX_UTILIZATION (%d)",
                             o->scheduler_policy, PSM_GUARANTEED_NO_EVICT, PSM_MAX_UTILIZATION));
  }
  CheckFlag("enable_chunked_context", o->enable_chunked_context);
  CheckFlag("manual_step", o->manual_step);
  if (o->max_queue_size < 0) {
    throw StatusError(
        PSM_ERROR_INVALID_ARGUMENT,
        Format("max_queue_size is %d, wanted at least 1 (or 0 for 1024)", o->max_queue_size));
  }
  if (o->max_queue_size == 0) o->max_queue_size = 1024;
  if (o->iter_stats_max_iterations < 0) {
    throw StatusError(PSM_ERROR_INVALID_ARGUMENT,
                      Format("iter_stats_max_iterations is %d, wanted 0 (keep none) or more",
                             o->iter_stats_max_iterations));
  }
}

EngineConfig MakeConfig(const psm_executor* executor, const psm_engine_options* options) {
  EngineConfig config{};
  psm_engine_options defaults;
  psm_engine_options_init(&defaults);
  config.executor = ReadExecutor(executor);
  config.options = options == nullptr
                       ? defaults
                       : ReadStruct("psm_engine_options", options, defaults, kEngineOptionsEnds);
  psm_engine_options& o = config.options;
  CheckOptions(&o);
  config.info = Describe(config.executor);
  psm_model_info& info = config.info;
  info.max_num_tokens = NarrowLimit("max_num_tokens", o.max_num_tokens, info.max_num_tokens);
  info.max_batch_size = NarrowLimit("max_batch_size", o.max_batch_size, info.max_batch_size);
  // Every running request must be able to generate in the same step.
  info.max_batch_size = std::min(info.max_batch_size, info.max_num_tokens);
  if (o.kv_cache_bytes == 0) {
    const uint64_t blocks_per_seq = (static_cast<uint64_t>(info.max_seq_len) +
                                     static_cast<uint64_t>(info.tokens_per_block) - 1) /
                                    static_cast<uint64_t>(info.tokens_per_block);
    const uint64_t blocks = blocks_per_seq * static_cast<uint64_t>(info.max_batch_size);
    o.kv_cache_bytes = blocks > kDefaultMaxKvBytes / info.kv_bytes_per_block
                           ? std::max(kDefaultMaxKvBytes, info.kv_bytes_per_block)
                           : blocks * info.kv_bytes_per_block;
  }
  config.num_blocks = KvCache::BlocksInBytes(o.kv_cache_bytes, info.kv_bytes_per_block);
  return config;
}

}  // namespace
}  // namespace plansmith

using plansmith::CheckPointer;
using plansmith::Guard;
using plansmith::StatusError;

extern "C" {

// The init functions write what the struct was in ABI 0.1 and no byte more, whatever is appended:
// an old caller's struct ends there.
void psm_engine_options_init(psm_engine_options* options) {
  if (options == nullptr) return;
  constexpr size_t kSize = PSM_SIZE_UP_TO_(psm_engine_options, manual_step);
  std::memset(options, 0, kSize);
  options->struct_size = kSize;
  options->scheduler_policy = PSM_GUARANTEED_NO_EVICT;
  options->enable_chunked_context = 1;
  options->max_queue_size = 1024;
  options->iter_stats_max_iterations = 1000;
}

psm_status psm_engine_create(const psm_executor* executor, const psm_engine_options* options,
                             psm_engine** out) {
  return Guard([&] {
    CheckPointer(out, "out");
    *out = nullptr;
    CheckPointer(executor, "executor");
    *out = new psm_engine(plansmith::MakeConfig(executor, options));
  });
}

void psm_engine_destroy(psm_engine* engine) { delete engine; }

psm_status psm_engine_shutdown(psm_engine* engine) {
  return Guard([&] {
    CheckPointer(engine, "engine");
    engine->impl.Shutdown();
  });
}

psm_status psm_engine_model_info(psm_engine* engine, psm_model_info* info) {
  return Guard([&] {
    CheckPointer(engine, "engine");
    CheckPointer(info, "info");
    plansmith::WriteStruct("psm_model_info", engine->impl.info(), info, plansmith::kModelInfoEnds);
  });
}

psm_status psm_engine_step(psm_engine* engine, int32_t* did_work) {
  return Guard([&] {
    CheckPointer(did_work, "did_work");
    *did_work = 0;
    CheckPointer(engine, "engine");
    if (engine->impl.config().options.manual_step == 0) {
      throw StatusError(
          PSM_ERROR_UNSUPPORTED,
          "this engine steps in its own thread; set psm_engine_options.manual_step = 1 to step it");
    }
    *did_work = engine->impl.StepOnce() ? 1 : 0;
  });
}

void psm_request_init(psm_request* request) {
  if (request == nullptr) return;
  constexpr size_t kSize = PSM_SIZE_UP_TO_(psm_request, client_id);
  const psm_request defaults = plansmith::DefaultRequest();
  std::memcpy(request, &defaults, kSize);
  request->struct_size = kSize;
}

psm_status psm_engine_submit(psm_engine* engine, const psm_request* request, uint64_t* request_id) {
  return Guard([&] {
    CheckPointer(request_id, "request_id");
    *request_id = 0;
    CheckPointer(engine, "engine");
    CheckPointer(request, "request");
    *request_id = engine->impl.Submit(plansmith::CheckRequest(*request, engine->impl.config()));
  });
}

psm_status psm_engine_cancel(psm_engine* engine, uint64_t request_id) {
  return Guard([&] {
    CheckPointer(engine, "engine");
    engine->impl.Cancel(request_id);
  });
}

psm_status psm_engine_poll(psm_engine* engine, psm_event* events, size_t max_events,
                           int32_t timeout_ms, size_t* num_events) {
  return Guard([&] {
    CheckPointer(num_events, "num_events");
    *num_events = 0;
    CheckPointer(engine, "engine");
    if (max_events > 0) CheckPointer(events, "events");
    if (timeout_ms < -1) {
      throw StatusError(
          PSM_ERROR_INVALID_ARGUMENT,
          plansmith::Format("timeout_ms is %d, wanted -1 (for ever), 0 (not at all) or more",
                            timeout_ms));
    }
    const int64_t n = engine->impl.events().Poll(events, max_events, timeout_ms);
    if (n < 0) {
      throw StatusError(PSM_ERROR_SHUTDOWN,
                        "the engine was shut down and all its events are taken; destroy it");
    }
    *num_events = static_cast<size_t>(n);
  });
}

int32_t psm_engine_event_fd(psm_engine* engine) {
  return engine == nullptr ? -1 : engine->impl.events().fd();
}

psm_status psm_engine_wake(psm_engine* engine) {
  return Guard([&] {
    CheckPointer(engine, "engine");
    engine->impl.events().Wake();
  });
}

psm_status psm_engine_get_stats(psm_engine* engine, psm_engine_stats* stats) {
  return Guard([&] {
    CheckPointer(engine, "engine");
    CheckPointer(stats, "stats");
    plansmith::WriteStruct("psm_engine_stats", engine->impl.Stats(), stats,
                           plansmith::kEngineStatsEnds);
  });
}

psm_status psm_engine_iteration_stats(psm_engine* engine, psm_iteration_stats* records,
                                      size_t max_records, size_t* num_records) {
  return Guard([&] {
    CheckPointer(num_records, "num_records");
    *num_records = 0;
    CheckPointer(engine, "engine");
    if (max_records > 0) CheckPointer(records, "records");
    *num_records = engine->impl.TakeIterationStats(records, max_records);
  });
}

}  // extern "C"
