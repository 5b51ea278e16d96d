/* The public API from C: lifetimes, events, statistics, limits, failures.
 *
 * SPDX-License-Identifier: Apache-2.0
 */
#define _DEFAULT_SOURCE /* poll, nanosleep, getrusage */
#include <math.h>
#include <poll.h>
#include <string.h>
#include <sys/resource.h>
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

static void test_event_fd_and_wake(void) {
  fixture f;
  prepare(&f);
  start(&f);
  struct pollfd fd = {psm_engine_event_fd(f.engine), POLLIN, 0};
  CHECK(fd.fd >= 0);
  CHECK(poll(&fd, 1, 0) == 0);
  psm_request request = greedy(3, 2);
  submit(&f, &request);
  CHECK(poll(&fd, 1, 0) == 0); /* nothing ran yet */
  run(&f);
  psm_event events[8];
  CHECK(poll(&fd, 1, 0) == 1);
  CHECK(poll_now(&f, events, 2) == 2);
  CHECK(poll(&fd, 1, 0) == 1); /* the FINISHED event still waits */
  CHECK(poll_now(&f, events, 8) == 1);
  CHECK(poll(&fd, 1, 0) == 0);
  CHECK(poll_now(&f, events, 8) == 0);
  size_t n = 9;
  CHECK_OK(psm_engine_poll(f.engine, events, 8, 5, &n)); /* a time-out */
  CHECK(n == 0);
  CHECK_OK(psm_engine_wake(f.engine)); /* nobody waits: nothing is remembered */
  CHECK(poll(&fd, 1, 0) == 0);
  stop(&f);
}

static void test_end_ids_stop_words_min_tokens(void) {
  fixture f;
  prepare(&f);
  start(&f);
  psm_event events[64];
  psm_request request = greedy(5, 12);
  submit(&f, &request);
  run(&f);
  CHECK(poll_now(&f, events, 64) == 13);
  int32_t plain[12];
  for (int i = 0; i < 12; ++i) plain[i] = events[i].token_id;

  request.end_ids = &plain[4];
  request.num_end_ids = 1;
  int first = 0;
  while (plain[first] != plain[4]) ++first;
  submit(&f, &request);
  run(&f);
  CHECK(poll_now(&f, events, 64) == (size_t)first + 2);
  CHECK(events[first].token_id == plain[4]); /* the end token is kept */
  CHECK(events[first + 1].finish_reason == PSM_FINISH_END_ID);

  request.min_tokens = 12; /* an end id cannot come before */
  submit(&f, &request);
  run(&f);
  CHECK(poll_now(&f, events, 64) == 13);
  for (int i = 0; i < 12; ++i) CHECK(events[i].token_id != plain[4]);
  CHECK(events[12].finish_reason == PSM_FINISH_LENGTH);

  request.num_end_ids = 0;
  request.min_tokens = 0;
  const int32_t words[] = {100, 100, 100, plain[5], plain[6], plain[7]};
  const int32_t ends[] = {3, 6};
  request.stop_words = (psm_token_lists){words, ends, 2};
  submit(&f, &request);
  run(&f);
  CHECK(poll_now(&f, events, 64) == 9);
  CHECK(events[7].token_id == plain[7] && events[8].finish_reason == PSM_FINISH_STOP_WORDS);
  request.min_tokens = 9; /* completed before: not honoured */
  submit(&f, &request);
  run(&f);
  CHECK(poll_now(&f, events, 64) == 13 && events[12].finish_reason == PSM_FINISH_LENGTH);
  request.min_tokens = 8;
  submit(&f, &request);
  run(&f);
  CHECK(poll_now(&f, events, 64) == 9 && events[8].finish_reason == PSM_FINISH_STOP_WORDS);

  request.min_tokens = 0;
  request.bad_words = request.stop_words; /* forbidding the sequence leaves its start alone */
  submit(&f, &request);
  run(&f);
  CHECK(poll_now(&f, events, 64) >= 9);
  CHECK(events[6].token_id == plain[6] && events[7].token_id != plain[7]);

  request = greedy(5, 3); /* a stop word does not begin in the prompt */
  const int32_t prompt_word[] = {ramp[4], plain[0]};
  const int32_t one[] = {2};
  request.stop_words = (psm_token_lists){prompt_word, one, 1};
  submit(&f, &request);
  run(&f);
  CHECK(poll_now(&f, events, 64) == 4);
  stop(&f);
}

