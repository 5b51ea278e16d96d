/* The public API from C: lifetimes, events, statistics, limits, failures.
 *
 * SPDX-License-Identifier: Apache-2.0
 */
#define _POSIX_C_SOURCE 200809L /* poll, nanosleep */
#include <math.h>
#include <poll.h>
#include <string.h>
#include <time.h>

#include "check.h"
#include "fake_executor.h"

static int32_t ramp[200];

typedef struct fixture {
  fake_executor fake;
  psm_engine_options options;
  psm_engine* engine;
} fixture;

static void prepare(fixture* f) {
  fake_executor_init(&f->fake);
  psm_engine_options_init(&f->options);
  f->options.manual_step = 1;
  f->engine = NULL;
}

static void start(fixture* f) {
  const psm_executor table = fake_executor_table(&f->fake);
  CHECK_OK(psm_engine_create(&table, &f->options, &f->engine));
}

static void stop(fixture* f) {
  psm_engine_destroy(f->engine);
  CHECK(f->fake.is_closed == 1);
  fake_executor_free(&f->fake);
}

static psm_request greedy(int32_t num_prompt_ids, int32_t max_tokens) {
  psm_request request;
  psm_request_init(&request);
  request.prompt_ids = ramp;
  request.num_prompt_ids = num_prompt_ids;
  request.max_tokens = max_tokens;
  request.temperature = 0.0f;
  return request;
}

static uint64_t submit(fixture* f, const psm_request* request) {
  uint64_t id = 0;
  CHECK_OK(psm_engine_submit(f->engine, request, &id));
  CHECK(id != 0);
  return id;
}

static int32_t step(fixture* f) {
  int32_t did_work = -1;
  CHECK_OK(psm_engine_step(f->engine, &did_work));
  return did_work;
}

static void run(fixture* f) {
  while (step(f)) {
  }
}

static size_t poll_now(fixture* f, psm_event* events, size_t max_events) {
  size_t n = 0;
  CHECK_OK(psm_engine_poll(f->engine, events, max_events, 0, &n));
  return n;
}

static void test_tokens_are_the_executors(void) {
  fixture f;
  prepare(&f);
  start(&f);
  psm_request request = greedy(5, 6);
  request.client_id = 77;
  const uint64_t id = submit(&f, &request);
  run(&f);
  psm_event events[16];
  CHECK(poll_now(&f, events, 16) == 7);
  int32_t history[16];
  memcpy(history, ramp, 5 * sizeof *history);
  for (int32_t i = 0; i < 6; ++i) {
    float logits[101];
    fake_logits(history, 5 + i, 101, logits);
    int32_t best = 0;
    for (int32_t v = 1; v < 101; ++v) best = logits[v] > logits[best] ? v : best;
    CHECK(events[i].kind == PSM_EVENT_TOKEN && events[i].request_id == id &&
          events[i].client_id == 77);
    CHECK(events[i].token_id == best && events[i].output_idx == i);
    history[5 + i] = best;
  }
  CHECK(events[6].kind == PSM_EVENT_FINISHED && events[6].finish_reason == PSM_FINISH_LENGTH);
  const psm_request_stats* stats = &events[6].stats;
  CHECK(stats->num_prompt_tokens == 5 && stats->num_generated_tokens == 6 &&
        stats->num_pauses == 0);
  CHECK(stats->alloc_total_blocks ==
        3); /* 10 positions in blocks of 4: the last token is never an input */
  CHECK(stats->arrival_time_ns <= stats->first_scheduled_time_ns);
  CHECK(stats->first_scheduled_time_ns <= stats->first_token_time_ns);
  CHECK(stats->first_token_time_ns <= stats->last_token_time_ns);
  CHECK(stats->first_iter == 0 && stats->last_iter == 5);
  CHECK(psm_engine_cancel(f.engine, id) == PSM_ERROR_NOT_FOUND);
  stop(&f);
}

int main(void) {
  for (int32_t i = 0; i < 200; ++i) ramp[i] = (i * 7 + 1) % 101;
  test_tokens_are_the_executors();
  return 0;
}
