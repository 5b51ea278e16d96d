/* What the API refuses, and what it says: requests, options, executors, struct sizes, NULL
 * pointers.
 *
 * SPDX-License-Identifier: Apache-2.0
 */
#include <math.h>
#include <string.h>

#include "check.h"
#include "fake_executor.h"

static const int32_t prompt[] = {1, 2, 3, 4, 5};
static psm_engine* engine;

#define REFUSED(call, code, text)                                                                  \
  do {                                                                                             \
    const psm_status got_ = (call);                                                                \
    if (got_ != (code) || strstr(psm_last_error(), text) == NULL) {                                \
      fprintf(stderr, "%s:%d: %s gave %s: %s\n", __FILE__, __LINE__, #call, psm_status_name(got_), \
              psm_last_error());                                                                   \
      exit(1);                                                                                     \
    }                                                                                              \
  } while (0)

static psm_request good(void) {
  psm_request request = {0};
  psm_request_init(&request);
  request.struct_size = PSM_REQUEST_SIZE;
  request.prompt_ids = prompt;
  request.num_prompt_ids = 5;
  return request;
}

static psm_status submit(psm_request request) {
  uint64_t id = 77;
  const psm_status status = psm_engine_submit(engine, &request, &id);
  CHECK(status == PSM_OK || id == 0);
  return status;
}

/* A good request with one field changed is refused with `code` and a message that holds `text`. */
#define BAD(change, code, text)     \
  do {                              \
    psm_request r = good();         \
    change;                         \
    REFUSED(submit(r), code, text); \
  } while (0)

