// From the caller's executor and options to what an engine is built from, checked.
//
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <string>

#include "clock.h"
#include "plansmith/plansmith.h"

namespace plansmith {

struct EngineConfig {
  psm_executor executor;
  psm_model_info info;         // limits as narrowed by the options
  psm_engine_options options;  // defaults filled in
  psm_executor draft;          // PSM_DRAFT_MODEL
  psm_model_info draft_info;
  uint64_t kv_bytes_per_block = 0;  // of target and draft together
  int32_t num_blocks = 0;
  int32_t num_host_blocks = 0;
  bool can_copy = false;  // all executors have copy_blocks

  // The engine's clock: the executor's own, if it has one.
  int64_t NowNs() const {
    return executor.now_ns != nullptr ? executor.now_ns(executor.self) : plansmith::NowNs();
  }
};

// Reads both structs, asks the executor for its description and settles every limit. options may be
// NULL. Throws what psm_engine_create fails with, but for the executor's open.
EngineConfig MakeEngineConfig(const psm_executor* executor, const psm_engine_options* options);

// Why the executor's last call failed, in its own words if it has some.
std::string ExecutorText(const psm_executor& executor);

}  // namespace plansmith