static void test_logprobs(void) {
  fixture f;
  prepare(&f);
  start(&f);
  psm_request request = greedy(5, 4);
  request.num_logprobs = 3;
  submit(&f, &request);
  run(&f);
  psm_event events[8];
  CHECK(poll_now(&f, events, 8) == 5);
  int32_t history[16];
  memcpy(history, ramp, 5 * sizeof *history);
  double cumulative = 0.0;
  for (int32_t i = 0; i < 4; ++i) {
    float logits[101];
    double sum = 0.0;
    fake_logits(history, 5 + i, 101, logits);
    for (int32_t v = 0; v < 101; ++v) sum += exp((double)logits[v]);
    const double expected = (double)logits[events[i].token_id] - log(sum);
    cumulative += expected;
    CHECK(fabs((double)events[i].logprob - expected) < 1e-5);
    CHECK(fabs((double)events[i].cum_logprob - cumulative) < 1e-5);
    CHECK(events[i].num_top_logprobs == 3 && events[i].top_ids[0] == events[i].token_id);
    CHECK(events[i].top_logprobs[0] >= events[i].top_logprobs[1] &&
          events[i].top_logprobs[1] >= events[i].top_logprobs[2]);
    history[5 + i] = events[i].token_id;
  }
  stop(&f);
}

/* Against the formula, written out: counts of every token over prompt and output. */
static void test_penalties_follow_the_output(void) {
  fixture f;
  prepare(&f);
  f.options.max_num_tokens = 3; /* chunks */
  start(&f);
  psm_request request = greedy(5, 60);
  request.repetition_penalty = 1.5f;
  request.presence_penalty = 0.25f;
  request.frequency_penalty = 0.5f;
  submit(&f, &request);
  run(&f);
  psm_event events[64];
  CHECK(poll_now(&f, events, 64) == 61);
  int32_t history[65];
  int32_t in_prompt[101] = {0}, in_output[101] = {0};
  for (int i = 0; i < 5; ++i) {
    history[i] = ramp[i];
    in_prompt[ramp[i]] = 1;
  }
  int num_changed = 0;
  for (int32_t i = 0; i < 60; ++i) {
    float logits[101];
    fake_logits(history, 5 + i, 101, logits);
    int32_t raw = 0, best = 0;
    for (int32_t v = 1; v < 101; ++v) raw = logits[v] > logits[raw] ? v : raw;
    for (int32_t v = 0; v < 101; ++v) {
      if (in_prompt[v] || in_output[v]) {
        logits[v] = logits[v] > 0.0f ? logits[v] / 1.5f : logits[v] * 1.5f;
      }
      if (in_output[v]) logits[v] -= 0.25f + 0.5f * (float)in_output[v];
      best = logits[v] > logits[best] ? v : best;
    }
    CHECK(events[i].token_id == best);
    num_changed += raw != best;
    history[5 + i] = best;
    ++in_output[best];
  }
  CHECK(num_changed > 5); /* or nothing was tested */
  stop(&f);
}

