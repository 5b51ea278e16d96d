// The CPU executor as a psm_executor.
//
// SPDX-License-Identifier: Apache-2.0
#include <string.h>

#include <memory>
#include <string>

#include "abi.h"
#include "cpu/executor.h"
#include "cpu/thread_pool.h"
#include "plansmith/plansmith.h"
#include "status.h"

namespace plansmith {
namespace cpu {
namespace {

constexpr int32_t kMaxThreads = 1024;
constexpr int32_t kMaxAdapters = 65536;
constexpr int32_t kMaxAdapterRank = 1024;

// What the table's self points to.
struct Handle {
  std::unique_ptr<Executor> executor;
  std::string last_error;
};

// Like Guard, and keeps the text for last_error().
template <typename Body>
psm_status Run(void* self, Body&& body) {
  Handle* handle = static_cast<Handle*>(self);
  const psm_status status = Guard([&] { body(*handle->executor); });
  if (status != PSM_OK) handle->last_error = psm_last_error();
  return status;
}

psm_status DescribeEntry(void* self, psm_model_info* info) {
  return Run(self, [&](Executor& executor) {
    if (info == nullptr) throw StatusError(PSM_ERROR_INVALID_ARGUMENT, "info is NULL");
    WriteStruct("psm_model_info", executor.Describe(), info, {PSM_MODEL_INFO_SIZE});
  });
}

psm_status OpenEntry(void* self, int32_t num_blocks) {
  return Run(self, [&](Executor& executor) { executor.Open(num_blocks); });
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

psm_status LoadAdapterEntry(void* self, int32_t slot, const psm_lora_module* modules,
                            size_t num_modules) {
  return Run(self, [&](Executor& executor) { executor.lora().Load(slot, modules, num_modules); });
}

psm_status UnloadAdapterEntry(void* self, int32_t slot) {
  return Run(self, [&](Executor& executor) { executor.lora().Unload(slot); });
}

psm_status CopyEntry(void* self, const psm_block_copy* copies, size_t num_copies) {
  return Run(self, [&](Executor& executor) { executor.CopyBlocks(copies, num_copies); });
}

psm_status OpenHostEntry(void* self, int32_t num_blocks) {
  return Run(self, [&](Executor& executor) { executor.OpenHost(num_blocks); });
}

void CloseEntry(void* self) { delete static_cast<Handle*>(self); }

const char* LastErrorEntry(void* self) {
  const std::string& text = static_cast<Handle*>(self)->last_error;
  return text.empty() ? nullptr : text.c_str();
}

void CheckRange(const char* name, int32_t value, int32_t most) {
  if (value >= 0 && value <= most) return;
  throw StatusError(PSM_ERROR_INVALID_ARGUMENT,
                    Format("%s is %d, wanted 0 (no adapters) to %d", name, value, most));
}

// The caller's options over the defaults. Fields behind those we know must be zero.
psm_cpu_options ReadOptions(const psm_cpu_options* given) {
  psm_cpu_options options;
  psm_cpu_options_init(&options);
  if (given == nullptr) return options;
  options = ReadStruct(
      "psm_cpu_options", given, options,
      {PSM_FIELD_END(psm_cpu_options, struct_size), PSM_FIELD_END(psm_cpu_options, num_threads),
       PSM_FIELD_END(psm_cpu_options, pin_threads), PSM_FIELD_END(psm_cpu_options, isa),
       PSM_FIELD_END(psm_cpu_options, max_adapters), PSM_CPU_OPTIONS_SIZE});
  if (options.num_threads < 0 || options.num_threads > kMaxThreads) {
    throw StatusError(
        PSM_ERROR_INVALID_ARGUMENT,
        Format("num_threads is %d, wanted 0 (all cores) to %d", options.num_threads, kMaxThreads));
  }
  if (options.pin_threads != 0 && options.pin_threads != 1) {
    throw StatusError(PSM_ERROR_INVALID_ARGUMENT,
                      Format("pin_threads is %d, wanted 0 or 1", options.pin_threads));
  }
  CheckRange("max_adapters", options.max_adapters, kMaxAdapters);
  CheckRange("max_adapter_rank", options.max_adapter_rank, kMaxAdapterRank);
  return options;
}

}  // namespace
}  // namespace cpu
}  // namespace plansmith

extern "C" {

void psm_cpu_options_init(psm_cpu_options* options) {
  if (options == nullptr) return;
  memset(options, 0, PSM_CPU_OPTIONS_SIZE);
  options->struct_size = PSM_CPU_OPTIONS_SIZE;
  options->max_adapters = 8;
  options->max_adapter_rank = 64;
}

psm_status psm_cpu_executor_create(const char* plan_path, const psm_cpu_options* options,
                                   psm_executor* out) {
  using namespace plansmith;
  constexpr size_t kSize = PSM_SIZE_UP_TO_(psm_executor, now_ns);  // an old caller's ends there
  if (out != nullptr) memset(out, 0, kSize);
  return Guard([&] {
    if (plan_path == nullptr || out == nullptr) {
      throw StatusError(PSM_ERROR_INVALID_ARGUMENT, "plan_path or out is NULL");
    }
    const psm_cpu_options o = cpu::ReadOptions(options);
    const int threads = o.num_threads > 0 ? o.num_threads : cpu::NumUsableCores();
    auto handle = std::make_unique<cpu::Handle>();
    handle->executor =
        std::make_unique<cpu::Executor>(plan_path, threads, o.pin_threads != 0, o.isa,
                                        cpu::LoraLimits{o.max_adapters, o.max_adapter_rank});
    out->struct_size = kSize;
    out->describe = cpu::DescribeEntry;
    out->open = cpu::OpenEntry;
    out->step = cpu::StepEntry;
    out->close = cpu::CloseEntry;
    out->load_adapter = cpu::LoadAdapterEntry;
    out->unload_adapter = cpu::UnloadAdapterEntry;
    out->last_error = cpu::LastErrorEntry;
    out->copy_blocks = cpu::CopyEntry;
    out->open_host = cpu::OpenHostEntry;
    out->self = handle.release();
  });
}

}  // extern "C"
