// SPDX-License-Identifier: Apache-2.0
#include "engine_config.h"

#include <algorithm>
#include <cstring>

#include "abi.h"
#include "kv_cache.h"
#include "status.h"

namespace plansmith {
namespace {

constexpr uint64_t kDefaultMaxKvBytes = uint64_t{1} << 30;

#define END(field) PSM_FIELD_END(psm_executor, field)
const FieldEnds kExecutorEnds = {END(close),     END(last_error),   END(copy_blocks),
                                 END(open_host), END(load_adapter), END(unload_adapter),
                                 END(now_ns)};
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
                                      END(manual_step),
                                      END(enable_block_reuse),
                                      END(enable_partial_reuse),
                                      END(host_cache_bytes),
                                      END(host_offload_min_priority),
                                      END(max_kv_events),
                                      END(chunking_policy),
                                      END(pause_policy),
                                      END(max_tenant_share),
                                      END(draft_mode),
                                      END(max_draft_len),
                                      END(adaptive_draft_len),
                                      END(ngram_max),
                                      END(ngram_min),
                                      END(draft_executor)};
#undef END

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
    throw StatusError(PSM_ERROR_EXECUTOR,
                      Format("the executor could not describe itself: %s: %s",
                             psm_status_name(status), ExecutorText(executor).c_str()));
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
  if (info.max_logits_rows == 0) info.max_logits_rows = info.max_batch_size;
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

}  // namespace

std::string ExecutorText(const psm_executor& executor) {
  const char* text = executor.last_error != nullptr ? executor.last_error(executor.self) : nullptr;
  return text != nullptr && *text != '\0' ? text : "it gave no reason";
}

EngineConfig MakeEngineConfig(const psm_executor* executor, const psm_engine_options* options) {
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

}  // namespace plansmith
