// SPDX-License-Identifier: Apache-2.0
#include "engine_config.h"

#include <algorithm>
#include <cstring>
#include <limits>

#include "abi.h"
#include "kv_cache.h"
#include "status.h"

namespace plansmith {
namespace {

constexpr uint64_t kDefaultMaxKvBytes = uint64_t{1} << 30;
constexpr int32_t kDefaultDraftLen = 8;

#define END(field) PSM_FIELD_END(psm_executor, field)
const FieldEnds kExecutorEnds = {
    END(close),          END(last_error), END(copy_blocks), END(open_host), END(load_adapter),
    END(unload_adapter), END(now_ns),     END(launch),      END(collect),   END(profile)};
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
                                      END(draft_executor),
                                      END(queue_order)};
#undef END

psm_executor ReadExecutor(const psm_executor* executor) {
  const psm_executor e = ReadStruct("psm_executor", executor, psm_executor{}, kExecutorEnds);
  const struct {
    const char* name;
    bool present;
  } functions[] = {{"describe", e.describe != nullptr},
                   {"open", e.open != nullptr},
                   {"step", e.step != nullptr || e.launch != nullptr},
                   {"close", e.close != nullptr}};
  for (const auto& f : functions) {
    if (!f.present) {
      throw StatusError(
          PSM_ERROR_INVALID_ARGUMENT,
          Format("psm_executor.%s is NULL; only last_error and what follows it may be%s", f.name,
                 std::strcmp(f.name, "step") == 0 ? ", or step where launch and collect are there"
                                                  : ""));
    }
  }
  if ((e.launch != nullptr) != (e.collect != nullptr)) {
    throw StatusError(
        PSM_ERROR_INVALID_ARGUMENT,
        Format("psm_executor.%s is NULL but %s is not; a step in two halves needs both, a step in "
               "one call neither",
               e.launch == nullptr ? "launch" : "collect",
               e.launch == nullptr ? "collect" : "launch"));
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

// Without halves anything but candidates is none: before ABI 1.2 the field was padding.
void CheckSamplesRows(const psm_executor& executor, psm_model_info* info) {
  const int32_t found = info->samples_rows;
  if (executor.collect == nullptr) {
    if (found != PSM_SAMPLES_CANDIDATES) info->samples_rows = PSM_SAMPLES_NONE;
  } else if (found != PSM_SAMPLES_NONE && found != PSM_SAMPLES_ALL) {
    throw StatusError(PSM_ERROR_EXECUTOR,
                      Format("the executor describes samples_rows = %d, 0 or 1 is wanted of one "
                             "with collect; fix its describe function",
                             found));
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
  CheckInfoField("max_logits_rows", info.max_logits_rows, 0);
  CheckInfoField("max_adapters", info.max_adapters, 0);
  CheckInfoField("max_adapter_rank", info.max_adapter_rank, 0);
  CheckInfoField("kv_bytes_per_block", info.kv_bytes_per_block != 0, 1);
  info.struct_size = PSM_MODEL_INFO_SIZE;
  CheckSamplesRows(executor, &info);
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

void CheckRange(const char* name, int32_t value, int32_t least, int32_t most) {
  if (value < least || value > most) {
    throw StatusError(PSM_ERROR_INVALID_ARGUMENT,
                      Format("%s is %d, wanted %d to %d", name, value, least, most));
  }
}

void CheckDraftOptions(psm_engine_options* o) {
  CheckRange("draft_mode", o->draft_mode, PSM_DRAFT_OFF, PSM_DRAFT_NGRAM);
  CheckRange("max_draft_len", o->max_draft_len, 0, 64);
  if (o->ngram_max == 0) o->ngram_max = 4;
  if (o->ngram_min == 0) o->ngram_min = std::min(2, o->ngram_max);
  CheckRange("ngram_max", o->ngram_max, 1, 16);
  CheckRange("ngram_min", o->ngram_min, 1, o->ngram_max);
  if ((o->draft_mode == PSM_DRAFT_MODEL) != (o->draft_executor != nullptr)) {
    throw StatusError(PSM_ERROR_INVALID_ARGUMENT,
                      o->draft_mode == PSM_DRAFT_MODEL
                          ? "draft_mode is PSM_DRAFT_MODEL but draft_executor is NULL; give the "
                            "executor of the draft engine"
                          : "draft_executor is set but draft_mode is not PSM_DRAFT_MODEL; set both "
                            "or neither");
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
  CheckFlag("enable_block_reuse", o->enable_block_reuse);
  CheckFlag("enable_partial_reuse", o->enable_partial_reuse);
  CheckFlag("adaptive_draft_len", o->adaptive_draft_len);
  CheckRange("host_offload_min_priority", o->host_offload_min_priority, PSM_MIN_RETENTION,
             PSM_MAX_RETENTION);
  CheckRange("max_kv_events", o->max_kv_events, 0, std::numeric_limits<int32_t>::max());
  CheckRange("chunking_policy", o->chunking_policy, PSM_CHUNK_FIRST_COME_FIRST_SERVED,
             PSM_CHUNK_EQUAL_PROGRESS);
  CheckRange("pause_policy", o->pause_policy, PSM_PAUSE_AUTO, PSM_PAUSE_SWAP);
  if (!(o->max_tenant_share > 0.0f && o->max_tenant_share <= 1.0f)) {
    throw StatusError(PSM_ERROR_INVALID_ARGUMENT,
                      Format("max_tenant_share is %g, wanted more than 0 and at most 1 (1 = off)",
                             static_cast<double>(o->max_tenant_share)));
  }
  CheckRange("queue_order", o->queue_order, PSM_QUEUE_ARRIVAL, PSM_QUEUE_SHORTEST);
  CheckDraftOptions(o);
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

// The draft's limits against the engine's, field by field.
void CheckDraft(const EngineConfig& config) {
  const psm_model_info& target = config.info;
  const psm_model_info& draft = config.draft_info;
  const auto same = [](const char* name, int32_t of_draft, int32_t of_target) {
    if (of_draft == of_target) return;
    throw StatusError(PSM_ERROR_INVALID_ARGUMENT,
                      Format("the draft's %s is %d, the target's is %d; both must be the same: "
                             "build the draft from a checkpoint with the target's vocabulary and "
                             "with the same --tokens-per-block",
                             name, of_draft, of_target));
  };
  const auto at_least = [](const char* name, const char* flag, int32_t has, int32_t needs) {
    if (has >= needs) return;
    throw StatusError(PSM_ERROR_INVALID_ARGUMENT,
                      Format("the draft's %s is %d, the engine needs %d; rebuild the draft with %s "
                             "%d or narrow the engine's",
                             name, has, needs, flag, needs));
  };
  same("vocab_size", draft.vocab_size, target.vocab_size);
  same("tokens_per_block", draft.tokens_per_block, target.tokens_per_block);
  at_least("max_seq_len", "--max-seq-len", draft.max_seq_len, target.max_seq_len);
  at_least("max_batch_size", "--max-batch-size", draft.max_batch_size, target.max_batch_size);
  at_least("max_num_tokens", "--max-num-tokens", draft.max_num_tokens, target.max_batch_size);
}

// Unless the caller says otherwise, kDefaultDraftLen or what a step has rows for.
int32_t DraftLength(const EngineConfig& config) {
  if (config.options.max_draft_len != 0) return config.options.max_draft_len;
  const int32_t rows = std::min(config.info.max_num_tokens, config.info.max_logits_rows);
  return std::clamp(rows - 1, 1, kDefaultDraftLen);
}

// A sequence with all its draft tokens has to fit a step.
void CheckDraftLength(const EngineConfig& config) {
  const int32_t rows = 1 + config.options.max_draft_len;
  const auto fits = [&](const char* name, const char* flag, int32_t limit) {
    if (limit >= rows) return;
    throw StatusError(
        PSM_ERROR_INVALID_ARGUMENT,
        Format("max_draft_len is %d, which takes %d tokens and rows of logits in a "
               "step, but the engine's %s is %d; %sturn speculation off, or give %s %d (and build "
               "the engine with it where its plan has less)",
               config.options.max_draft_len, rows, name, limit,
               limit > 1 ? Format("lower max_draft_len to %d, ", limit - 1).c_str() : "", flag,
               rows));
  };
  fits("max_num_tokens", "--max-num-tokens", config.info.max_num_tokens);
  fits("max_logits_rows", "--max-batch-size", config.info.max_logits_rows);
}

int32_t HostBlocks(const EngineConfig& config) {
  if (config.options.host_cache_bytes == 0) {
    if (config.options.pause_policy != PSM_PAUSE_SWAP) return 0;
    throw StatusError(PSM_ERROR_INVALID_ARGUMENT,
                      "pause_policy is PSM_PAUSE_SWAP but host_cache_bytes is 0; give the bytes "
                      "to swap to");
  }
  const bool draft_can = config.options.draft_mode != PSM_DRAFT_MODEL || config.draft.open_host;
  if (!config.can_copy || config.executor.open_host == nullptr || !draft_can) {
    throw StatusError(PSM_ERROR_UNSUPPORTED,
                      "host_cache_bytes is set but the executor has no host blocks (copy_blocks "
                      "and open_host); leave it 0");
  }
  return KvCache::BlocksInBytes(config.options.host_cache_bytes, config.kv_bytes_per_block);
}

EngineConfig MakeEngineConfig(const psm_executor* executor, const psm_engine_options* options) {
  EngineConfig config{};
  psm_engine_options defaults{};
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
  info.max_logits_rows = std::min(info.max_logits_rows, info.max_num_tokens);
  if (info.max_logits_rows < info.max_batch_size) {
    throw StatusError(PSM_ERROR_EXECUTOR,
                      Format("the executor describes max_logits_rows = %d, its max_batch_size %d "
                             "needs as many; fix its describe function",
                             info.max_logits_rows, info.max_batch_size));
  }
  config.can_copy = config.executor.copy_blocks != nullptr;
  config.kv_bytes_per_block = info.kv_bytes_per_block;
  if (o.draft_mode == PSM_DRAFT_MODEL) {
    config.draft = ReadExecutor(o.draft_executor);
    if (config.draft.self == config.executor.self && config.draft.step == config.executor.step &&
        config.draft.launch == config.executor.launch &&
        config.draft.close == config.executor.close) {
      throw StatusError(PSM_ERROR_INVALID_ARGUMENT,
                        "draft_executor is the engine's own executor, which has one KV pool and is "
                        "closed once; open the plan a second time for the draft");
    }
    config.draft_info = Describe(config.draft);
    CheckDraft(config);
    config.can_copy = config.can_copy && config.draft.copy_blocks != nullptr;
    config.kv_bytes_per_block += config.draft_info.kv_bytes_per_block;
  }
  o.max_draft_len = DraftLength(config);
  if (o.draft_mode != PSM_DRAFT_OFF) CheckDraftLength(config);
  if (o.kv_cache_bytes == 0) {
    const uint64_t blocks_per_seq = (static_cast<uint64_t>(info.max_seq_len) +
                                     static_cast<uint64_t>(info.tokens_per_block) - 1) /
                                    static_cast<uint64_t>(info.tokens_per_block);
    const uint64_t blocks = blocks_per_seq * static_cast<uint64_t>(info.max_batch_size);
    o.kv_cache_bytes = blocks > kDefaultMaxKvBytes / config.kv_bytes_per_block
                           ? std::max(kDefaultMaxKvBytes, config.kv_bytes_per_block)
                           : blocks * config.kv_bytes_per_block;
  }
  config.num_blocks = KvCache::BlocksInBytes(o.kv_cache_bytes, config.kv_bytes_per_block);
  config.num_host_blocks = HostBlocks(config);
  return config;
}

}  // namespace plansmith
