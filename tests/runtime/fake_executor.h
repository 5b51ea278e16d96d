/* An executor for tests: its logits are a hash of the tokens it finds in the KV blocks it is told
 * to read.
 *
 * It keeps the token of every position in its block pool, exactly as a model keeps K and V. A wrong
 * block table, a position written twice or never, a block given away while in use: each changes the
 * hash and so the tokens. It also checks every rule that psm_batch states and fails the step when
 * one is broken.
 *
 * SPDX-License-Identifier: Apache-2.0
 */
#ifndef PLANSMITH_TESTS_FAKE_EXECUTOR_H_
#define PLANSMITH_TESTS_FAKE_EXECUTOR_H_

#include "plansmith/plansmith.h"

#ifdef __cplusplus
extern "C" {
#endif

typedef struct fake_executor {
  psm_model_info info; /* what describe tells; change it before psm_engine_create */
  int32_t num_blocks;  /* given to open */
  int32_t* pool;       /* [num_blocks, tokens_per_block] token, -1 = nothing */
  float* logits;       /* [max_num_tokens, V] */
  int64_t num_steps;
  int64_t fail_at_step; /* this step (from 0) returns PSM_ERROR_CUDA; -1 = none */
  int64_t nan_at_step;  /* the first row of this step holds a NaN at token 3; -1 = none */
  int32_t step_sleep_us;
  int32_t is_open;
  int32_t is_closed;
  int32_t max_seqs_seen; /* most sequences in a step */
  int32_t max_tokens_seen;
  int64_t num_candidate_rows; /* whose largest logits were wanted */
  char error[200];
} fake_executor;

/* V = 101, blocks of 4 positions and 64 bytes, 8 sequences, 32 tokens a step, prompts to 96 and
 * sequences to 128. */
void fake_executor_init(fake_executor* fake);

/* The table over `fake`, which the caller owns and frees with fake_executor_free after the engine.
 */
psm_executor fake_executor_table(fake_executor* fake);
void fake_executor_free(fake_executor* fake);

/* The logits after `tokens`: what the executor must give. */
void fake_logits(const int32_t* tokens, int32_t n, int32_t vocab_size, float* logits);

#ifdef __cplusplus
}
#endif

#endif /* PLANSMITH_TESTS_FAKE_EXECUTOR_H_ */
