/* Many threads on one engine: submit, cancel, poll and read statistics at once, then shut down or
 * destroy.
 *
 * SPDX-License-Identifier: Apache-2.0
 */
#define _POSIX_C_SOURCE 200809L
#include <pthread.h>
#include <stdatomic.h>
#include <string.h>

#include "check.h"
#include "fake_executor.h"

enum {
  NUM_SUBMITTERS = 4,
  NUM_POLLERS = 3,
  REQUESTS_EACH = 150,
  NUM_REQUESTS = NUM_SUBMITTERS * REQUESTS_EACH
};

static psm_engine* engine;
static atomic_int num_ended;
static atomic_int num_cancelled;
static atomic_int num_tokens[NUM_REQUESTS]; /* by client_id */
static atomic_int num_ends[NUM_REQUESTS];
static atomic_int token_sums[NUM_REQUESTS];
static atomic_int stop_reading;

static psm_request make_request(int32_t client_id, int32_t* prompt) {
  psm_request request;
  psm_request_init(&request);
  const int32_t n = 1 + client_id % 30;
  for (int32_t i = 0; i < n; ++i) prompt[i] = (client_id * 13 + i * 5) % 101;
  request.prompt_ids = prompt;
  request.num_prompt_ids = n;
  request.max_tokens = 1 + client_id % 20;
  request.seed = (uint64_t)client_id;
  request.client_id = (uint64_t)client_id;
  return request;
}

static void* submitter(void* argument) {
  const int32_t first = *(const int32_t*)argument * REQUESTS_EACH;
  for (int32_t i = first; i < first + REQUESTS_EACH; ++i) {
    int32_t prompt[32];
    const psm_request request = make_request(i, prompt);
    uint64_t id;
    psm_status status;
    do {
      status = psm_engine_submit(engine, &request, &id);
    } while (status == PSM_ERROR_QUEUE_FULL);
    CHECK(status == PSM_OK);
    memset(prompt, 0xff, sizeof prompt); /* the engine has its own copy */
    if (i % 5 == 0) {
      status = psm_engine_cancel(engine, id);
      CHECK(status == PSM_OK || status == PSM_ERROR_NOT_FOUND);
    }
  }
  return NULL;
}

static void* poller(void* argument) {
  (void)argument;
  psm_event events[16];
  size_t n;
  while (psm_engine_poll(engine, events, 16, -1, &n) == PSM_OK) {
    for (size_t i = 0; i < n; ++i) {
      const psm_event* event = &events[i];
      if (event->kind == PSM_EVENT_TOKEN) {
        atomic_fetch_add(&num_tokens[event->client_id], 1);
        atomic_fetch_add(&token_sums[event->client_id], event->token_id * (event->output_idx + 1));
        continue;
      }
      CHECK(event->kind == PSM_EVENT_FINISHED);
      atomic_fetch_add(&num_ends[event->client_id], 1);
      if (event->finish_reason == PSM_FINISH_CANCELLED) atomic_fetch_add(&num_cancelled, 1);
      atomic_fetch_add(&num_ended, 1);
    }
  }
  return NULL;
}

static void* reader(void* argument) {
  (void)argument;
  while (!atomic_load(&stop_reading)) {
    psm_engine_stats stats = {.struct_size = PSM_ENGINE_STATS_SIZE};
    CHECK_OK(psm_engine_get_stats(engine, &stats));
    CHECK(stats.free_num_blocks + stats.used_num_blocks == stats.max_num_blocks);
    CHECK(stats.num_completed_requests <= stats.num_submitted_requests);
    CHECK(stats.num_queued_requests >= 0 && stats.num_queued_requests <= 50);
    psm_iteration_stats records[10];
    size_t n;
    CHECK_OK(psm_engine_iteration_stats(engine, records, 10, &n));
    CHECK_OK(psm_engine_wake(engine));
    CHECK(psm_engine_event_fd(engine) >= 0);
  }
  return NULL;
}

static void start(fake_executor* fake, int32_t policy) {
  fake_executor_init(fake);
  const psm_executor table = fake_executor_table(fake);
  psm_engine_options options;
  psm_engine_options_init(&options);
  options.scheduler_policy = policy;
  options.max_queue_size = 50;
  options.kv_cache_bytes = 30 * 64;
  CHECK_OK(psm_engine_create(&table, &options, &engine));
}

/* The weighted token sum of a request that runs alone. */
static int32_t sum_alone(int32_t client_id) {
  fake_executor fake;
  fake_executor_init(&fake);
  const psm_executor table = fake_executor_table(&fake);
  psm_engine_options options;
  psm_engine_options_init(&options);
  options.manual_step = 1;
  psm_engine* alone;
  CHECK_OK(psm_engine_create(&table, &options, &alone));
  int32_t prompt[32];
  const psm_request request = make_request(client_id, prompt);
  uint64_t id;
  CHECK_OK(psm_engine_submit(alone, &request, &id));
  for (int32_t did_work = 1; did_work;) CHECK_OK(psm_engine_step(alone, &did_work));
  psm_event events[32];
  size_t n;
  CHECK_OK(psm_engine_poll(alone, events, 32, 0, &n));
  int32_t sum = 0;
  for (size_t i = 0; i + 1 < n; ++i) sum += events[i].token_id * (events[i].output_idx + 1);
  psm_engine_destroy(alone);
  fake_executor_free(&fake);
  return sum;
}

