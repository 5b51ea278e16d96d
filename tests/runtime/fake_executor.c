/* SPDX-License-Identifier: Apache-2.0 */
#define _POSIX_C_SOURCE 200809L /* nanosleep */
#include "fake_executor.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "give_candidates.h"

static uint64_t mix(uint64_t h) {
  h ^= h >> 33;
  h *= UINT64_C(0xff51afd7ed558ccd);
  h ^= h >> 33;
  h *= UINT64_C(0xc4ceb9fe1a85ec53);
  return h ^ (h >> 33);
}

static uint64_t hash_token(uint64_t h, int32_t token) {
  return mix(h * 31 + (uint64_t)(uint32_t)token + 1);
}

static void logits_of_hash(uint64_t h, int32_t vocab_size, float* logits) {
  for (int32_t v = 0; v < vocab_size; ++v) {
    logits[v] = (float)(mix(h + (uint64_t)v) >> 40) * (8.0f / 16777216.0f) - 4.0f;
  }
}

void fake_logits(const int32_t* tokens, int32_t n, int32_t vocab_size, float* logits) {
  uint64_t h = 7;
  for (int32_t i = 0; i < n; ++i) h = hash_token(h, tokens[i]);
  logits_of_hash(h, vocab_size, logits);
}

static psm_status describe(void* self, psm_model_info* info) {
  const fake_executor* fake = self;
  const size_t size = info->struct_size;
  memcpy(info, &fake->info, size < sizeof *info ? size : sizeof *info);
  info->struct_size = size;
  return PSM_OK;
}

static psm_status open_pools(void* self, int32_t num_blocks) {
  fake_executor* fake = self;
  if (fake->is_open || num_blocks < 1) return PSM_ERROR_INTERNAL;
  const size_t n = (size_t)num_blocks * (size_t)fake->info.tokens_per_block;
  fake->num_blocks = num_blocks;
  fake->pool = malloc(n * sizeof *fake->pool);
  for (size_t i = 0; i < n; ++i) fake->pool[i] = -1;
  fake->logits =
      malloc((size_t)fake->info.max_num_tokens * (size_t)fake->info.vocab_size * sizeof(float));
  fake->is_open = 1;
  return PSM_OK;
}

static psm_status broken(fake_executor* fake, const char* rule, int32_t seq) {
  snprintf(fake->error, sizeof fake->error, "psm_batch rule broken: %s (sequence %d)", rule, seq);
  return PSM_ERROR_INVALID_ARGUMENT;
}

/* The pool slot of one position, NULL when its block does not exist. */
static int32_t* slot(fake_executor* fake, const psm_batch* batch, int32_t seq, int32_t position) {
  const int32_t bs = fake->info.tokens_per_block;
  if (position / bs >= batch->block_table_stride) return NULL;
  const int32_t block =
      batch->block_table[(size_t)seq * (size_t)batch->block_table_stride + (size_t)(position / bs)];
  if (block < 0 || block >= fake->num_blocks) return NULL;
  return fake->pool + (size_t)block * (size_t)bs + (size_t)(position % bs);
}

/* What is known of a block in this step: whose tables it is in, and whether one of them writes it.
 */
enum { IN_A_TABLE = 1, WRITTEN = 2 };

static psm_status check_seq(fake_executor* fake, const psm_batch* batch, int32_t seq,
                            unsigned char* used) {
  const int32_t n = batch->query_lens[seq];
  const int32_t kv = batch->kv_lens[seq];
  const int32_t begin = batch->cu_query_lens[seq];
  if (n < 1 || kv < n || kv > fake->info.max_seq_len)
    return broken(fake, "1 <= query_lens <= kv_lens <= max_seq_len", seq);
  if (batch->cu_query_lens[seq + 1] != begin + n) return broken(fake, "cu_query_lens", seq);
  for (int32_t i = 0; i < n; ++i) {
    if (batch->position_ids[begin + i] != kv - n + i) return broken(fake, "position_ids", seq);
    if (batch->input_ids[begin + i] < 0 || batch->input_ids[begin + i] >= fake->info.vocab_size) {
      return broken(fake, "input_ids", seq);
    }
  }
  const int32_t bs = fake->info.tokens_per_block;
  for (int32_t column = 0; column < batch->block_table_stride; ++column) {
    const int32_t block =
        batch->block_table[(size_t)seq * (size_t)batch->block_table_stride + (size_t)column];
    /* Behind the last position there may be blocks for drafts that were not made. */
    if (block < (column * bs >= kv ? -1 : 0) || block >= fake->num_blocks) {
      return broken(fake, "block_table entries", seq);
    }
    if (block < 0 || column * bs >= kv) continue;
    const int writes = (column + 1) * bs > kv - n;
    if (used[block] != 0 && (writes || (used[block] & WRITTEN)))
      return broken(fake, "a block that is written is in another table too", seq);
    used[block] |= (unsigned char)(IN_A_TABLE | (writes ? WRITTEN : 0));
  }
  return PSM_OK;
}

