// The CPU executor as a psm_executor.
//
// SPDX-License-Identifier: Apache-2.0
#include <string.h>

#include <memory>
#include <string>

#include "abi.h"
#include "cpu/executor.h"
#include "cpu/peaks.h"
#include "cpu/thread_pool.h"
#include "plansmith/plansmith.h"
#include "status.h"

namespace plansmith {
namespace cpu {
namespace {

constexpr size_t kOptionsSize10 = PSM_SIZE_UP_TO_(psm_cpu_options, max_adapter_rank);
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

psm_status ProfileEntry(void* self, psm_op_profile* ops, size_t capacity, size_t* num_ops) {
  // Not Run: this may be another thread than the steps', whose last_error it must leave alone.
  return Guard([&] {
    if (num_ops == nullptr) throw StatusError(PSM_ERROR_INVALID_ARGUMENT, "num_ops is NULL");
    *num_ops = 0;
    if (ops == nullptr && capacity > 0) {
      throw StatusError(PSM_ERROR_INVALID_ARGUMENT, "ops is NULL and capacity is not 0");
    }
    *num_ops = static_cast<Handle*>(self)->executor->profile()->Read(ops, capacity);
    if (*num_ops > capacity) {
      throw StatusError(
          PSM_ERROR_BUFFER_TOO_SMALL,
          Format("there are %zu ops, the array takes %zu; give room for all", *num_ops, capacity));
    }
  });
}

void CloseEntry(void* self) { delete static_cast<Handle*>(self); }

const char* LastErrorEntry(void* self) {
  const std::string& text = static_cast<Handle*>(self)->last_error;
  return text.empty() ? nullptr : text.c_str();
}

void CheckRange(const char* name, int32_t value, const char* zero, int32_t most) {
  if (value >= 0 && value <= most) return;
  throw StatusError(PSM_ERROR_INVALID_ARGUMENT,
                    Format("%s is %d, wanted 0 (%s) to %d", name, value, zero, most));
}

void CheckSwitch(const char* name, int32_t value) {
  if (value == 0 || value == 1) return;
  throw StatusError(PSM_ERROR_INVALID_ARGUMENT, Format("%s is %d, wanted 0 or 1", name, value));
}

// The caller's options over the defaults. Fields behind those we know must be zero.
psm_cpu_options ReadOptions(const psm_cpu_options* given) {
  psm_cpu_options options = {};
  psm_cpu_options_init(&options);
  if (given == nullptr) return options;
  options = ReadStruct(
      "psm_cpu_options", given, options,
      {PSM_FIELD_END(psm_cpu_options, struct_size), PSM_FIELD_END(psm_cpu_options, num_threads),
       PSM_FIELD_END(psm_cpu_options, pin_threads), PSM_FIELD_END(psm_cpu_options, isa),
       PSM_FIELD_END(psm_cpu_options, max_adapters), kOptionsSize10,
       PSM_FIELD_END(psm_cpu_options, weights), PSM_FIELD_END(psm_cpu_options, profile),
       PSM_FIELD_END(psm_cpu_options, max_num_tokens), PSM_CPU_OPTIONS_SIZE});
  CheckRange("num_threads", options.num_threads, "all cores", kMaxThreads);
  CheckSwitch("pin_threads", options.pin_threads);
  CheckRange("max_adapters", options.max_adapters, "no adapters", kMaxAdapters);
  CheckRange("max_adapter_rank", options.max_adapter_rank, "no adapters", kMaxAdapterRank);
  CheckRange("weights", options.weights, "PSM_WEIGHTS_AUTO", PSM_WEIGHTS_HUGE_PAGES);
  CheckSwitch("profile", options.profile);
  CheckRange("max_num_tokens", options.max_num_tokens, "the plan's", INT32_MAX);
  if (options.reserved != 0) {
    throw StatusError(PSM_ERROR_INVALID_ARGUMENT,
                      Format("psm_cpu_options.reserved is %d, wanted 0", options.reserved));
  }
  return options;
}

// What the instructions of a kernel table reach on `num_threads` (0 = all) cores.
psm_cpu_peaks MeasureFor(const KernelTable& kernels, int32_t num_threads) {
  const bool vnni = strncmp(kernels.name, "avx512", 6) == 0 || kernels.dot_tiles != nullptr;
  const bool avx2 = vnni || strcmp(kernels.name, "avx2") == 0;
  ThreadPool pool(num_threads > 0 ? num_threads : NumUsableCores(), false);
  const Peaks found = MeasurePeaks(&pool, avx2, vnni, kernels.has_bf16_dots, kernels.dot_tiles);
  psm_cpu_peaks peaks = {};
  peaks.num_threads = pool.num_threads();
  peaks.read_bytes_per_s = 1e9 * found.read_gb_s;
  peaks.read_sustained_bytes_per_s = 1e9 * found.read_sustained_gb_s;
  peaks.f32_ops_per_s = 1e9 * found.fma_gflop_s;
  peaks.int8_ops_per_s = 1e9 * found.int8_gop_s;
  peaks.bf16_ops_per_s = 1e9 * found.bf16_gflop_s;
  return peaks;
}

}  // namespace
}  // namespace cpu
}  // namespace plansmith