static void test_everything_at_once(int32_t policy) {
  fake_executor fake;
  start(&fake, policy);
  num_ended = num_cancelled = stop_reading = 0;
  for (int i = 0; i < NUM_REQUESTS; ++i) num_tokens[i] = num_ends[i] = token_sums[i] = 0;
  pthread_t submitters[NUM_SUBMITTERS], pollers[NUM_POLLERS], reading;
  int32_t numbers[NUM_SUBMITTERS];
  for (int i = 0; i < NUM_POLLERS; ++i) CHECK(pthread_create(&pollers[i], NULL, poller, NULL) == 0);
  CHECK(pthread_create(&reading, NULL, reader, NULL) == 0);
  for (int i = 0; i < NUM_SUBMITTERS; ++i) {
    numbers[i] = i;
    CHECK(pthread_create(&submitters[i], NULL, submitter, &numbers[i]) == 0);
  }
  for (int i = 0; i < NUM_SUBMITTERS; ++i) pthread_join(submitters[i], NULL);
  while (atomic_load(&num_ended) < NUM_REQUESTS) {
    psm_engine_stats stats = {.struct_size = PSM_ENGINE_STATS_SIZE};
    CHECK_OK(psm_engine_get_stats(engine, &stats));
  }
  atomic_store(&stop_reading, 1);
  pthread_join(reading, NULL);
  CHECK_OK(psm_engine_shutdown(engine)); /* lets the pollers go */
  for (int i = 0; i < NUM_POLLERS; ++i) pthread_join(pollers[i], NULL);
  psm_engine_stats stats = {.struct_size = PSM_ENGINE_STATS_SIZE};
  CHECK_OK(psm_engine_get_stats(engine, &stats));
  CHECK(stats.num_completed_requests == NUM_REQUESTS && stats.used_num_blocks == 0);
  for (int32_t i = 0; i < NUM_REQUESTS; ++i) {
    CHECK(num_ends[i] == 1);
    if (i % 5 == 0) continue; /* may have been cancelled */
    CHECK(num_tokens[i] == 1 + i % 20);
    if (i % 7 == 0) CHECK(token_sums[i] == sum_alone(i));
  }
  CHECK(num_cancelled <= NUM_REQUESTS / 5);
  psm_engine_destroy(engine);
  CHECK(fake.is_closed == 1);
  fake_executor_free(&fake);
}

/* Destroy while requests run, with events that nobody took. */
static void test_destroy_while_running(void) {
  for (int round = 0; round < 20; ++round) {
    fake_executor fake;
    start(&fake, round % 2);
    for (int32_t i = 0; i < 20; ++i) {
      int32_t prompt[32];
      const psm_request request = make_request(19 + i, prompt);
      uint64_t id;
      CHECK_OK(psm_engine_submit(engine, &request, &id));
    }
    psm_engine_destroy(engine);
    CHECK(fake.is_closed == 1);
    fake_executor_free(&fake);
  }
}

static atomic_int num_refused;

static void* stepper(void* argument) {
  (void)argument;
  for (int i = 0; i < 200; ++i) {
    int32_t did_work;
    const psm_status status = psm_engine_step(engine, &did_work);
    CHECK(status == PSM_OK || status == PSM_ERROR_INVALID_ARGUMENT);
    if (status != PSM_OK) atomic_fetch_add(&num_refused, 1);
  }
  return NULL;
}

/* Two threads in psm_engine_step: one is refused, nothing breaks. */
static void test_manual_steps_collide(void) {
  fake_executor fake;
  fake_executor_init(&fake);
  fake.step_sleep_us = 100;
  const psm_executor table = fake_executor_table(&fake);
  psm_engine_options options;
  psm_engine_options_init(&options);
  options.manual_step = 1;
  CHECK_OK(psm_engine_create(&table, &options, &engine));
  for (int32_t i = 0; i < 20; ++i) {
    int32_t prompt[32];
    const psm_request request = make_request(19 + i, prompt);
    uint64_t id;
    CHECK_OK(psm_engine_submit(engine, &request, &id));
  }
  pthread_t steppers[2];
  for (int i = 0; i < 2; ++i) CHECK(pthread_create(&steppers[i], NULL, stepper, NULL) == 0);
  for (int i = 0; i < 2; ++i) pthread_join(steppers[i], NULL);
  CHECK(num_refused > 0);
  psm_engine_destroy(engine);
  fake_executor_free(&fake);
}

int main(void) {
  test_everything_at_once(PSM_GUARANTEED_NO_EVICT);
  test_everything_at_once(PSM_MAX_UTILIZATION);
  test_destroy_while_running();
  test_manual_steps_collide();
  return 0;
}
