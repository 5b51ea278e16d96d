/* plansmith: the C API of the serving core.
 *
 * SPDX-License-Identifier: Apache-2.0
 *
 * The core takes token ids in and gives events out. One engine drives one executor (what computes
 * the logits of a step); the scheduler inside packs the running requests into mixed prefill/decode
 * steps.
 *
 *     psm_executor executor;                            // 1. something that computes logits
 *     if (psm_cpu_executor_create("engine/targets/cpu/model.plan", NULL, &executor) != PSM_OK)
 *       return fprintf(stderr, "%s\n", psm_last_error()), 1;
 *     psm_engine* engine;                               // 2. the scheduler around it
 *     if (psm_engine_create(&executor, NULL, &engine) != PSM_OK)
 *       return fprintf(stderr, "%s\n", psm_last_error()), 1;
 *     psm_request request;                              // 3. work
 *     psm_request_init(&request);
 *     request.prompt_ids = ids, request.num_prompt_ids = num_ids, request.max_tokens = 32;
 *     request.end_ids = &eos, request.num_end_ids = 1;
 *     uint64_t id;
 *     if (psm_engine_submit(engine, &request, &id) != PSM_OK)
 *       return fprintf(stderr, "%s\n", psm_last_error()), 1;
 *     for (int done = 0; !done;) {                      // 4. results
 *       psm_event events[64];
 *       size_t n = 0;
 *       psm_engine_poll(engine, events, 64, -1, &n);
 *       for (size_t i = 0; i < n; ++i) {
 *         if (events[i].kind == PSM_EVENT_TOKEN) printf("%d\n", events[i].token_id);
 *         else done = 1;                                // FINISHED, or FAILED with a message
 *       }
 *     }
 *     psm_engine_destroy(engine);                       // 5. also closes the executor
 *
 * Conventions
 *   - Every function returns psm_status (PSM_OK = 0) unless noted and writes results through its
 *     last arguments; on failure handles written through `out` are NULL. psm_last_error() tells
 *     what, got, wanted and what to do.
 *   - Option structs begin with struct_size, the size up to their LAST FIELD (use the macros below,
 *     or the psm_..._init functions). Fields a caller does not know get their defaults. Unknown
 *     non-zero bytes behind the fields this library knows are refused, and sizes above 4096, which
 *     nobody can have set. Structs without struct_size (events, records of steps, token lists) keep
 *     their fields within a major version.
 *   - Pointers passed in are borrowed for the call only, unless a prototype says otherwise.
 *   - After a fork an engine works in the parent alone; the child opens its own.
 *   - Dimensions: B sequences, T packed tokens, R rows with logits, H query heads, KVH KV heads,
 *     D head size, V vocabulary, L layers.
 */
#ifndef PLANSMITH_PLANSMITH_H_
#define PLANSMITH_PLANSMITH_H_

/* PSM_CDEF is defined where the declarations alone are wanted, for foreign-function binders. */
#ifndef PSM_CDEF
#include <stddef.h>
#include <stdint.h>
#endif

#if defined(PSM_CDEF)
#define PSM_API
#elif defined(_WIN32)
#define PSM_API
#else
#define PSM_API __attribute__((visibility("default")))
#endif