static psm_status check_batch(fake_executor* fake, const psm_batch* batch) {
  if (batch->struct_size != PSM_BATCH_SIZE) return broken(fake, "struct_size", -1);
  if (batch->num_seqs < 1 || batch->num_seqs > fake->info.max_batch_size)
    return broken(fake, "num_seqs", -1);
  if (batch->num_tokens < 1 || batch->num_tokens > fake->info.max_num_tokens)
    return broken(fake, "num_tokens", -1);
  if (batch->cu_query_lens[0] != 0 || batch->cu_query_lens[batch->num_seqs] != batch->num_tokens) {
    return broken(fake, "cu_query_lens ends", -1);
  }
  unsigned char* used = calloc((size_t)fake->num_blocks, 1);
  psm_status status = PSM_OK;
  for (int32_t b = 0; b < batch->num_seqs && status == PSM_OK; ++b)
    status = check_seq(fake, batch, b, used);
  free(used);
  for (int32_t r = 0; r < batch->num_logits_rows && status == PSM_OK; ++r) {
    const int32_t row = batch->logits_rows[r];
    if (row < 0 || row >= batch->num_tokens || (r > 0 && row <= batch->logits_rows[r - 1])) {
      status = broken(fake, "logits_rows", r);
    }
  }
  return status;
}

static psm_status step(void* self, const psm_batch* batch, const float** logits) {
  fake_executor* fake = self;
  const int64_t step_idx = fake->num_steps++;
  const psm_status status = check_batch(fake, batch);
  if (status != PSM_OK) return status;
  if (batch->num_seqs > fake->max_seqs_seen) fake->max_seqs_seen = batch->num_seqs;
  if (batch->num_tokens > fake->max_tokens_seen) fake->max_tokens_seen = batch->num_tokens;
  if (step_idx == fake->fail_at_step) {
    snprintf(fake->error, sizeof fake->error, "the fake device fell over at step %lld",
             (long long)step_idx);
    return PSM_ERROR_CUDA;
  }
  for (int32_t b = 0; b < batch->num_seqs; ++b) {
    const int32_t begin = batch->cu_query_lens[b];
    for (int32_t i = 0; i < batch->query_lens[b]; ++i) {
      *slot(fake, batch, b, batch->position_ids[begin + i]) = batch->input_ids[begin + i];
    }
  }
  int32_t seq = 0;
  for (int32_t r = 0; r < batch->num_logits_rows; ++r) {
    const int32_t row = batch->logits_rows[r];
    while (batch->cu_query_lens[seq + 1] <= row) ++seq;
    uint64_t h = 7;
    for (int32_t p = 0; p <= batch->position_ids[row]; ++p)
      h = hash_token(h, *slot(fake, batch, seq, p));
    logits_of_hash(h, fake->info.vocab_size,
                   fake->logits + (size_t)r * (size_t)fake->info.vocab_size);
  }
  if (step_idx == fake->nan_at_step) fake->logits[3] = NAN;
  for (int32_t r = 0; batch->num_candidates > 0 && r < batch->num_logits_rows; ++r) {
    if (fake->info.samples_rows != PSM_SAMPLES_CANDIDATES) return broken(fake, "candidates", r);
    give_candidates(fake->logits + (size_t)r * (size_t)fake->info.vocab_size, fake->info.vocab_size,
                    batch->num_candidates, batch->candidates + r * batch->num_candidates);
    fake->num_candidate_rows += 1;
  }
  if (fake->step_sleep_us > 0) {
    const struct timespec pause = {0, (long)fake->step_sleep_us * 1000L};
    nanosleep(&pause, NULL);
  }
  *logits = fake->logits;
  return PSM_OK;
}

static psm_status copy_blocks(void* self, const psm_block_copy* copies, size_t num_copies) {
  fake_executor* fake = self;
  const int32_t bs = fake->info.tokens_per_block;
  for (size_t i = 0; i < num_copies; ++i) {
    const psm_block_copy* c = &copies[i];
    if (c->kind != PSM_COPY_DEVICE || c->src < 0 || c->src >= fake->num_blocks || c->dst < 0 ||
        c->dst >= fake->num_blocks || c->src == c->dst || c->num_tokens < 1 || c->num_tokens > bs) {
      return broken(fake, "psm_block_copy", (int32_t)i);
    }
    memcpy(fake->pool + (size_t)c->dst * (size_t)bs, fake->pool + (size_t)c->src * (size_t)bs,
           (size_t)c->num_tokens * sizeof(int32_t));
  }
  return PSM_OK;
}

static void close_pools(void* self) { ((fake_executor*)self)->is_closed += 1; }

static const char* last_error(void* self) { return ((fake_executor*)self)->error; }

void fake_executor_init(fake_executor* fake) {
  memset(fake, 0, sizeof *fake);
  psm_model_info* info = &fake->info;
  info->struct_size = PSM_MODEL_INFO_SIZE;
  info->vocab_size = 101;
  info->num_layers = info->num_heads = info->num_kv_heads = 1;
  info->head_dim = 8;
  info->max_batch_size = 8;
  info->max_num_tokens = 32;
  info->max_input_len = 96;
  info->max_seq_len = 128;
  info->tokens_per_block = 4;
  info->kv_bytes_per_block = 64;
  fake->fail_at_step = fake->nan_at_step = -1;
}

psm_executor fake_executor_table(fake_executor* fake) {
  const psm_executor table = {.struct_size = PSM_EXECUTOR_SIZE,
                              .self = fake,
                              .describe = describe,
                              .open = open_pools,
                              .step = step,
                              .close = close_pools,
                              .last_error = last_error,
                              .copy_blocks = copy_blocks};
  return table;
}

void fake_executor_free(fake_executor* fake) {
  free(fake->pool);
  free(fake->logits);
  fake->pool = NULL;
  fake->logits = NULL;
}
