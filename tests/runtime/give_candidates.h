/* psm_batch.candidates by looking for one after another, for executors of tests.
 *
 * SPDX-License-Identifier: Apache-2.0
 */
#ifndef PLANSMITH_TESTS_GIVE_CANDIDATES_H_
#define PLANSMITH_TESTS_GIVE_CANDIDATES_H_

#include <math.h>

#include "plansmith/plansmith.h"

/* row: [vocab_size]; out: [k]. */
static inline void give_candidates(const float* row, int32_t vocab_size, int32_t k,
                                   psm_candidate* out) {
  for (int32_t j = 0; j < k; ++j) {
    int32_t best = -1;
    for (int32_t id = 0; id < vocab_size; ++id) {
      if (isnan(row[id]) || row[id] == INFINITY) {
        out[0].token_id = -1;
        return;
      }
      const int taken = j > 0 && (row[id] > out[j - 1].logit ||
                                  (row[id] == out[j - 1].logit && id <= out[j - 1].token_id));
      if (!taken && row[id] > -INFINITY && (best < 0 || row[id] > row[best])) best = id;
    }
    out[j].token_id = best;
    if (best < 0) return;
    out[j].logit = row[best];
  }
}

#endif /* PLANSMITH_TESTS_GIVE_CANDIDATES_H_ */