#if defined(__cplusplus) && !defined(PSM_CDEF)
extern "C" {
#endif

/* ---------------------------------------------------------------- versions, status, errors */

/* Major changes break the ABI, minor ones append. */
enum { PSM_ABI_MAJOR = 0, PSM_ABI_MINOR = 1 };

/* major * 1000 + minor of the library that is loaded. Any thread. */
PSM_API int32_t psm_abi_version(void);

/* Library version text, e.g. "0.1.0"; static. */
PSM_API const char* psm_version(void);

typedef int32_t psm_status;

/* code, name, one-line text. The Python classes of runtime/errors.py mirror this list. */
#define PSM_STATUS_LIST(X)                                                                   \
  X(0, PSM_OK, "ok")                                                                         \
  X(1, PSM_ERROR_INVALID_ARGUMENT, "an argument or an option is not valid")                  \
  X(2, PSM_ERROR_SHAPE, "a length or shape is outside the engine's limits")                  \
  X(3, PSM_ERROR_ENGINE_FILE, "an engine file is missing, damaged or of another version")    \
  X(4, PSM_ERROR_OUT_OF_MEMORY, "memory or KV blocks do not suffice")                        \
  X(5, PSM_ERROR_QUEUE_FULL, "the request queue is full")                                    \
  X(6, PSM_ERROR_NOT_FOUND, "no such request")                                               \
  X(7, PSM_ERROR_SHUTDOWN, "the engine is shutting down")                                    \
  X(8, PSM_ERROR_EXECUTOR, "the executor failed")                                            \
  X(9, PSM_ERROR_UNSUPPORTED, "this build or machine cannot do that")                        \
  X(10, PSM_ERROR_BUFFER_TOO_SMALL, "the buffer is too small; the needed size was returned") \
  X(11, PSM_ERROR_CUDA, "a CUDA call failed")                                                \
  X(12, PSM_ERROR_INTERNAL, "a bug in plansmith; please report it")

#define PSM_STATUS_ENUM_(code, name, text) name = code,
enum { PSM_STATUS_LIST(PSM_STATUS_ENUM_) PSM_NUM_STATUS_CODES };
#undef PSM_STATUS_ENUM_

/* Name of a code ("PSM_ERROR_SHAPE") and its one-line text; static, never NULL. Any thread. */
PSM_API const char* psm_status_name(psm_status status);
PSM_API const char* psm_status_text(psm_status status);

/* Message of this thread's last call if it failed, else ""; valid until this thread's next call. */
PSM_API const char* psm_last_error(void);

/* ---------------------------------------------------------------- executors */

/* What an executor is and can take. Filled by the executor. */
typedef struct psm_model_info {
  size_t struct_size;
  int32_t vocab_size;          /* V */
  int32_t num_layers;          /* L */
  int32_t num_heads;           /* H */
  int32_t num_kv_heads;        /* KVH */
  int32_t head_dim;            /* D */
  int32_t max_batch_size;      /* most sequences in a step, inclusive */
  int32_t max_num_tokens;      /* most packed tokens in a step, inclusive */
  int32_t max_input_len;       /* longest prompt, tokens, inclusive */
  int32_t max_seq_len;         /* prompt + output, tokens, inclusive */
  int32_t tokens_per_block;    /* positions in one KV block */
  uint64_t kv_bytes_per_block; /* bytes of one block over all layers, K and V together */
} psm_model_info;

/* One mixed step. All arrays are owned by the caller and valid during the call only.
 * Sequence b has query_lens[b] new tokens, which are the last of its kv_lens[b] positions; the step
 * writes their K and V into the pool before it attends. Position p of sequence b lies in block
 * block_table[b * stride + p / tokens_per_block]. Packed order: sequences in context (a prompt, a
 * chunk of one, or what is recomputed after a pause) first, then generating ones (query_lens 1);
 * the order within is the scheduler's and changes from step to step. A sequence has a row of logits
 * when the step reaches its last known token: every generating one, and the one that ends its
 * context. */
typedef struct psm_batch {
  size_t struct_size;
  int32_t num_tokens;           /* T = sum of query_lens; 1 <= T <= max_num_tokens */
  int32_t num_seqs;             /* B; 1 <= B <= max_batch_size */
  int32_t num_logits_rows;      /* R; 0 <= R <= T */
  int32_t block_table_stride;   /* columns of block_table: blocks of this step's longest sequence */
  const int32_t* input_ids;     /* [T] */
  const int32_t* position_ids;  /* [T] position of each token in its sequence, from 0 */
  const int32_t* query_lens;    /* [B] >= 1 */
  const int32_t* kv_lens;       /* [B] positions held after this step, >= query_lens[b] */
  const int32_t* cu_query_lens; /* [B+1] cumulative query_lens, from 0 */
  const int32_t* block_table;   /* [B, stride] blocks in position order; unused entries -1 */
  const int32_t* logits_rows;   /* [R] rows (0..T-1) whose logits are wanted, ascending */
} psm_batch;

/* A table of functions: anything that turns a psm_batch into logits. The engine calls them from one
 * thread at a time (describe and open in psm_engine_create's, step in the engine's own or
 * psm_engine_step's, close in psm_engine_destroy's), in the order describe, open, step..., close.
 * `self` is passed through. A step that fails fails every request in it with PSM_ERROR_EXECUTOR and
 * last_error's text; the engine goes on with the others. Logits must not hold NaN or +infinity: the
 * request whose row does fails. A step may call psm_engine_submit, _cancel and the statistics of
 * its own engine, but nothing that waits for the step: psm_engine_shutdown and psm_engine_step
 * refuse it, psm_engine_destroy must not be called there. */
typedef struct psm_executor {
  size_t struct_size;
  void* self;
  /* Fill *info (its struct_size is set by the caller). May be called before open. */
  psm_status (*describe)(void* self, psm_model_info* info);
  /* Allocate pools of num_blocks KV blocks. Called once. */
  psm_status (*open)(void* self, int32_t num_blocks);
  /* Run one step; *logits points to [R, V] float32, row-major, owned by the executor until its next
   * call. */
  psm_status (*step)(void* self, const psm_batch* batch, const float** logits);
  /* Release everything, self included. Never fails. */
  void (*close)(void* self);
  /* Text of the last failure, or NULL when the executor has none. Optional (may be NULL). */
  const char* (*last_error)(void* self);
} psm_executor;

/* Options of the built-in CPU executor. */
typedef struct psm_cpu_options {
  size_t struct_size;
  int32_t num_threads; /* threads of the fixed pool, the calling thread included; 0 = all cores */
  int32_t pin_threads; /* 1: pin thread i to the i-th core this process may use; default 0 */
  const char* isa;     /* NULL = the best this machine has; else "portable", "avx2", "avx512vnni" */
} psm_cpu_options;

PSM_API void psm_cpu_options_init(psm_cpu_options* options);

/* Map a cpu plan file (targets/cpu/model.plan of an engine directory) and fill *out with an
 * executor over it. options may be NULL. Header, tables and sizes are checked here; the caller
 * checks hashes if it wants them. The caller owns the executor until it gives it to
 * psm_engine_create (or calls out->close(out->self)). */
PSM_API psm_status psm_cpu_executor_create(const char* plan_path, const psm_cpu_options* options,
                                           psm_executor* out);

/* ---------------------------------------------------------------- engine */

typedef struct psm_engine psm_engine;

/* scheduler_policy.
 * GUARANTEED_NO_EVICT: a request starts when the blocks of its full length (prompt + max_tokens)
 * can be reserved; they are taken one by one as positions fill. Never pauses.
 * MAX_UTILIZATION: a request starts when the blocks of its context are free. When a later step does
 * not fit, the last started of the lowest priority is paused: it loses its blocks and later
 * recomputes prompt and output as context. No token is given twice, and none changes.
 * Under both, the first request in line that does not fit stops those behind it. */
enum { PSM_GUARANTEED_NO_EVICT = 0, PSM_MAX_UTILIZATION = 1 };

typedef struct psm_engine_options {
  size_t struct_size;
  /* Default PSM_GUARANTEED_NO_EVICT. */
  int32_t scheduler_policy;
  /* Most running requests; 0 = the executor's. Never above max_num_tokens. */
  int32_t max_batch_size;
  /* Token budget of a step; 0 = the executor's. */
  int32_t max_num_tokens;
  /* 1: prompts are cut to fit the budget, at block boundaries where that leaves something; 0: a
   * prompt over the budget is refused. Default 1. */
  int32_t enable_chunked_context;
  /* Requests that may wait to start; one more is PSM_ERROR_QUEUE_FULL. Default (and 0) 1024. */
  int32_t max_queue_size;
  /* Iteration records kept for psm_engine_iteration_stats; 0 = none. Default 1000. */
  int32_t iter_stats_max_iterations;
  /* Hard cap of the KV pools: they get kv_cache_bytes / kv_bytes_per_block blocks, rounded down.
   * 0 = enough for max_batch_size x max_seq_len, at most 1 GiB. */
  uint64_t kv_cache_bytes;
  /* 1: no thread; the caller runs psm_engine_step. Default 0. */
  int32_t manual_step;
} psm_engine_options;

/* Fill *options with the defaults. Like every init function it sets the fields of ABI 0.1 and
 * struct_size to match: to use a field that was appended later, set it and struct_size (to the
 * _SIZE macro). NULL is ignored. Any thread. */
PSM_API void psm_engine_options_init(psm_engine_options* options);

/* Start an engine over an executor. On success the engine owns the executor and closes it; on
 * failure the caller still does. options may be NULL. Blocks while the executor opens. Fails with
 * INVALID_ARGUMENT (options, table), EXECUTOR (its description or open), OUT_OF_MEMORY
 * (kv_cache_bytes below one block, no thread to be had, or what open says). An executor that has
 * been opened is used up even so: close it. */
PSM_API psm_status psm_engine_create(const psm_executor* executor,
                                     const psm_engine_options* options, psm_engine** out);

/* Stop serving but keep the engine: new requests are refused with PSM_ERROR_SHUTDOWN, the step in
 * progress is waited for, every unfinished request gets a FAILED event with PSM_ERROR_SHUTDOWN, and
 * pollers wake. Events stay pollable; once they are taken psm_engine_poll returns
 * PSM_ERROR_SHUTDOWN. Blocks for one step at most. Any thread but one inside a step of this engine
 * (INVALID_ARGUMENT); again is fine. */
PSM_API psm_status psm_engine_shutdown(psm_engine* engine);

/* psm_engine_shutdown, then close the executor and free the engine with the events nobody took.
 * NULL is fine. No other call on the engine may be in progress or follow: to stop threads that
 * poll, call psm_engine_shutdown first and join them. */
PSM_API void psm_engine_destroy(psm_engine* engine);

/* The executor's description with the engine's narrowed limits. The caller sets info->struct_size.
 * Any thread. */
PSM_API psm_status psm_engine_model_info(psm_engine* engine, psm_model_info* info);

/* With manual_step: run one scheduler iteration; its events can be polled afterwards. *did_work = 0
 * when nothing was left to run. Blocks for the step. One thread at a time; another one, and one
 * inside the step, gets INVALID_ARGUMENT. UNSUPPORTED without manual_step. */
PSM_API psm_status psm_engine_step(psm_engine* engine, int32_t* did_work);

/* ---------------------------------------------------------------- requests */

enum { PSM_MAX_TOP_LOGPROBS = 20, PSM_MAX_ERROR_TEXT = 240 };

/* Token sequences as the old word lists hold them: ids of all words one after another, and where
 * each ends. {5, 6, 7}, {2, 3} = the words [5, 6] and [7]. */
typedef struct psm_token_lists {
  const int32_t* ids;  /* [ends[num_lists - 1]] */
  const int32_t* ends; /* [num_lists] strictly increasing */
  int32_t num_lists;
} psm_token_lists;

/* One request. Set it up with psm_request_init (the defaults stand beside the fields). The logits
 * of a token go through the penalties, logit_bias, bad_words, min_tokens, temperature, top_k, top_p
 * (over what top_k left) and min_p, in this order, before the draw. */
typedef struct psm_request {
  size_t struct_size;
  const int32_t* prompt_ids; /* [num_prompt_ids] token ids, 0 <= id < V */
  int32_t num_prompt_ids;    /* 1 <= n <= max_input_len */
  int32_t max_tokens; /* most tokens to generate, >= 1; n + max_tokens <= max_seq_len. Default 16 */
  int32_t min_tokens; /* end ids and stop words are ignored before this many. 0 */
  float temperature;  /* >= 0; 0 = greedy: the best logit, the lowest id of equal ones. 1.0 */
  int32_t top_k;      /* 0 = all. 0; 1 = greedy */
  float top_p;        /* (0, 1]. 1.0 */
  float min_p;        /* [0, 1]: least probability relative to the best. 0 */
  float repetition_penalty; /* > 0, over prompt and output. 1.0 */
  float presence_penalty;   /* over the output. 0 */
  float frequency_penalty;  /* over the output. 0 */
  uint64_t seed;          /* key of the counter-based generator; token i depends on (seed, i). 0 */
  const int32_t* end_ids; /* [num_end_ids] generation ends on any of them (kept as last token) */
  int32_t num_end_ids;
  int32_t num_logit_bias; /* entries of the two arrays below */
  const int32_t* logit_bias_ids;
  const float* logit_bias_values; /* added to the logits; -INFINITY forbids */
  psm_token_lists bad_words;      /* must not be completed; they may begin in the prompt */
  psm_token_lists stop_words;     /* end generation when the output ends with one (it is kept) */
  /* 0 = none; n >= 1: the chosen token's and the n best, n <= PSM_MAX_TOP_LOGPROBS. 0 */
  int32_t num_logprobs;
  float priority; /* 0..1, higher first; equal: first come. 0.5 */
  /* 0 = no deadline; else the request ends with PSM_FINISH_TIMED_OUT this long after submission,
   * queued or running; looked at between steps. 0 */
  int32_t allotted_time_ms;
  uint64_t client_id; /* the caller's own number, returned in every event. 0 */
} psm_request;

/* Fill *request with the defaults (see psm_engine_options_init). NULL is ignored. Any thread. */
PSM_API void psm_request_init(psm_request* request);

/* Queue a request; its events come out of psm_engine_poll. *request_id is never 0. Copies
 * everything. Does not block. Any thread. Fails with INVALID_ARGUMENT, SHAPE (too long),
 * QUEUE_FULL, SHUTDOWN, or OUT_OF_MEMORY when the request could not fit into the whole KV cache
 * even alone, or the host has no memory for it. */
PSM_API psm_status psm_engine_submit(psm_engine* engine, const psm_request* request,
                                     uint64_t* request_id);

/* Ask for a request's end; its FINISHED event follows with PSM_FINISH_CANCELLED, unless the step in
 * progress ends it otherwise. NOT_FOUND if it has already finished or never was. Again is fine.
 * Does not block. Any thread. */
PSM_API psm_status psm_engine_cancel(psm_engine* engine, uint64_t request_id);

/* ---------------------------------------------------------------- events */

/* psm_event.kind */
enum {
  PSM_EVENT_TOKEN = 1,    /* one generated token */
  PSM_EVENT_FINISHED = 2, /* no more events of this request; stats are filled */
  PSM_EVENT_FAILED = 3    /* no more events; status and message tell why; stats are filled */
};

/* psm_event.finish_reason: the numbers of the old Executor */
enum {
  PSM_FINISH_NOT_FINISHED = 0,
  PSM_FINISH_END_ID = 1,
  PSM_FINISH_STOP_WORDS = 2,
  PSM_FINISH_LENGTH = 3,
  PSM_FINISH_TIMED_OUT = 4,
  PSM_FINISH_CANCELLED = 5
};

/* Times are nanoseconds of CLOCK_MONOTONIC; 0 = did not happen. */
typedef struct psm_request_stats {
  int64_t arrival_time_ns;
  int64_t first_scheduled_time_ns;
  int64_t first_token_time_ns;
  int64_t last_token_time_ns;
  int32_t num_prompt_tokens;
  int32_t num_generated_tokens;
  int32_t alloc_total_blocks; /* KV blocks ever allocated to it, those after a pause included */
  int32_t alloc_new_blocks;
  int32_t reused_blocks;
  int32_t num_pauses;
  uint64_t first_iter;
  uint64_t last_iter;
} psm_request_stats;

typedef struct psm_event {
  uint64_t request_id;
  uint64_t client_id;
  int32_t kind;
  int32_t finish_reason; /* of FINISHED */
  int32_t token_id;      /* of TOKEN */
  int32_t output_idx;    /* of TOKEN: 0 for the first generated token */
  float logprob;     /* natural log of the model's own probability (before temperature, penalties,
                        bias), when num_logprobs > 0 */
  float cum_logprob; /* sum so far */
  int32_t num_top_logprobs;
  int32_t top_ids[PSM_MAX_TOP_LOGPROBS]; /* best first */
  float top_logprobs[PSM_MAX_TOP_LOGPROBS];
  psm_status status; /* of FAILED */
  char message[PSM_MAX_ERROR_TEXT];
  psm_request_stats stats; /* of FINISHED and FAILED */
} psm_event;

/* Take up to max_events events, in order per request. Waits up to timeout_ms (0 = not at all, -1 =
 * for ever) for the first. *num_events may be 0: on time-out and after psm_engine_wake. SHUTDOWN
 * once the engine is shut down and all events are taken. Any thread; several may poll, each event
 * goes to one of them. Events wait without limit: a client that does not poll stalls nobody, and
 * costs memory for what its running requests produce (at most max_tokens + 1 events each,
 * sizeof(psm_event) bytes apiece). */
PSM_API psm_status psm_engine_poll(psm_engine* engine, psm_event* events, size_t max_events,
                                   int32_t timeout_ms, size_t* num_events);

/* A file descriptor that is readable exactly while events wait, and after a shutdown (for epoll,
 * select, asyncio). Owned by the engine; never read, write or close it. -1 where the platform has
 * none. Any thread. */
PSM_API int32_t psm_engine_event_fd(psm_engine* engine);

/* Wake every thread that waits in psm_engine_poll; they return with what there is. Not remembered:
 * a thread that begins to wait afterwards waits. Any thread. */
PSM_API psm_status psm_engine_wake(psm_engine* engine);

/* ---------------------------------------------------------------- statistics */

/* Totals since creation and the state now. Names follow the old Executor's. */
typedef struct psm_engine_stats {
  size_t struct_size;
  uint64_t iter; /* steps run */
  uint64_t num_submitted_requests;
  uint64_t num_completed_requests; /* finished, failed or cancelled */
  int32_t num_active_requests;     /* running or paused */
  int32_t num_queued_requests;
  int32_t num_paused_requests;
  int32_t max_num_active_requests; /* the batch limit */
  uint64_t num_prompt_tokens;      /* context tokens computed, recomputed ones included */
  uint64_t num_generated_tokens;
  uint64_t num_pauses;
  /* KvCacheStats */
  int32_t max_num_blocks;
  int32_t free_num_blocks;
  int32_t used_num_blocks;
  int32_t tokens_per_block;
  uint64_t alloc_total_blocks;
  uint64_t alloc_new_blocks; /* all of them, as long as nothing is reused */
  uint64_t reused_blocks;    /* 0: this version shares no prefixes */
  uint64_t missed_blocks;    /* 0, likewise */
  uint64_t kv_cache_bytes;   /* bytes of the pools */
  /* Sums over steps, for the share of allocated positions that hold nothing: waste = 1 - used /
   * allocated. Allocated: blocks x tokens_per_block while the step runs; used: positions held at
   * its end. */
  uint64_t kv_allocated_token_steps;
  uint64_t kv_used_token_steps;
  uint64_t step_time_ns;     /* in the executor */
  uint64_t schedule_time_ns; /* outside it, while there was work */
} psm_engine_stats;

/* The caller sets stats->struct_size. A finished request is counted before its last event can be
 * polled. Any thread. */
PSM_API psm_status psm_engine_get_stats(psm_engine* engine, psm_engine_stats* stats);

/* One step. */
typedef struct psm_iteration_stats {
  uint64_t iter;
  int64_t timestamp_ns; /* CLOCK_MONOTONIC at its start */
  double iter_latency_ms;
  double executor_latency_ms;
  /* Summed over the requests first scheduled in this step. */
  double new_active_requests_queue_latency_ms;
  int32_t num_new_active_requests;
  int32_t num_active_requests;
  int32_t num_queued_requests;
  int32_t num_completed_requests; /* in this step */
  int32_t num_scheduled_requests;
  int32_t num_context_requests;
  int32_t num_gen_requests;
  int32_t num_paused_requests;
  int32_t num_ctx_tokens;
  int32_t num_gen_tokens;
  int32_t free_num_blocks;
  int32_t used_num_blocks;
} psm_iteration_stats;

/* Take up to max_records records, oldest first; each is given once; beyond
 * iter_stats_max_iterations the oldest are dropped. Any thread. */
PSM_API psm_status psm_engine_iteration_stats(psm_engine* engine, psm_iteration_stats* records,
                                              size_t max_records, size_t* num_records);

/* ---------------------------------------------------------------- struct sizes */

#define PSM_SIZE_UP_TO_(type, last) (offsetof(type, last) + sizeof(((type*)0)->last))
#define PSM_MODEL_INFO_SIZE PSM_SIZE_UP_TO_(psm_model_info, kv_bytes_per_block)
#define PSM_BATCH_SIZE PSM_SIZE_UP_TO_(psm_batch, logits_rows)
#define PSM_EXECUTOR_SIZE PSM_SIZE_UP_TO_(psm_executor, last_error)
#define PSM_CPU_OPTIONS_SIZE PSM_SIZE_UP_TO_(psm_cpu_options, isa)
#define PSM_ENGINE_OPTIONS_SIZE PSM_SIZE_UP_TO_(psm_engine_options, manual_step)
#define PSM_REQUEST_SIZE PSM_SIZE_UP_TO_(psm_request, client_id)
#define PSM_ENGINE_STATS_SIZE PSM_SIZE_UP_TO_(psm_engine_stats, schedule_time_ns)

#if defined(__cplusplus) && !defined(PSM_CDEF)
}
#endif

#endif /* PLANSMITH_PLANSMITH_H_ */