static void test_cancel(void) {
  fixture f;
  prepare(&f);
  f.options.max_batch_size = 1;
  start(&f);
  psm_request request = greedy(5, 20);
  const uint64_t running = submit(&f, &request);
  const uint64_t queued = submit(&f, &request);
  step(&f);
  step(&f);
  CHECK_OK(psm_engine_cancel(f.engine, running));
  CHECK_OK(psm_engine_cancel(f.engine, running)); /* twice is fine while it lives */
  CHECK_OK(psm_engine_cancel(f.engine, queued));
  CHECK(step(&f) == 0);
  psm_event events[16];
  CHECK(poll_now(&f, events, 16) == 4);
  CHECK(events[2].kind == PSM_EVENT_FINISHED && events[2].finish_reason == PSM_FINISH_CANCELLED);
  CHECK(events[2].request_id == running && events[2].stats.num_generated_tokens == 2);
  CHECK(events[3].request_id == queued && events[3].finish_reason == PSM_FINISH_CANCELLED);
  CHECK(events[3].stats.first_scheduled_time_ns == 0);
  CHECK(psm_engine_cancel(f.engine, running) == PSM_ERROR_NOT_FOUND);
  CHECK(strstr(psm_last_error(), "no live request") != NULL);
  CHECK(psm_engine_cancel(f.engine, 999) == PSM_ERROR_NOT_FOUND);
  psm_engine_stats stats = {.struct_size = PSM_ENGINE_STATS_SIZE};
  CHECK_OK(psm_engine_get_stats(f.engine, &stats));
  CHECK(stats.used_num_blocks == 0 && stats.num_completed_requests == 2);
  stop(&f);
}

static void test_cancel_paused(void) {
  fixture f;
  prepare(&f);
  f.options.scheduler_policy = PSM_MAX_UTILIZATION;
  f.options.kv_cache_bytes = 6 * 64;
  start(&f);
  psm_request request = greedy(8, 12);
  submit(&f, &request);
  request.prompt_ids = ramp + 1; /* nothing to share */
  const uint64_t second = submit(&f, &request);
  psm_engine_stats stats = {.struct_size = PSM_ENGINE_STATS_SIZE};
  do {
    CHECK(step(&f) == 1);
    CHECK_OK(psm_engine_get_stats(f.engine, &stats));
  } while (stats.num_paused_requests == 0);
  CHECK(stats.num_active_requests == 2 && stats.num_queued_requests == 0 && stats.num_pauses == 1);
  CHECK_OK(psm_engine_cancel(f.engine, second));
  run(&f);
  psm_event events[64];
  const size_t n = poll_now(&f, events, 64);
  int cancelled = 0;
  for (size_t i = 0; i < n; ++i) {
    if (events[i].kind != PSM_EVENT_FINISHED) continue;
    const int is_second = events[i].request_id == second;
    CHECK(events[i].finish_reason == (is_second ? PSM_FINISH_CANCELLED : PSM_FINISH_LENGTH));
    CHECK(events[i].stats.num_pauses == is_second);
    cancelled += is_second;
  }
  CHECK(cancelled == 1);
  stop(&f);
}

static void sleep_ms(long ms) {
  const struct timespec pause = {ms / 1000, (ms % 1000) * 1000000L};
  nanosleep(&pause, NULL);
}

static void test_deadlines(void) {
  fixture f;
  prepare(&f);
  f.options.max_batch_size = 1;
  start(&f);
  psm_request request = greedy(5, 100);
  request.allotted_time_ms = 500; /* long enough for one step on a busy machine */
  const uint64_t running = submit(&f, &request);
  const uint64_t queued = submit(&f, &request);
  request = greedy(5, 3);
  request.allotted_time_ms = 100000;
  const uint64_t patient = submit(&f, &request);
  step(&f);
  sleep_ms(510);
  run(&f);
  psm_event events[16];
  CHECK(poll_now(&f, events, 16) == 7);
  CHECK(events[0].kind == PSM_EVENT_TOKEN && events[0].request_id == running);
  for (int i = 1; i <= 2; ++i) {
    CHECK(events[i].kind == PSM_EVENT_FINISHED && events[i].finish_reason == PSM_FINISH_TIMED_OUT);
    CHECK(events[i].request_id == running || events[i].request_id == queued);
  }
  CHECK(events[6].request_id == patient && events[6].finish_reason == PSM_FINISH_LENGTH);
  stop(&f);
}