static void test_requests(void) {
  enum { BAD_ARG = PSM_ERROR_INVALID_ARGUMENT };
  CHECK_OK(submit(good()));
  BAD(r.num_prompt_ids = 0, BAD_ARG, "num_prompt_ids is 0");
  BAD(r.num_prompt_ids = -3, BAD_ARG, "num_prompt_ids is -3");
  BAD(r.prompt_ids = NULL, BAD_ARG, "prompt_ids is NULL");
  const int32_t high[] = {1, 2, 101};
  const int32_t low[] = {-1, 2, 3};
  BAD((r.prompt_ids = high, r.num_prompt_ids = 3), BAD_ARG,
      "prompt_ids[2] is 101, wanted a token id from 0 to 100");
  BAD((r.prompt_ids = low, r.num_prompt_ids = 3), BAD_ARG, "prompt_ids[0] is -1");
  BAD(r.max_tokens = 0, BAD_ARG, "max_tokens is 0");
  BAD(r.max_tokens = -1, BAD_ARG, "max_tokens is -1");
  BAD(r.min_tokens = -1, BAD_ARG, "min_tokens is -1");
  BAD(r.min_tokens = 17, BAD_ARG, "min_tokens is 17");
  int32_t long_prompt[200] = {0};
  BAD((r.prompt_ids = long_prompt, r.num_prompt_ids = 97), PSM_ERROR_SHAPE,
      "prompt has 97 tokens, the engine's max_input_len is 96");
  BAD(r.max_tokens = 124, PSM_ERROR_SHAPE, "max_seq_len is 128");
  BAD(r.max_tokens = 2147483647, PSM_ERROR_SHAPE, "max_seq_len is 128");
  BAD(r.max_tokens = 80, PSM_ERROR_OUT_OF_MEMORY, "need 22 KV blocks, the whole cache has 20");
  BAD(r.temperature = -0.1f, BAD_ARG, "temperature is -0.1");
  BAD(r.temperature = NAN, BAD_ARG, "temperature is nan");
  BAD(r.temperature = INFINITY, BAD_ARG, "temperature is inf");
  BAD(r.top_k = -1, BAD_ARG, "top_k is -1");
  BAD(r.top_p = 0.0f, BAD_ARG, "top_p is 0");
  BAD(r.top_p = 1.01f, BAD_ARG, "top_p is 1.01");
  BAD(r.top_p = NAN, BAD_ARG, "top_p is nan");
  BAD(r.min_p = -0.1f, BAD_ARG, "min_p is -0.1");
  BAD(r.min_p = 1.1f, BAD_ARG, "min_p is 1.1");
  BAD(r.min_p = NAN, BAD_ARG, "min_p is nan");
  BAD(r.repetition_penalty = 0.0f, BAD_ARG, "repetition_penalty is 0");
  BAD(r.repetition_penalty = NAN, BAD_ARG, "repetition_penalty is nan");
  BAD(r.presence_penalty = NAN, BAD_ARG, "presence_penalty is nan");
  BAD(r.frequency_penalty = INFINITY, BAD_ARG, "frequency_penalty is inf");
  BAD(r.num_end_ids = -1, BAD_ARG, "end_ids has the count -1");
  BAD(r.num_end_ids = 1, BAD_ARG, "end_ids is NULL");
  BAD((r.end_ids = high, r.num_end_ids = 3), BAD_ARG, "end_ids[2] is 101");
  const float bias[] = {1.0f, NAN, INFINITY};
  BAD((r.num_logit_bias = 1, r.logit_bias_values = bias), BAD_ARG, "logit_bias_ids is NULL");
  BAD((r.num_logit_bias = 1, r.logit_bias_ids = prompt), BAD_ARG, "logit_bias_values is NULL");
  BAD((r.num_logit_bias = 2, r.logit_bias_ids = prompt, r.logit_bias_values = bias), BAD_ARG,
      "logit_bias_values[1] is");
  BAD((r.num_logit_bias = 1, r.logit_bias_ids = prompt, r.logit_bias_values = bias + 2), BAD_ARG,
      "logit_bias_values[0] is inf");
  BAD((r.num_logit_bias = 3, r.logit_bias_ids = high, r.logit_bias_values = bias), BAD_ARG,
      "logit_bias_ids[2] is 101");
  BAD(r.num_logit_bias = -1, BAD_ARG, "logit_bias_ids has the count -1");
  const int32_t ends[] = {2, 2, 3};
  const int32_t zero_first[] = {0, 2};
  BAD(r.stop_words.num_lists = -1, BAD_ARG, "stop_words.num_lists is -1");
  BAD(r.stop_words.num_lists = 1, BAD_ARG, "stop_words.ends is NULL");
  BAD((r.stop_words.num_lists = 1, r.stop_words.ends = ends), BAD_ARG, "stop_words.ids is NULL");
  BAD((r.bad_words = (psm_token_lists){prompt, ends, 3}), BAD_ARG,
      "bad_words.ends[1] is 2, wanted more than 2");
  BAD((r.bad_words = (psm_token_lists){prompt, zero_first, 2}), BAD_ARG, "bad_words.ends[0] is 0");
  BAD((r.bad_words = (psm_token_lists){low, ends, 1}), BAD_ARG, "bad_words.ids[0] is -1");
  BAD(r.num_logprobs = -1, BAD_ARG, "num_logprobs is -1");
  BAD(r.num_logprobs = 21, BAD_ARG, "num_logprobs is 21, wanted 0 (none) to 20");
  BAD(r.priority = 1.5f, BAD_ARG, "priority is 1.5");
  BAD(r.priority = NAN, BAD_ARG, "priority is nan");
  BAD(r.allotted_time_ms = -5, BAD_ARG, "allotted_time_ms is -5");
}

static void test_fields_of_abi_1_1(void) {
  enum { BAD_ARG = PSM_ERROR_INVALID_ARGUMENT };
  const int32_t ids[] = {1, 2, 101};
  BAD(r.num_draft_ids = -1, BAD_ARG, "draft_ids has the count -1");
  BAD(r.num_draft_ids = 2, BAD_ARG, "draft_ids is NULL with a count of 2");
  BAD((r.draft_ids = ids, r.num_draft_ids = 3), BAD_ARG, "draft_ids[2] is 101");
  BAD((r.draft_ids = ids, r.num_draft_ids = 2, r.beam_width = 2, r.temperature = 0), BAD_ARG,
      "does not go with draft_ids");
  BAD(r.no_repeat_ngram_size = -1, BAD_ARG, "no_repeat_ngram_size is -1");
  BAD(r.top_p_decay = -0.5f, BAD_ARG, "top_p_decay is -0.5");
  BAD(r.top_p_decay = 1.5f, BAD_ARG, "top_p_decay is 1.5");
  BAD(r.top_p_decay = NAN, BAD_ARG, "top_p_decay is nan");
  BAD(r.top_p_min = 1.5f, BAD_ARG, "top_p_min is 1.5");
  BAD((r.top_p_decay = 0.5f, r.top_p_reset_id = 101), BAD_ARG, "top_p_reset_id is 101");
  BAD((r.top_p_decay = 0.5f, r.top_p_reset_id = -2), BAD_ARG, "top_p_reset_id is -2");
  BAD((r.top_p_decay = 0.5f, r.beam_width = 2, r.temperature = 0), BAD_ARG, "top_p_decay");

  /* Of ABI 1.0, as its psm_request_init leaves it: what stands behind is not looked at. */
  psm_request old;
  memset(&old, 0xff, sizeof old);
  psm_request_init(&old);
  CHECK(old.struct_size == PSM_SIZE_UP_TO_(psm_request, guide));
  CHECK(old.num_draft_ids == -1 && old.top_p_reset_id == -1); /* not written either */
  const psm_request from = good();
  old.prompt_ids = from.prompt_ids;
  old.num_prompt_ids = from.num_prompt_ids;
  CHECK_OK(submit(old));
}

