// The C API: argument checks, and exceptions to status codes.
//
// SPDX-License-Identifier: Apache-2.0
#include <cstring>
#include <memory>
#include <string>

#include "abi.h"
#include "engine.h"
#include "engine_config.h"
#include "request_check.h"
#include "status.h"

struct psm_engine {
  explicit psm_engine(const plansmith::EngineConfig& config) : impl(config) {}
  plansmith::Engine impl;
};

namespace plansmith {
namespace {

#define END(field) PSM_FIELD_END(psm_model_info, field)
const FieldEnds kModelInfoEnds = {
    END(vocab_size),       END(num_layers),       END(num_heads),         END(num_kv_heads),
    END(head_dim),         END(max_batch_size),   END(max_num_tokens),    END(max_input_len),
    END(max_seq_len),      END(tokens_per_block), END(max_logits_rows),   END(max_adapters),
    END(max_adapter_rank), END(samples_rows),     END(kv_bytes_per_block)};
#undef END
#define END(field) PSM_FIELD_END(psm_engine_stats, field)
const FieldEnds kEngineStatsEnds = {END(iter), END(schedule_time_ns), END(copy_time_ns)};
#undef END

void CheckPointer(const void* pointer, const char* name) {
  if (pointer == nullptr) {
    throw StatusError(PSM_ERROR_INVALID_ARGUMENT, Format("%s is NULL; pass a valid pointer", name));
  }
}

}  // namespace
}  // namespace plansmith

using plansmith::CheckPointer;
using plansmith::Guard;
using plansmith::StatusError;

extern "C" {

// The init functions write what the struct was in ABI 1.0 and no byte more, whatever is appended:
// an old caller's struct ends there.
void psm_engine_options_init(psm_engine_options* options) {
  if (options == nullptr) return;
  constexpr size_t kSize = PSM_SIZE_UP_TO_(psm_engine_options, draft_executor);
  std::memset(options, 0, kSize);
  options->struct_size = kSize;
  options->scheduler_policy = PSM_GUARANTEED_NO_EVICT;
  options->enable_chunked_context = 1;
  options->max_queue_size = 1024;
  options->iter_stats_max_iterations = 1000;
  options->enable_block_reuse = 1;
  options->enable_partial_reuse = 1;
  options->host_offload_min_priority = PSM_DEFAULT_RETENTION;
  options->max_tenant_share = 1.0f;
  options->max_draft_len = 8;
  options->adaptive_draft_len = 1;
  options->ngram_max = 4;
  options->ngram_min = 2;
}

psm_status psm_engine_create(const psm_executor* executor, const psm_engine_options* options,
                             psm_engine** out) {
  return Guard([&] {
    CheckPointer(out, "out");
    *out = nullptr;
    CheckPointer(executor, "executor");
    *out = new psm_engine(plansmith::MakeEngineConfig(executor, options));
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
  constexpr size_t kSize = PSM_SIZE_UP_TO_(psm_request, guide);
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

psm_status psm_engine_profile(psm_engine* engine, psm_op_profile* ops, size_t capacity,
                              size_t* num_ops) {
  return Guard([&] {
    CheckPointer(num_ops, "num_ops");
    *num_ops = 0;
    CheckPointer(engine, "engine");
    if (capacity > 0) CheckPointer(ops, "ops");
    const psm_executor& executor = engine->impl.config().executor;
    if (executor.profile == nullptr) {
      throw StatusError(PSM_ERROR_UNSUPPORTED,
                        "the engine's executor keeps no profile; make the cpu executor with "
                        "psm_cpu_options.profile = 1");
    }
    const psm_status status = executor.profile(executor.self, ops, capacity, num_ops);
    if (status == PSM_OK) return;
    const std::string text = psm_last_error();  // of an executor of this library
    throw StatusError(status == PSM_ERROR_BUFFER_TOO_SMALL ? status : PSM_ERROR_EXECUTOR,
                      text.empty() ? psm_status_text(status) : text);
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

psm_status psm_engine_load_adapter(psm_engine* engine, uint64_t adapter_id,
                                   const psm_lora_module* modules, size_t num_modules) {
  return Guard([&] {
    CheckPointer(engine, "engine");
    CheckPointer(modules, "modules");
    engine->impl.LoadAdapter(adapter_id, modules, num_modules);
  });
}

psm_status psm_engine_unload_adapter(psm_engine* engine, uint64_t adapter_id) {
  return Guard([&] {
    CheckPointer(engine, "engine");
    engine->impl.UnloadAdapter(adapter_id);
  });
}

psm_status psm_engine_kv_events(psm_engine* engine, psm_kv_event* events, size_t max_events,
                                int32_t* token_ids, size_t max_token_ids, size_t* num_events) {
  return Guard([&] {
    CheckPointer(num_events, "num_events");
    *num_events = 0;
    CheckPointer(engine, "engine");
    if (max_events == 0) return;
    CheckPointer(events, "events");
    CheckPointer(token_ids, "token_ids");
    const size_t least = static_cast<size_t>(engine->impl.info().tokens_per_block);
    if (max_token_ids < least) {
      throw StatusError(PSM_ERROR_INVALID_ARGUMENT,
                        plansmith::Format("max_token_ids is %zu, one block's tokens take %zu; give "
                                          "room for at least that",
                                          max_token_ids, least));
    }
    *num_events = engine->impl.TakeKvEvents(events, max_events, token_ids, max_token_ids);
  });
}

void psm_logits_free(float* logits) { delete[] logits; }

}  // extern "C"
