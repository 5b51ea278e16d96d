// From the caller's executor and options to what an engine is built from, checked.
//
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <string>

#include "plansmith/plansmith.h"

namespace plansmith {

struct EngineConfig {
  psm_executor executor;
  psm_model_info info;         // limits as narrowed by the options
  psm_engine_options options;  // defaults filled in
  int32_t num_blocks = 0;
};

// Reads both structs, asks the executor for its description and settles every limit. options may be
// NULL. Throws what psm_engine_create fails with, but for the executor's open.
EngineConfig MakeEngineConfig(const psm_executor* executor, const psm_engine_options* options);

// Why the executor's last call failed, in its own words if it has some.
std::string ExecutorText(const psm_executor& executor);

}  // namespace plansmith