/* An old caller's shorter struct works, a newer caller's longer one works while its new fields are
 * zero. */
static void test_struct_sizes(void) {
  const psm_status bad_arg = PSM_ERROR_INVALID_ARGUMENT;
  BAD(r.struct_size = 0, bad_arg, "psm_request.struct_size is 0");
  BAD(r.struct_size = offsetof(psm_request, num_prompt_ids), bad_arg, "at least");
  BAD(r.struct_size = offsetof(psm_request, top_p) + 1, bad_arg, "ends inside a field");

  BAD(r.struct_size = SIZE_MAX, bad_arg, "no version of it takes more than"); /* never set */
  BAD(r.struct_size = 5000, bad_arg, "no version of it takes more than");

  /* up to num_prompt_ids: everything behind takes its default, garbage there is not looked at */
  psm_request request = good();
  memset((char*)&request + offsetof(psm_request, max_tokens), 0xff,
         PSM_REQUEST_SIZE - offsetof(psm_request, max_tokens));
  request.struct_size = PSM_SIZE_UP_TO_(psm_request, num_prompt_ids);
  psm_event events[64];
  size_t n = 0;
  CHECK_OK(psm_engine_poll(engine, events, 64, 0, &n));
  CHECK_OK(submit(request));
  int32_t did_work = 1;
  while (did_work) CHECK_OK(psm_engine_step(engine, &did_work));
  CHECK_OK(psm_engine_poll(engine, events, 64, 0, &n));
  CHECK(events[n - 1].stats.num_generated_tokens == 16 &&
        events[n - 1].client_id == 0); /* the default max_tokens */

  struct {
    psm_request request;
    unsigned char appended[16];
  } newer;
  memset(&newer, 0, sizeof newer);
  newer.request = good();
  newer.request.struct_size = sizeof newer;
  uint64_t id;
  CHECK_OK(psm_engine_submit(engine, &newer.request, &id));
  newer.appended[9] = 1;
  REFUSED(psm_engine_submit(engine, &newer.request, &id), bad_arg, "does not know");

  struct {
    psm_guide guide;
    unsigned char appended[8];
  } newer_guide;
  memset(&newer_guide, 0, sizeof newer_guide);
  request = good();
  request.guide = &newer_guide.guide;
  REFUSED(submit(request), bad_arg, "psm_guide.struct_size is 0");
  newer_guide.guide.struct_size = sizeof newer_guide;
  newer_guide.appended[3] = 1;
  REFUSED(submit(request), bad_arg, "psm_guide has a field at byte");
  newer_guide.appended[3] = 0;
  REFUSED(submit(request), bad_arg, "psm_guide.fill_mask is NULL");

  psm_engine_stats stats;
  memset(&stats, 0x5a, sizeof stats);
  REFUSED(psm_engine_get_stats(engine, &stats), bad_arg, "no version of it takes more than");
  stats.struct_size = PSM_SIZE_UP_TO_(psm_engine_stats, iter);
  REFUSED(psm_engine_get_stats(engine, NULL), bad_arg, "stats is NULL");
  CHECK_OK(psm_engine_get_stats(engine, &stats));
  CHECK(stats.iter > 0 &&
        stats.num_submitted_requests == UINT64_C(0x5a5a5a5a5a5a5a5a)); /* nothing beyond */
  stats.struct_size = 3;
  REFUSED(psm_engine_get_stats(engine, &stats), bad_arg, "psm_engine_stats.struct_size is 3");
  struct {
    psm_model_info info;
    unsigned char appended[8];
  } newer_info;
  memset(&newer_info, 0x5a, sizeof newer_info);
  newer_info.info.struct_size = sizeof newer_info;
  CHECK_OK(psm_engine_model_info(engine, &newer_info.info));
  CHECK(newer_info.info.struct_size == sizeof newer_info && newer_info.info.vocab_size == 101);
  CHECK(newer_info.appended[0] == 0 &&
        newer_info.appended[7] == 0); /* what this library does not know reads as 0 */
}