static void test_queue_limit_and_priority(void) {
  fixture f;
  prepare(&f);
  f.options.max_batch_size = 1;
  f.options.max_queue_size = 3;
  start(&f);
  psm_request request = greedy(3, 2);
  uint64_t ids[4];
  const float priorities[] = {0.5f, 0.0f, 1.0f};
  for (int i = 0; i < 3; ++i) {
    request.priority = priorities[i];
    ids[i] = submit(&f, &request);
  }
  uint64_t id = 5;
  CHECK(psm_engine_submit(f.engine, &request, &id) == PSM_ERROR_QUEUE_FULL && id == 0);
  CHECK(strstr(psm_last_error(), "max_queue_size is 3") != NULL);
  psm_engine_stats stats = {.struct_size = PSM_ENGINE_STATS_SIZE};
  CHECK_OK(psm_engine_get_stats(f.engine, &stats));
  CHECK(stats.num_queued_requests == 3 && stats.num_submitted_requests == 3);
  step(&f);
  request.priority = 0.5f;
  ids[3] = submit(&f, &request); /* one has started: there is room again */
  CHECK(psm_engine_submit(f.engine, &request, &id) == PSM_ERROR_QUEUE_FULL);
  run(&f);
  psm_event events[16];
  CHECK(poll_now(&f, events, 16) == 12);
  const int order[] = {2, 0, 3, 1};
  for (int i = 0; i < 4; ++i) CHECK(events[3 * i + 2].request_id == ids[order[i]]);
  stop(&f);
}

static void test_executor_failure(void) {
  fixture f;
  prepare(&f);
  f.options.max_batch_size = 2;
  f.options.enable_block_reuse = 0; /* equal prompts, none waits for another's */
  start(&f);
  f.fake.fail_at_step = 1;
  psm_request request = greedy(5, 4);
  const uint64_t a = submit(&f, &request);
  const uint64_t b = submit(&f, &request);
  const uint64_t waiting = submit(&f, &request);
  run(&f);
  psm_event events[16];
  CHECK(poll_now(&f, events, 16) == 9);
  for (int i = 2; i < 4; ++i) {
    CHECK(events[i].kind == PSM_EVENT_FAILED && events[i].status == PSM_ERROR_EXECUTOR);
    CHECK(events[i].request_id == (i == 2 ? a : b) && events[i].stats.num_generated_tokens == 1);
    CHECK(strstr(events[i].message, "the fake device fell over at step 1") != NULL);
    CHECK(strstr(events[i].message, "PSM_ERROR_CUDA") != NULL);
  }
  CHECK(events[8].request_id == waiting &&
        events[8].finish_reason == PSM_FINISH_LENGTH); /* the engine lives on */
  psm_engine_stats stats = {.struct_size = PSM_ENGINE_STATS_SIZE};
  CHECK_OK(psm_engine_get_stats(f.engine, &stats));
  CHECK(stats.used_num_blocks == 0 && stats.free_num_blocks == stats.max_num_blocks);

  f.fake.nan_at_step = f.fake.num_steps; /* only the row's own request fails */
  const uint64_t sick = submit(&f, &request);
  const uint64_t well = submit(&f, &request);
  run(&f);
  CHECK(poll_now(&f, events, 16) == 6);
  CHECK(events[0].kind == PSM_EVENT_FAILED && events[0].request_id == sick &&
        events[0].status == PSM_ERROR_EXECUTOR);
  CHECK(strstr(events[0].message, "nan to token 3") != NULL);
  CHECK(events[5].request_id == well && events[5].finish_reason == PSM_FINISH_LENGTH);

  request.logit_bias_ids = ramp; /* ramp[0..100] holds every token once */
  float forbid[101];
  for (int i = 0; i < 101; ++i) forbid[i] = -INFINITY;
  request.logit_bias_values = forbid;
  request.num_logit_bias = 101;
  submit(&f, &request);
  run(&f);
  CHECK(poll_now(&f, events, 16) == 1);
  CHECK(events[0].kind == PSM_EVENT_FAILED && events[0].status == PSM_ERROR_INVALID_ARGUMENT);
  CHECK(strstr(events[0].message, "forbids every token") != NULL);
  stop(&f);
}

