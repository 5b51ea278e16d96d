/* plansmith.h comes first and alone: it must compile as C11 with every warning on, and its
 * constants must agree.
 *
 * SPDX-License-Identifier: Apache-2.0
 */
#include <string.h>

#include "check.h"
#include "plansmith/plansmith.h"

/* The struct sizes that callers pass end with the last field; here no padding hides behind it or it
 * is known. */
_Static_assert(PSM_REQUEST_SIZE <= sizeof(psm_request), "top_p_reset_id is the last field");
_Static_assert(PSM_ENGINE_STATS_SIZE == sizeof(psm_engine_stats),
               "psm_engine_stats has no tail padding");
_Static_assert(PSM_MODEL_INFO_SIZE == sizeof(psm_model_info), "psm_model_info has no tail padding");
_Static_assert(PSM_BATCH_SIZE == sizeof(psm_batch), "psm_batch has no tail padding");
_Static_assert(
    offsetof(psm_model_info, samples_rows) == 60 &&
        offsetof(psm_model_info, kv_bytes_per_block) == 64,
    "samples_rows lies in what was padding: nothing moved, here and in psm_simulated_options");
_Static_assert(sizeof(psm_sampling_row) == 12 * 4 && offsetof(psm_sampling_row, reserved) == 11 * 4,
               "psm_sampling_row is 12 words");
_Static_assert(sizeof(psm_logit_edit) == 4 * 4 && offsetof(psm_logit_edit, plus) == 3 * 4,
               "psm_logit_edit is 4 words");
_Static_assert(sizeof(psm_row_sample) == 44 * 4 && offsetof(psm_row_sample, top_logprobs) == 24 * 4,
               "psm_row_sample is 4 words and two arrays of 20");
_Static_assert(PSM_STEP_SAMPLING_SIZE == sizeof(psm_step_sampling),
               "psm_step_sampling has no tail padding");
_Static_assert(PSM_EXECUTOR_SIZE == sizeof(psm_executor), "psm_executor has no tail padding");
_Static_assert(PSM_CPU_OPTIONS_SIZE == sizeof(psm_cpu_options),
               "psm_cpu_options has no tail padding");
_Static_assert(PSM_CPU_PEAKS_SIZE == sizeof(psm_cpu_peaks), "psm_cpu_peaks has no tail padding");
_Static_assert(offsetof(psm_op_profile, calls) == 3 * sizeof(void*) + 16 &&
                   sizeof(psm_op_profile) == 3 * sizeof(void*) + 16 + 7 * 8,
               "psm_op_profile has no padding");
_Static_assert(PSM_ENGINE_OPTIONS_SIZE <= sizeof(psm_engine_options),
               "manual_step is the last option");

int main(void) {
  CHECK(psm_abi_version() == PSM_ABI_MAJOR * 1000 + PSM_ABI_MINOR);
  CHECK(psm_version()[0] != '\0');
  CHECK(PSM_OK == 0 && PSM_NUM_STATUS_CODES == 13);
  /* Codes are dense: every one has a name and a text of its own. */
  for (psm_status code = 0; code < PSM_NUM_STATUS_CODES; ++code) {
    CHECK(strncmp(psm_status_name(code), "PSM_", 4) == 0);
    CHECK(strcmp(psm_status_name(code), "PSM_ERROR_UNKNOWN") != 0);
    CHECK(psm_status_text(code)[0] != '\0');
  }
  CHECK(psm_last_error()[0] == '\0');
  return 0;
}