static psm_status create(const psm_executor* executor, const psm_engine_options* options) {
  psm_engine* made = (psm_engine*)&made;
  const psm_status status = psm_engine_create(executor, options, &made);
  if (status == PSM_OK) {
    psm_engine_destroy(made);
  } else {
    CHECK(made == NULL);
  }
  return status;
}

#define BAD_INFO(change, text)                                  \
  do {                                                          \
    fake_executor f;                                            \
    fake_executor_init(&f);                                     \
    const psm_executor table = fake_executor_table(&f);         \
    change;                                                     \
    REFUSED(create(&table, NULL), PSM_ERROR_EXECUTOR, text);    \
    CHECK(!f.is_open && !f.is_closed); /* still the caller's */ \
    fake_executor_free(&f);                                     \
  } while (0)

#define BAD_TABLE(change, text)                                      \
  do {                                                               \
    fake_executor f;                                                 \
    fake_executor_init(&f);                                          \
    psm_executor table = fake_executor_table(&f);                    \
    change;                                                          \
    REFUSED(create(&table, NULL), PSM_ERROR_INVALID_ARGUMENT, text); \
    CHECK(!f.is_open && !f.is_closed);                               \
    fake_executor_free(&f);                                          \
  } while (0)

#define BAD_OPTION(change, code, text)                  \
  do {                                                  \
    fake_executor f;                                    \
    fake_executor_init(&f);                             \
    const psm_executor table = fake_executor_table(&f); \
    psm_engine_options o;                               \
    psm_engine_options_init(&o);                        \
    change;                                             \
    REFUSED(create(&table, &o), code, text);            \
    CHECK(!f.is_open && !f.is_closed);                  \
    fake_executor_free(&f);                             \
  } while (0)

static psm_status fail_describe(void* self, psm_model_info* info) {
  (void)info;
  strcpy(((fake_executor*)self)->error, "no such device");
  return PSM_ERROR_CUDA;
}

static psm_status fail_open(void* self, int32_t num_blocks) {
  (void)num_blocks;
  strcpy(((fake_executor*)self)->error, "cudaMalloc refused");
  return PSM_ERROR_OUT_OF_MEMORY;
}

static void test_executors(void) {
  BAD_INFO(f.info.vocab_size = 0, "vocab_size = 0");
  BAD_INFO(f.info.vocab_size = -5, "vocab_size = -5");
  BAD_INFO(f.info.num_layers = -1, "num_layers = -1");
  BAD_INFO(f.info.max_batch_size = 0, "max_batch_size = 0");
  BAD_INFO(f.info.max_num_tokens = -1, "max_num_tokens = -1");
  BAD_INFO(f.info.max_input_len = 0, "max_input_len = 0");
  BAD_INFO(f.info.max_seq_len = 95, "max_seq_len = 95, at least 96");
  BAD_INFO(f.info.tokens_per_block = 0, "tokens_per_block = 0");
  BAD_INFO(f.info.max_logits_rows = -1, "max_logits_rows = -1");
  BAD_INFO(f.info.max_adapters = -1, "max_adapters = -1");
  BAD_INFO(f.info.max_adapter_rank = -1, "max_adapter_rank = -1");
  BAD_INFO(f.info.kv_bytes_per_block = 0, "kv_bytes_per_block = 0");
  BAD_TABLE(table.describe = NULL, "describe is NULL");
  BAD_TABLE(table.open = NULL, "open is NULL");
  BAD_TABLE(table.step = NULL, "step is NULL");
  BAD_TABLE(table.close = NULL, "close is NULL");
  BAD_TABLE(table.struct_size = 0, "psm_executor.struct_size is 0");
  BAD_TABLE(table.struct_size = offsetof(psm_executor, close), "psm_executor.struct_size");

  fake_executor f;
  fake_executor_init(&f);
  psm_executor table = fake_executor_table(&f);
  table.describe = fail_describe;
  REFUSED(create(&table, NULL), PSM_ERROR_EXECUTOR, "PSM_ERROR_CUDA: no such device");
  table = fake_executor_table(&f);
  table.open = fail_open;
  REFUSED(create(&table, NULL), PSM_ERROR_OUT_OF_MEMORY, "cudaMalloc refused");
  CHECK(!f.is_closed);
  table.last_error = NULL; /* optional */
  REFUSED(create(&table, NULL), PSM_ERROR_OUT_OF_MEMORY, "it gave no reason");
  table = fake_executor_table(&f);
  table.struct_size =
      PSM_SIZE_UP_TO_(psm_executor, close); /* of before last_error: the pointer is not read */
  table.last_error = (const char* (*)(void*))1;
  CHECK_OK(create(&table, NULL));
  CHECK(f.is_closed == 1);
  fake_executor_free(&f);
}

