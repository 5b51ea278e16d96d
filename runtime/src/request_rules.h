// What a request must keep to, field by field and against the engine's limits.
//
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>

#include "engine_config.h"
#include "plansmith/plansmith.h"

namespace plansmith {

// Throws INVALID_ARGUMENT, SHAPE (too long) or OUT_OF_MEMORY (does not fit into the KV cache even
// alone). Token ids and word lists are checked where they are copied.
void CheckFields(const psm_request& request, const EngineConfig& config);

// KV blocks that `num_positions` positions need.
int32_t BlocksFor(int64_t num_positions, const psm_model_info& info);

}  // namespace plansmith