extern "C" {

void psm_cpu_options_init(psm_cpu_options* options) {
  if (options == nullptr) return;
  memset(options, 0, plansmith::cpu::kOptionsSize10);
  options->struct_size = plansmith::cpu::kOptionsSize10;
  options->max_adapters = 8;
  options->max_adapter_rank = 64;
}

psm_status psm_cpu_executor_create(const char* plan_path, const psm_cpu_options* options,
                                   psm_executor* out) {
  using namespace plansmith;
  // An old caller's table ends where that of ABI 1.1 did; its options are the older ones, too.
  const bool is_old = options == nullptr || options->struct_size <= cpu::kOptionsSize10 ||
                      options->struct_size > kMaxStructSize;
  const size_t size = is_old ? PSM_SIZE_UP_TO_(psm_executor, now_ns) : PSM_EXECUTOR_SIZE;
  if (out != nullptr) memset(out, 0, size);
  return Guard([&] {
    if (plan_path == nullptr || out == nullptr) {
      throw StatusError(PSM_ERROR_INVALID_ARGUMENT, "plan_path or out is NULL");
    }
    const psm_cpu_options o = cpu::ReadOptions(options);
    const int threads = o.num_threads > 0 ? o.num_threads : cpu::NumUsableCores();
    auto handle = std::make_unique<cpu::Handle>();
    handle->executor = std::make_unique<cpu::Executor>(
        plan_path, threads, o.pin_threads != 0, o.isa,
        cpu::LoraLimits{o.max_adapters, o.max_adapter_rank}, static_cast<cpu::WeightsIn>(o.weights),
        o.profile != 0, true, o.max_num_tokens);
    out->struct_size = size;
    out->describe = cpu::DescribeEntry;
    out->open = cpu::OpenEntry;
    out->step = cpu::StepEntry;
    out->close = cpu::CloseEntry;
    out->load_adapter = cpu::LoadAdapterEntry;
    out->unload_adapter = cpu::UnloadAdapterEntry;
    out->last_error = cpu::LastErrorEntry;
    out->copy_blocks = cpu::CopyEntry;
    out->open_host = cpu::OpenHostEntry;
    if (o.profile != 0) out->profile = cpu::ProfileEntry;
    out->self = handle.release();
  });
}

psm_status psm_cpu_measure_peaks(int32_t num_threads, const char* isa, psm_cpu_peaks* peaks) {
  using namespace plansmith;
  return Guard([&] {
    if (peaks == nullptr) throw StatusError(PSM_ERROR_INVALID_ARGUMENT, "peaks is NULL");
    CheckStructSize("psm_cpu_peaks", peaks->struct_size, {PSM_CPU_PEAKS_SIZE});
    cpu::CheckRange("num_threads", num_threads, "all cores", cpu::kMaxThreads);
    const psm_cpu_peaks found = cpu::MeasureFor(cpu::ChooseKernels(isa), num_threads);
    WriteStruct("psm_cpu_peaks", found, peaks, {PSM_CPU_PEAKS_SIZE});
  });
}

}  // extern "C"