static void test_options(void) {
  enum { BAD_ARG = PSM_ERROR_INVALID_ARGUMENT };
  BAD_OPTION(o.scheduler_policy = 2, BAD_ARG, "scheduler_policy is 2");
  BAD_OPTION(o.max_batch_size = 9, BAD_ARG, "max_batch_size is 9, the executor takes 1 to 8");
  BAD_OPTION(o.max_batch_size = -1, BAD_ARG, "max_batch_size is -1");
  BAD_OPTION(o.max_num_tokens = 33, BAD_ARG, "max_num_tokens is 33, the executor takes 1 to 32");
  BAD_OPTION(o.enable_chunked_context = 2, BAD_ARG, "enable_chunked_context is 2");
  BAD_OPTION(o.manual_step = -1, BAD_ARG, "manual_step is -1");
  BAD_OPTION(o.max_queue_size = -1, BAD_ARG, "max_queue_size is -1");
  BAD_OPTION(o.iter_stats_max_iterations = -1, BAD_ARG, "iter_stats_max_iterations is -1");
  BAD_OPTION(o.kv_cache_bytes = 63, PSM_ERROR_OUT_OF_MEMORY,
             "kv_cache_bytes is 63, one KV block takes 64");
  BAD_OPTION(o.kv_cache_bytes = UINT64_MAX, PSM_ERROR_OUT_OF_MEMORY, "can be counted");
  BAD_OPTION((o.struct_size = PSM_ENGINE_OPTIONS_SIZE, o.queue_order = 2), BAD_ARG,
             "queue_order is 2, wanted 0 to 1");
  BAD_OPTION((o.struct_size = PSM_ENGINE_OPTIONS_SIZE, o.queue_order = -1), BAD_ARG,
             "queue_order is -1");
  BAD_OPTION(o.struct_size = 2, BAD_ARG, "psm_engine_options.struct_size is 2");
  BAD_OPTION(o.struct_size = offsetof(psm_engine_options, max_batch_size) + 2, BAD_ARG,
             "ends inside a field");
  fake_executor f;
  fake_executor_init(&f);
  const psm_executor table = fake_executor_table(&f);
  psm_engine_options o;
  memset(&o, 0xff, sizeof o);
  o.struct_size = sizeof o.struct_size; /* all defaults */
  CHECK_OK(create(&table, &o));
  fake_executor_free(&f);
  fake_executor_init(&f);
  psm_engine_options_init(&o); /* of before ABI 1.3: queue_order is not read */
  o.queue_order = 99;
  CHECK_OK(create(&table, &o));
  fake_executor_free(&f);
}

