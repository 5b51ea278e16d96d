// SPDX-License-Identifier: Apache-2.0
#include "simulated/executor.h"
#include "status.h"

extern "C" {

void psm_simulated_options_init(psm_simulated_options*) {}

psm_status psm_simulated_executor_create(const psm_simulated_options*, psm_executor*) {
  return plansmith::Guard(
      [] { throw plansmith::StatusError(PSM_ERROR_UNSUPPORTED, "not built yet"); });
}

}  // extern "C"
