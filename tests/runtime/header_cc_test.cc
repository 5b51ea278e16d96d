// plansmith.h comes first and alone in C++17, and its functions have C linkage.
//
// SPDX-License-Identifier: Apache-2.0
#include "check.h"
#include "plansmith/plansmith.h"

int main() {
  psm_request request;
  psm_request_init(&request);
  CHECK(request.struct_size == PSM_SIZE_UP_TO_(psm_request, guide));  // as in ABI 1.0
  CHECK(request.max_tokens == 16 && request.temperature == 1.0f && request.top_p == 1.0f);
  CHECK(request.repetition_penalty == 1.0f && request.priority == 0.5f && request.client_id == 0);
  psm_engine_options options;
  psm_engine_options_init(&options);
  CHECK(options.struct_size == PSM_SIZE_UP_TO_(psm_engine_options, draft_executor));  // likewise
  CHECK(options.scheduler_policy == PSM_GUARANTEED_NO_EVICT && options.enable_chunked_context == 1);
  CHECK(options.max_queue_size == 1024 && options.iter_stats_max_iterations == 1000);
  return 0;
}