static void test_null_pointers(void) {
  enum { BAD_ARG = PSM_ERROR_INVALID_ARGUMENT };
  fake_executor f;
  fake_executor_init(&f);
  const psm_executor table = fake_executor_table(&f);
  psm_engine* none = NULL;
  psm_request request = good();
  uint64_t id;
  psm_event event;
  size_t n;
  int32_t did_work;
  psm_model_info info = {.struct_size = PSM_MODEL_INFO_SIZE};
  psm_engine_stats stats = {.struct_size = PSM_ENGINE_STATS_SIZE};
  REFUSED(psm_engine_create(NULL, NULL, &none), BAD_ARG, "executor is NULL");
  REFUSED(psm_engine_create(&table, NULL, NULL), BAD_ARG, "out is NULL");
  REFUSED(psm_engine_submit(NULL, &request, &id), BAD_ARG, "engine is NULL");
  REFUSED(psm_engine_submit(engine, NULL, &id), BAD_ARG, "request is NULL");
  REFUSED(psm_engine_submit(engine, &request, NULL), BAD_ARG, "request_id is NULL");
  REFUSED(psm_engine_cancel(NULL, 1), BAD_ARG, "engine is NULL");
  REFUSED(psm_engine_poll(NULL, &event, 1, 0, &n), BAD_ARG, "engine is NULL");
  REFUSED(psm_engine_poll(engine, NULL, 1, 0, &n), BAD_ARG, "events is NULL");
  REFUSED(psm_engine_poll(engine, &event, 1, 0, NULL), BAD_ARG, "num_events is NULL");
  REFUSED(psm_engine_poll(engine, &event, 1, -2, &n), BAD_ARG, "timeout_ms is -2");
  REFUSED(psm_engine_step(NULL, &did_work), BAD_ARG, "engine is NULL");
  REFUSED(psm_engine_step(engine, NULL), BAD_ARG, "did_work is NULL");
  REFUSED(psm_engine_wake(NULL), BAD_ARG, "engine is NULL");
  REFUSED(psm_engine_shutdown(NULL), BAD_ARG, "engine is NULL");
  REFUSED(psm_engine_model_info(NULL, &info), BAD_ARG, "engine is NULL");
  REFUSED(psm_engine_model_info(engine, NULL), BAD_ARG, "info is NULL");
  REFUSED(psm_engine_get_stats(NULL, &stats), BAD_ARG, "engine is NULL");
  REFUSED(psm_engine_iteration_stats(engine, NULL, 1, &n), BAD_ARG, "records is NULL");
  REFUSED(psm_engine_iteration_stats(engine, NULL, 0, NULL), BAD_ARG, "num_records is NULL");
  CHECK(psm_engine_event_fd(NULL) == -1);
  psm_request_init(NULL);
  psm_engine_options_init(NULL);
  CHECK_OK(psm_engine_poll(engine, NULL, 0, 0, &n)); /* nothing asked, nothing needed */
  CHECK(psm_last_error()[0] == '\0');                /* a success clears the text */
  CHECK(strcmp(psm_status_name(PSM_ERROR_SHAPE), "PSM_ERROR_SHAPE") == 0);
  CHECK(strcmp(psm_status_name(99), "PSM_ERROR_UNKNOWN") == 0 && psm_status_text(99)[0] != '\0');
}

/* Without chunking a prompt above the budget can never run. */
static void test_unchunked_prompt(void) {
  fake_executor f;
  fake_executor_init(&f);
  const psm_executor table = fake_executor_table(&f);
  psm_engine_options o;
  psm_engine_options_init(&o);
  o.manual_step = 1;
  o.enable_chunked_context = 0;
  o.max_num_tokens = 4;
  psm_engine* kept = engine;
  CHECK_OK(psm_engine_create(&table, &o, &engine));
  REFUSED(submit(good()), PSM_ERROR_SHAPE, "prompt has 5 tokens, a step takes max_num_tokens = 4");
  psm_engine_destroy(engine);
  engine = kept;
  fake_executor_free(&f);
}

int main(void) {
  fake_executor f;
  fake_executor_init(&f);
  const psm_executor table = fake_executor_table(&f);
  psm_engine_options o;
  psm_engine_options_init(&o);
  o.manual_step = 1;
  o.kv_cache_bytes = 20 * 64;
  CHECK_OK(psm_engine_create(&table, &o, &engine));
  test_requests();
  test_fields_of_abi_1_1();
  test_struct_sizes();
  test_executors();
  test_options();
  test_null_pointers();
  test_unchunked_prompt();
  psm_engine_destroy(engine);
  fake_executor_free(&f);
  return 0;
}