static void test_shutdown(void) {
  fixture f;
  prepare(&f);
  f.options.max_batch_size = 1;
  start(&f);
  psm_request request = greedy(5, 50);
  submit(&f, &request);
  submit(&f, &request);
  step(&f);
  submit(&f, &request); /* still in the inbox */
  CHECK_OK(psm_engine_shutdown(f.engine));
  CHECK_OK(psm_engine_shutdown(f.engine));
  uint64_t id;
  CHECK(psm_engine_submit(f.engine, &request, &id) == PSM_ERROR_SHUTDOWN);
  CHECK(step(&f) == 0);
  psm_event events[16];
  size_t n;
  CHECK_OK(psm_engine_poll(f.engine, events, 16, -1, &n));
  CHECK(n == 4 && events[0].kind == PSM_EVENT_TOKEN);
  for (size_t i = 1; i < 4; ++i)
    CHECK(events[i].kind == PSM_EVENT_FAILED && events[i].status == PSM_ERROR_SHUTDOWN);
  CHECK(psm_engine_poll(f.engine, events, 16, -1, &n) == PSM_ERROR_SHUTDOWN && n == 0);
  psm_engine_stats stats = {.struct_size = PSM_ENGINE_STATS_SIZE};
  CHECK_OK(psm_engine_get_stats(f.engine, &stats));
  CHECK(stats.num_completed_requests == 3 && stats.num_queued_requests == 0 &&
        stats.num_active_requests == 0);
  CHECK(stats.used_num_blocks == 0);
  stop(&f);
}

static void test_statistics(void) {
  fixture f;
  prepare(&f);
  f.options.kv_cache_bytes = 20 * 64 + 63; /* a rest that holds no block */
  f.options.iter_stats_max_iterations = 3;
  start(&f);
  psm_request request = greedy(6, 3);
  submit(&f, &request);
  request = greedy(2, 2);
  submit(&f, &request);
  run(&f);
  psm_engine_stats s = {.struct_size = PSM_ENGINE_STATS_SIZE};
  CHECK_OK(psm_engine_get_stats(f.engine, &s));
  CHECK(s.struct_size == PSM_ENGINE_STATS_SIZE);
  CHECK(s.iter == 3 && s.num_submitted_requests == 2 && s.num_completed_requests == 2);
  CHECK(s.num_active_requests == 0 && s.num_queued_requests == 0 && s.max_num_active_requests == 8);
  CHECK(s.num_prompt_tokens == 8 && s.num_generated_tokens == 5 && s.num_pauses == 0);
  CHECK(s.max_num_blocks == 20 && s.free_num_blocks == 20 && s.tokens_per_block == 4 &&
        s.kv_cache_bytes == 20 * 64);
  CHECK(s.alloc_total_blocks == 3 && s.alloc_new_blocks == 3 && s.reused_blocks == 0);
  /* steps: 6+2 positions in 2+1 blocks, 7+3 in 2+1, 8 in 2 */
  CHECK(s.kv_allocated_token_steps == 12 + 12 + 8 && s.kv_used_token_steps == 8 + 10 + 8);
  CHECK(s.step_time_ns > 0 && s.schedule_time_ns > 0);

  psm_iteration_stats it[8];
  size_t n = 0;
  CHECK_OK(psm_engine_iteration_stats(f.engine, it, 2, &n));
  CHECK(n == 2 && it[0].iter == 0 && it[1].iter == 1);
  CHECK(it[0].num_context_requests == 2 && it[0].num_ctx_tokens == 8 &&
        it[0].num_gen_requests == 0);
  CHECK(it[0].num_new_active_requests == 2 && it[0].num_active_requests == 2 &&
        it[0].num_completed_requests == 0);
  CHECK(it[0].used_num_blocks == 3 && it[0].free_num_blocks == 17);
  CHECK(it[1].num_gen_requests == 2 && it[1].num_gen_tokens == 2 &&
        it[1].num_scheduled_requests == 2);
  CHECK(it[1].num_completed_requests == 1 && it[1].used_num_blocks == 2 &&
        it[1].num_new_active_requests == 0);
  CHECK(it[0].iter_latency_ms >= it[0].executor_latency_ms &&
        it[1].timestamp_ns >= it[0].timestamp_ns);
  CHECK_OK(psm_engine_iteration_stats(f.engine, it, 8, &n));
  CHECK(n == 1 && it[0].iter == 2); /* each is given once */
  request = greedy(2, 5);
  submit(&f, &request);
  run(&f);
  CHECK_OK(psm_engine_iteration_stats(f.engine, it, 8, &n));
  CHECK(n == 3 && it[0].iter == 5 && it[2].iter == 7); /* the oldest were dropped */
  stop(&f);
}

