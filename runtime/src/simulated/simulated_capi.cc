// The simulated executor as a psm_executor.
//
// SPDX-License-Identifier: Apache-2.0
#include <string.h>

#include <memory>
#include <string>

#include "abi.h"
#include "plansmith/plansmith.h"
#include "simulated/executor.h"
#include "status.h"

namespace plansmith {
namespace simulated {
namespace {

// What the table's self points to.
struct Handle {
  explicit Handle(const psm_simulated_options& options) : executor(options) {}
  Executor executor;
  std::string last_error;
};

// Like Guard, and keeps the text for last_error().
template <typename Body>
psm_status Run(void* self, Body&& body) {
  Handle* handle = static_cast<Handle*>(self);
  const psm_status status = Guard([&] { body(handle->executor); });
  if (status != PSM_OK) handle->last_error = psm_last_error();
  return status;
}

psm_status DescribeEntry(void* self, psm_model_info* info) {
  return Run(self, [&](Executor& executor) {
    if (info == nullptr) throw StatusError(PSM_ERROR_INVALID_ARGUMENT, "info is NULL");
    WriteStruct("psm_model_info", executor.info(), info,
                {PSM_FIELD_END(psm_model_info, tokens_per_block), PSM_MODEL_INFO_SIZE});
  });
}

psm_status OpenEntry(void* self, int32_t num_blocks) {
  return Run(self, [&](Executor& executor) { executor.Open(num_blocks); });
}

psm_status OpenHostEntry(void* self, int32_t num_blocks) {
  return Run(self, [&](Executor& executor) { executor.OpenHost(num_blocks); });
}

psm_status StepEntry(void* self, const psm_batch* batch, const float** logits) {
  return Run(self, [&](Executor& executor) {
    if (batch == nullptr || logits == nullptr) {
      throw StatusError(PSM_ERROR_INVALID_ARGUMENT, "batch or logits is NULL");
    }
    *logits = nullptr;
    *logits = executor.Step(*batch);
  });
}

psm_status CopyEntry(void* self, const psm_block_copy* copies, size_t num_copies) {
  return Run(self, [&](Executor& executor) {
    if (copies == nullptr && num_copies > 0) {
      throw StatusError(PSM_ERROR_INVALID_ARGUMENT, "copies is NULL");
    }
    executor.CopyBlocks(copies, num_copies);
  });
}

psm_status LoadEntry(void* self, int32_t slot, const psm_lora_module* modules, size_t num_modules) {
  return Run(self, [&](Executor& executor) { executor.LoadAdapter(slot, modules, num_modules); });
}

psm_status UnloadEntry(void* self, int32_t slot) {
  return Run(self, [&](Executor& executor) { executor.UnloadAdapter(slot); });
}

int64_t NowEntry(void* self) { return static_cast<Handle*>(self)->executor.now_ns(); }

void CloseEntry(void* self) { delete static_cast<Handle*>(self); }

const char* LastErrorEntry(void* self) {
  const std::string& text = static_cast<Handle*>(self)->last_error;
  return text.empty() ? nullptr : text.c_str();
}

}  // namespace
}  // namespace simulated
}  // namespace plansmith

extern "C" {

// A toy of 64 tokens on something like a small GPU: 1 MB of weights in 1 us.
void psm_simulated_options_init(psm_simulated_options* options) {
  if (options == nullptr) return;
  memset(options, 0, PSM_SIMULATED_OPTIONS_SIZE);
  options->struct_size = PSM_SIMULATED_OPTIONS_SIZE;
  psm_model_info& info = options->info;
  info.struct_size = PSM_MODEL_INFO_SIZE;
  info.vocab_size = 64;
  info.num_layers = 2;
  info.num_heads = 4;
  info.num_kv_heads = 2;
  info.head_dim = 16;
  info.max_batch_size = 64;
  info.max_num_tokens = 512;
  info.max_input_len = 1024;
  info.max_seq_len = 2048;
  info.tokens_per_block = 16;
  info.max_logits_rows = 512;
  info.max_adapters = 8;
  info.max_adapter_rank = 64;
  info.kv_bytes_per_block = 2 * 2 * 2 * 16 * 16 * 2;  // K and V, L, KVH, D, tokens, float16
  options->weight_bytes = 1000000;
  options->flops_per_token = 1e6;
  options->memory_bytes_per_s = 1e12;
  options->flops_per_s = 1e14;
  options->host_copy_bytes_per_s = 2.5e10;
  options->overhead_us = 10;
}

psm_status psm_simulated_executor_create(const psm_simulated_options* options, psm_executor* out) {
  using namespace plansmith;
  constexpr size_t kSize = PSM_SIZE_UP_TO_(psm_executor, now_ns);  // an old caller's ends there
  if (out != nullptr) memset(out, 0, kSize);
  return Guard([&] {
    if (options == nullptr || out == nullptr) {
      throw StatusError(PSM_ERROR_INVALID_ARGUMENT, "options or out is NULL");
    }
    psm_simulated_options defaults;
    psm_simulated_options_init(&defaults);
    const psm_simulated_options read =
        ReadStruct("psm_simulated_options", options, defaults,
                   {PSM_FIELD_END(psm_simulated_options, info), PSM_SIMULATED_OPTIONS_SIZE});
    auto handle = std::make_unique<simulated::Handle>(read);
    out->struct_size = kSize;
    out->describe = simulated::DescribeEntry;
    out->open = simulated::OpenEntry;
    out->step = simulated::StepEntry;
    out->close = simulated::CloseEntry;
    out->last_error = simulated::LastErrorEntry;
    out->copy_blocks = simulated::CopyEntry;
    out->open_host = simulated::OpenHostEntry;
    out->load_adapter = simulated::LoadEntry;
    out->unload_adapter = simulated::UnloadEntry;
    out->now_ns = simulated::NowEntry;
    out->self = handle.release();
  });
}

}  // extern "C"
