// From psm_request to Request: every field checked, everything copied.
//
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <memory>
#include <vector>

#include "engine_config.h"
#include "plansmith/plansmith.h"
#include "request.h"

namespace plansmith {

// What psm_request_init fills in.
psm_request DefaultRequest();

// The sequences of a request, ready to submit to an engine of `config`: num_return_sequences of
// them. Throws INVALID_ARGUMENT, SHAPE (too long) or OUT_OF_MEMORY (does not fit into the KV cache
// even alone); request.guide is then still the caller's.
std::vector<std::unique_ptr<Request>> CheckRequest(const psm_request& request,
                                                   const EngineConfig& config);

}  // namespace plansmith