static void test_model_info(void) {
  fixture f;
  prepare(&f);
  f.options.max_num_tokens = 5;
  start(&f);
  psm_model_info info = {.struct_size = PSM_MODEL_INFO_SIZE};
  CHECK_OK(psm_engine_model_info(f.engine, &info));
  CHECK(info.vocab_size == 101 && info.max_num_tokens == 5 && info.kv_bytes_per_block == 64);
  CHECK(info.max_batch_size == 5); /* each running request must have room for its token */
  psm_engine_stats stats = {.struct_size = PSM_ENGINE_STATS_SIZE};
  CHECK_OK(psm_engine_get_stats(f.engine, &stats));
  CHECK(stats.max_num_blocks == 5 * 32); /* the default cap: batch x 128 positions */
  stop(&f);
}

/* What a step has started no longer waits, also while that step takes long. */
static void test_queue_moves_before_the_step_ends(void) {
  fixture f;
  prepare(&f);
  f.options.manual_step = 0;
  f.options.max_queue_size = 1;
  start(&f);
  f.fake.step_sleep_us = 700000;
  psm_request request = greedy(5, 1);
  submit(&f, &request);
  psm_engine_stats stats = {.struct_size = PSM_ENGINE_STATS_SIZE};
  do {
    CHECK_OK(psm_engine_get_stats(f.engine, &stats));
  } while (stats.num_queued_requests > 0);
  CHECK(stats.iter == 0); /* its step is not over */
  submit(&f, &request);
  stop(&f);
}

static void test_own_thread(void) {
  fixture f;
  prepare(&f);
  f.options.manual_step = 0;
  start(&f);
  int32_t did_work;
  CHECK(psm_engine_step(f.engine, &did_work) == PSM_ERROR_UNSUPPORTED);
  psm_request request = greedy(5, 6);
  submit(&f, &request);
  psm_event events[16];
  size_t total = 0;
  do {
    size_t n;
    CHECK_OK(psm_engine_poll(f.engine, events + total, 16 - total, -1, &n));
    total += n;
  } while (events[total - 1].kind != PSM_EVENT_FINISHED);
  CHECK(total == 7);
  f.fake.step_sleep_us = 200;
  request.max_tokens = 100;
  for (int i = 0; i < 20; ++i) submit(&f, &request);
  sleep_ms(2);
  stop(&f); /* while they run */
  psm_engine_destroy(NULL);
}

static psm_status (*real_step)(void* self, const psm_batch* batch, const float** logits);
static fixture* of_the_step;
static int32_t submit_once;

/* What a step may call of its own engine, and what would wait for the step itself. */
static psm_status calling_step(void* self, const psm_batch* batch, const float** logits) {
  psm_engine* engine = of_the_step->engine;
  int32_t did_work;
  CHECK(psm_engine_shutdown(engine) == PSM_ERROR_INVALID_ARGUMENT);
  CHECK(strstr(psm_last_error(), "inside a step") != NULL);
  CHECK(psm_engine_step(engine, &did_work) != PSM_OK);
  psm_engine_stats stats = {.struct_size = PSM_ENGINE_STATS_SIZE};
  CHECK_OK(psm_engine_get_stats(engine, &stats));
  const psm_request request = greedy(3, 2);
  if (submit_once) submit(of_the_step, &request);
  submit_once = 0;
  CHECK(psm_engine_cancel(engine, 99) == PSM_ERROR_NOT_FOUND);
  return real_step(self, batch, logits);
}

static void test_calls_from_inside_a_step(int32_t manual_step) {
  fixture f;
  prepare(&f);
  of_the_step = &f;
  submit_once = 1;
  f.options.manual_step = manual_step;
  psm_executor table = fake_executor_table(&f.fake);
  real_step = table.step;
  table.step = calling_step;
  CHECK_OK(psm_engine_create(&table, &f.options, &f.engine));
  const psm_request request = greedy(5, 6);
  submit(&f, &request);
  psm_event event;
  for (int32_t num_ends = 0; num_ends < 2;) { /* this one's and the step's */
    size_t n;
    if (manual_step) step(&f);
    CHECK_OK(psm_engine_poll(f.engine, &event, 1, manual_step ? 0 : -1, &n));
    num_ends += n == 1 && event.kind == PSM_EVENT_FINISHED;
  }
  stop(&f);
}

/* A cancel that is repeated through a long step is one cancel. */
static void test_cancel_again_and_again(void) {
  fixture f;
  prepare(&f);
  start(&f);
  const psm_request request = greedy(5, 6);
  const uint64_t id = submit(&f, &request);
  step(&f);
  for (int i = 0; i < 1000; ++i) CHECK_OK(psm_engine_cancel(f.engine, id));
  step(&f);
  CHECK(psm_engine_cancel(f.engine, id) == PSM_ERROR_NOT_FOUND);
  psm_event events[8];
  CHECK(poll_now(&f, events, 8) == 2 && events[1].finish_reason == PSM_FINISH_CANCELLED);
  stop(&f);
}

static psm_status (*real_open)(void* self, int32_t num_blocks);

static psm_status open_few(void* self, int32_t num_blocks) {
  return real_open(self, num_blocks < 64 ? num_blocks : 64);
}

/* The largest limits cost what is used of them: creating the engine touches no memory for the
 * rest. */
static void test_largest_limits(void) {
  fixture f;
  prepare(&f);
  f.options.kv_cache_bytes = UINT64_C(64)
                             << 27; /* 2^27 blocks: books of 1 GiB, if they were filled */
  f.options.iter_stats_max_iterations = INT32_MAX; /* 240 GB */
  f.options.max_queue_size = INT32_MAX;
  psm_executor table = fake_executor_table(&f.fake);
  real_open = table.open;
  table.open = open_few;
  struct rusage before, after;
  getrusage(RUSAGE_SELF, &before);
  CHECK_OK(psm_engine_create(&table, &f.options, &f.engine));
  const psm_request request = greedy(50, 20);
  submit(&f, &request);
  run(&f);
  getrusage(RUSAGE_SELF, &after);
#ifndef __SANITIZE_ADDRESS__ /* has its own books of what is allocated */
  CHECK(after.ru_maxrss - before.ru_maxrss < 100 * 1024);
#endif
  psm_event events[32];
  CHECK(poll_now(&f, events, 32) == 21);
  psm_iteration_stats records[32];
  size_t n;
  CHECK_OK(psm_engine_iteration_stats(f.engine, records, 32, &n));
  CHECK(n == 21 && records[0].iter == 0 && records[20].iter == 20);
  stop(&f);
}

int main(void) {
  for (int32_t i = 0; i < 200; ++i) ramp[i] = (i * 7 + 1) % 101;
  test_tokens_are_the_executors();
  test_event_fd_and_wake();
  test_end_ids_stop_words_min_tokens();
  test_logprobs();
  test_penalties_follow_the_output();
  test_cancel();
  test_cancel_paused();
  test_deadlines();
  test_queue_limit_and_priority();
  test_executor_failure();
  test_shutdown();
  test_statistics();
  test_model_info();
  test_queue_moves_before_the_step_ends();
  test_own_thread();
  test_calls_from_inside_a_step(1);
  test_calls_from_inside_a_step(0);
  test_cancel_again_and_again();
  test_largest_limits();
  return 0;
}
