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
 *   - A clock is CLOCK_MONOTONIC unless the executor brings its own (a simulated one does).
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
enum { PSM_ABI_MAJOR = 1, PSM_ABI_MINOR = 3 };

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
  X(6, PSM_ERROR_NOT_FOUND, "no such request or adapter")                                    \
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

/* psm_model_info.samples_rows: what an executor can do with a row beyond giving its logits. */
enum {
  PSM_SAMPLES_NONE = 0,
  PSM_SAMPLES_ALL = 1, /* collect draws the tokens itself; of executors that have it */
  /* ABI 1.3, of those without collect: step fills psm_batch.candidates */
  PSM_SAMPLES_CANDIDATES = 2
};

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
  int32_t max_logits_rows;     /* most rows of logits in a step; 0 = max_batch_size */
  int32_t max_adapters;        /* LoRA adapters it holds at a time; 0 = it takes none */
  int32_t max_adapter_rank;    /* of one adapter */
  int32_t samples_rows;        /* ABI 1.2, in what was padding: PSM_SAMPLES_... */
  uint64_t kv_bytes_per_block; /* bytes of one block over all layers, K and V together */
} psm_model_info;

/* A token and its logit. */
typedef struct psm_candidate {
  float logit;
  int32_t token_id;
} psm_candidate;

enum { PSM_MAX_CANDIDATES = 128 };

/* One mixed step. All arrays are owned by the caller and valid during the call only; those of a
 * step in two halves from the call of launch to the end of collect.
 * Sequence b has query_lens[b] new tokens, which are the last of its kv_lens[b] positions; the step
 * writes their K and V into the pool before it attends. Position p of sequence b lies in block
 * block_table[b * stride + p / tokens_per_block]. Sequences may share blocks, but none that is
 * written in this step. Packed order: sequences in context (a prompt, a chunk of one, or what is
 * recomputed after a pause) first, then generating ones (query_lens 1, or 1 + the draft tokens to
 * verify); the order within is the scheduler's and changes from step to step. A sequence has a row
 * of logits when the step reaches its last known token: every generating one (one row for each of
 * its tokens), and the one that ends its context (which may have draft tokens behind it too, each
 * with its row); all rows of a context whose logits were asked for. */
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
  const int32_t* block_table;   /* [B, stride] blocks in position order; behind those of kv_lens:
                                   blocks set aside for later, then -1 */
  const int32_t* logits_rows;   /* [R] rows (0..T-1) whose logits are wanted, ascending */
  const int32_t* adapter_slots; /* [B] slot of load_adapter, -1 = none; NULL = none at all */
  /* ABI 1.3: with num_candidates > 0, which needs PSM_SAMPLES_CANDIDATES, step also gives each
   * row's largest logits, best first, the lower id of equal ones: greedy and top_k draws need no
   * more. A list that ends early ends with token_id -1: the rest of the row is at -infinity. An
   * empty one leaves the row to its logits, as it must for one with NaN or +infinity. */
  int32_t num_candidates;    /* of each row, 0..PSM_MAX_CANDIDATES; 0 = none are wanted */
  psm_candidate* candidates; /* [R, num_candidates], the caller's */
} psm_batch;

enum { PSM_MAX_TOP_LOGPROBS = 20 };

/* How the token of one row of logits is drawn. This and the three structs that follow (ABI 1.2) are
 * 32-bit words without padding, so that a device reads and writes them as they are. */
typedef struct psm_sampling_row {
  uint64_t seed;
  int32_t output_idx;   /* which token of its output it is, from 0: the draw depends on (seed,
                           output_idx) alone */
  float temperature;    /* 0 = greedy: the best logit, the lowest id of equal ones */
  float top_p;          /* (0, 1], of this row */
  float min_p;          /* [0, 1] */
  int32_t top_k;        /* 0 = all */
  int32_t num_logprobs; /* 0 = none; n: the token's own and the n best, of the logits as the model
                           gave them */
  int32_t edit_begin;   /* edits[edit_begin .. edit_end) are this row's */
  int32_t edit_end;
  int32_t mask_idx; /* the row's mask; -1 = every token may be drawn */
  int32_t reserved; /* 0 */
} psm_sampling_row;

/* A change of one logit: x = x > 0 ? x / factor : x * factor, then x = x - minus, then x = x +
 * plus, each rounded to float32. It stands for the request's penalties, logit_bias, bad_words,
 * no_repeat_ngram_size and min_tokens. */
typedef struct psm_logit_edit {
  int32_t id; /* ascending within a row, each once */
  float factor;
  float minus;
  float plus; /* -INFINITY forbids the token; factor is 1 and minus 0 then */
} psm_logit_edit;

/* The draws of a step: for each row the mask, then the edits, then temperature, top_k, top_p, min_p
 * and the draw as docs/design.md has it, so that equal logits give equal tokens on every executor.
 * Owned by the engine, valid until collect returns. */
typedef struct psm_step_sampling {
  size_t struct_size;
  int32_t num_rows; /* R, the batch's num_logits_rows, in their order */
  int32_t num_edits;
  int32_t num_masks;
  int32_t mask_words;           /* (V + 31) / 32 */
  const psm_sampling_row* rows; /* [num_rows] */
  const psm_logit_edit* edits;  /* [num_edits] */
  const uint32_t* masks; /* [num_masks, mask_words] bit id % 32 of word id / 32: may be drawn;
                            bits behind V are 0 */
} psm_step_sampling;

/* psm_row_sample.token where there is none. */
enum {
  PSM_ROW_BAD_LOGITS = -1, /* the model's logits hold NaN or +infinity */
  PSM_ROW_FORBIDDEN = -2,  /* every token is at -infinity */
  PSM_ROW_OVERFLOW = -3    /* the edits made NaN or +infinity of the model's logits */
};

/* What was drawn from a row. */
typedef struct psm_row_sample {
  int32_t token;    /* or PSM_ROW_... */
  float logprob;    /* of the token; with num_logprobs */
  int32_t num_top;  /* with num_logprobs: of them, those that are not at -infinity; else 0 */
  int32_t reserved; /* 0 */
  int32_t top_ids[PSM_MAX_TOP_LOGPROBS]; /* best first, the lower id of equal ones */
  float top_logprobs[PSM_MAX_TOP_LOGPROBS];
} psm_row_sample;

/* psm_block_copy.kind. Device blocks are those of open, host blocks those of open_host. */
enum { PSM_COPY_DEVICE = 0, PSM_COPY_TO_HOST = 1, PSM_COPY_FROM_HOST = 2 };

/* Copy the first num_tokens positions of block src to block dst, all layers, K and V. */
typedef struct psm_block_copy {
  int32_t kind;
  int32_t src;
  int32_t dst;
  int32_t num_tokens; /* 1 <= n <= tokens_per_block */
} psm_block_copy;

/* The matrix that a part of a LoRA adapter changes: the ids of the old lora_config tensor. */
enum {
  PSM_LORA_ATTN_Q = 1,
  PSM_LORA_ATTN_K = 2,
  PSM_LORA_ATTN_V = 3,
  PSM_LORA_ATTN_DENSE = 4, /* the output projection */
  PSM_LORA_MLP_UP = 5,     /* h_to_4h: transformers' up_proj */
  PSM_LORA_MLP_DOWN = 6,   /* 4h_to_h: down_proj */
  PSM_LORA_MLP_GATE = 7    /* gate_proj */
};

/* y += scale * b (a x) for one matrix y = W x of one layer. */
typedef struct psm_lora_module {
  int32_t layer_idx;
  int32_t module; /* PSM_LORA_... */
  int32_t rank;
  int32_t in_features;
  int32_t out_features;
  float scale;    /* alpha / rank, or alpha / sqrt(rank) */
  const float* a; /* [rank, in_features] row-major */
  const float* b; /* [out_features, rank] row-major */
} psm_lora_module;

/* psm_op_profile.step_kind */
enum {
  PSM_STEPS_DECODE = 0, /* one new token a sequence */
  PSM_STEPS_CONTEXT = 1 /* the others: with prompts, or with draft tokens to verify */
};

/* psm_op_profile.arithmetic: what its operations are */
enum { PSM_ARITHMETIC_F32 = 0, PSM_ARITHMETIC_INT8 = 1, PSM_ARITHMETIC_BF16 = 2 };

/* What one op (some that run as one, or a part of one) took in all steps of one kind so far; or,
 * with kind "step", what the steps took. Texts live as long as the executor. */
typedef struct psm_op_profile {
  const char* name;     /* of the plan's op, e.g. "layers.0.qkv"; "" of a step */
  const char* kind;     /* "linear", "attention", "rms_norm + quantize", ..., "step" */
  const char* weights;  /* of a product or a table: "f32", "bf16", "int8", "int4", ...; else "" */
  int32_t step_kind;    /* PSM_STEPS_... */
  int32_t arithmetic;   /* PSM_ARITHMETIC_... */
  int32_t out_features; /* N of a product; 0 */
  int32_t in_features;  /* K of a product; 0 */
  uint64_t calls;       /* steps it ran in */
  uint64_t rows;        /* summed over calls: T, or R behind the last layer */
  uint64_t time_ns;     /* summed over threads, divided by their number; of a step: from its call to
                           its return */
  uint64_t wait_ns;     /* likewise: what threads waited for the others behind it */
  /* By arithmetic. Bytes are what has to be moved once: weights with their scales, K and V as far
   * as the step's rows see them, rows of activations read and written. */
  uint64_t bytes;
  uint64_t activation_bytes; /* of bytes: rows, which stay in a CPU's caches where they fit */
  uint64_t operations; /* 2 N K a row of a product, 4 D a head, row and position of attention */
} psm_op_profile;

/* A table of functions: anything that turns a psm_batch into logits. The engine calls them from one
 * thread at a time (describe and open in psm_engine_create's, step, launch, collect and copy_blocks
 * in the engine's own or psm_engine_step's, adapters in psm_engine_load_adapter's, close in
 * psm_engine_destroy's), in the order describe, open, step..., close.
 * `self` is passed through. A step that fails fails every request in it with PSM_ERROR_EXECUTOR and
 * last_error's text; the engine goes on with the others. Logits must not hold NaN or +infinity: the
 * request whose row does fails. A step, in one call or two, may call psm_engine_submit, _cancel and
 * the statistics of its own engine, but nothing that waits for the step: psm_engine_shutdown and
 * psm_engine_step refuse it, psm_engine_destroy must not be called there. */
typedef struct psm_executor {
  size_t struct_size;
  void* self;
  /* Fill *info (its struct_size is set by the caller). May be called before open. */
  psm_status (*describe)(void* self, psm_model_info* info);
  /* Allocate pools of num_blocks KV blocks. Called once. */
  psm_status (*open)(void* self, int32_t num_blocks);
  /* Run one step; *logits points to [R, V] float32, row-major, owned by the executor until its next
   * call. May be NULL where launch and collect are there: the engine then calls those alone. */
  psm_status (*step)(void* self, const psm_batch* batch, const float** logits);
  /* Release everything, self included. Never fails. */
  void (*close)(void* self);
  /* Text of the last failure, or NULL when the executor has none. Optional (may be NULL). */
  const char* (*last_error)(void* self);

  /* The rest is optional: NULL = the executor cannot, and the engine does without.
   *
   * Copy blocks, one after another in order: each copy sees what those before it wrote. Called
   * between steps; when it fails, every running request fails and nothing cached is used again.
   * Without it a partly filled block is recomputed rather than shared. */
  psm_status (*copy_blocks)(void* self, const psm_block_copy* copies, size_t num_copies);
  /* Allocate num_blocks host blocks. Called once, after open, when host_cache_bytes is set. */
  psm_status (*open_host)(void* self, int32_t num_blocks);
  /* Take an adapter (copied) into a slot, 0 <= slot < max_adapters, that holds none; let one go. */
  psm_status (*load_adapter)(void* self, int32_t slot, const psm_lora_module* modules,
                             size_t num_modules);
  psm_status (*unload_adapter)(void* self, int32_t slot);
  /* The executor's own clock, ns, never going back: all the engine's times and deadlines are then
   * in it. Any thread. */
  int64_t (*now_ns)(void* self);

  /* ABI 1.2: a step in two halves, for executors whose device works by itself. Both or neither.
   *
   * launch hands the step to the device and returns without waiting for it. While the device works
   * the engine makes what does not depend on the result: how each row is to be drawn, and the
   * events of the step before. Then it calls collect, on the same thread, once for each launch that
   * returned PSM_OK and with no other call in between but last_error and now_ns. */
  psm_status (*launch)(void* self, const psm_batch* batch);
  /* Wait for the step that was launched; a failure here is the step's. With `sampling` (only where
   * psm_model_info.samples_rows is 1, and only when every row of the step can be drawn so) fill
   * samples [R]; `logits` is not looked at then. With sampling NULL (rows of beams, for a logits
   * processor, or whose logits were asked for; or no rows at all) *logits is as of step, and
   * samples is NULL. */
  psm_status (*collect)(void* self, const psm_step_sampling* sampling, psm_row_sample* samples,
                        const float** logits);

  /* ABI 1.3: as psm_engine_profile, which calls it from any thread, also during a step. */
  psm_status (*profile)(void* self, psm_op_profile* ops, size_t capacity, size_t* num_ops);
} psm_executor;

/* psm_cpu_options.weights: where the weights of a plan lie. */
enum {
  PSM_WEIGHTS_AUTO = 0,      /* mapped at once; then, while steps run, a thread moves what the file
                              * system has in small pages into huge ones of this process, where the
                              * system has them and the memory */
  PSM_WEIGHTS_MAPPED = 1,    /* mapped from the file, read ahead by a thread: processes share them;
                              * who cuts the file short meanwhile ends them all with SIGBUS */
  PSM_WEIGHTS_HUGE_PAGES = 2 /* read into memory of this process before it is open, in huge pages if
                              * it gets them: the first step is as fast as any */
};

/* Options of the built-in CPU executor. */
typedef struct psm_cpu_options {
  size_t struct_size;
  int32_t num_threads;  /* threads of the fixed pool, the calling thread included; 0 = one
                           a core that this process may use: affinity, quotas of its control group */
  int32_t pin_threads;  /* 1: pin thread i to the i-th core this process may use; default 0 */
  const char* isa;      /* NULL = the best this machine has; else "portable", "avx2", "avx512vnni",
                         * "avx512bf16" or "amx" (x86), "portable" or "neon" (aarch64, with dot
                         * products) */
  int32_t max_adapters; /* LoRA adapters it can hold at a time; default 8, 0 = none */
  int32_t max_adapter_rank; /* their largest rank; default 64 */

  /* ABI 1.3: set struct_size to PSM_CPU_OPTIONS_SIZE. */
  int32_t weights; /* PSM_WEIGHTS_...; default PSM_WEIGHTS_AUTO */
  int32_t profile; /* 1: note the time of each op for psm_engine_profile, which costs less than
                      1 % of a step; default 0 */
  int32_t max_num_tokens; /* most tokens of a step, logits rows among them, for which it takes
                             memory: the engine's; 0, or more than the plan's = the plan's */
  int32_t reserved;       /* 0 */
} psm_cpu_options;

/* Fill *options with the defaults, as far as the struct went in ABI 1.0 (see
 * psm_engine_options_init). NULL is ignored. Any thread. */
PSM_API void psm_cpu_options_init(psm_cpu_options* options);

/* Map a cpu plan file (targets/cpu/model.plan of an engine directory) and fill *out with an
 * executor over it: up to now_ns, what psm_executor was in ABI 1.1, or where options->struct_size
 * has the fields of ABI 1.3 all that it is in this version's. options may be NULL. Header, tables
 * and sizes are checked here; the caller checks hashes if it wants them. A plan that is found cut
 * short later, while a thread reads it, makes steps fail with ENGINE_FILE. The caller owns the
 * executor until it gives it to psm_engine_create (or calls out->close(out->self)). */
PSM_API psm_status psm_cpu_executor_create(const char* plan_path, const psm_cpu_options* options,
                                           psm_executor* out);

/* Options of the simulated executor: a model and a GPU as numbers. A step's time is that of its
 * bytes or of its arithmetic, whichever is longer, plus overhead_us; nothing is computed and nobody
 * waits: the time only advances the executor's own clock. Its tokens are a hash of the sequence's
 * history as read back through the blocks, so a wrong block, position or copy shows as other
 * tokens. */
typedef struct psm_simulated_options {
  size_t struct_size;
  psm_model_info info;          /* what it describes itself as; the limits it enforces */
  uint64_t weight_bytes;        /* read once a step */
  double flops_per_token;       /* of the matrix products, 2 per weight */
  double memory_bytes_per_s;    /* of the device; as reached, not as printed */
  double flops_per_s;           /* likewise */
  double host_copy_bytes_per_s; /* between device and host blocks */
  double overhead_us;           /* of a step: launches, synchronisation */
  uint64_t seed;                /* of its tokens: the model */
  /* For a draft: the share (0..1) of positions at which it agrees with the model of draft_of_seed.
   * 0 with draft_of_seed 0 = not a draft. A draft's time passes on its target's clock: create the
   * target first. */
  double draft_agreement;
  uint64_t draft_of_seed;
} psm_simulated_options;

PSM_API void psm_simulated_options_init(psm_simulated_options* options);

/* Fill *out with a simulated executor; ownership as of psm_cpu_executor_create. */
PSM_API psm_status psm_simulated_executor_create(const psm_simulated_options* options,
                                                 psm_executor* out);

/* ---------------------------------------------------------------- engine */

typedef struct psm_engine psm_engine;

/* scheduler_policy.
 * GUARANTEED_NO_EVICT: a request starts when the blocks of its full length (prompt + max_tokens)
 * can be reserved; they are taken one by one as positions fill. Never pauses.
 * MAX_UTILIZATION: a request starts when the blocks of its context are free. When a later step does
 * not fit, the last started of the lowest priority is paused: it gives up its blocks and later goes
 * on from what is still cached (on the device, or swapped to host blocks) and recomputes the rest
 * of prompt and output as context. No token is given twice, and none changes.
 * Under both, the first request in line that does not fit stops those behind it. */
enum { PSM_GUARANTEED_NO_EVICT = 0, PSM_MAX_UTILIZATION = 1 };

/* chunking_policy, when contexts do not all fit the token budget of a step: as much as possible to
 * the first, or a block to each in turn. */
enum { PSM_CHUNK_FIRST_COME_FIRST_SERVED = 0, PSM_CHUNK_EQUAL_PROGRESS = 1 };

/* queue_order: who starts next of those that wait with the same priority, when no tenant's share
 * decides. SHORTEST: who has the fewest tokens to compute of its prompt. It is overtaken only by
 * those that come before as many tokens as it has (at most 8192) have been computed, so nobody
 * waits for ever. The first tokens of a burst come sooner on average, the last one as late. Who has
 * started is never overtaken, and who was paused goes on before anybody starts. No token changes.
 */
enum { PSM_QUEUE_ARRIVAL = 0, PSM_QUEUE_SHORTEST = 1 };

/* pause_policy: what becomes of a paused request's blocks when others need them. AUTO: to the host
 * when copying there and back takes less time than computing the positions again, both as measured
 * so far. Swapping needs host_cache_bytes. */
enum { PSM_PAUSE_AUTO = 0, PSM_PAUSE_RECOMPUTE = 1, PSM_PAUSE_SWAP = 2 };

/* draft_mode: who proposes the tokens that a step of the target verifies. */
enum {
  PSM_DRAFT_OFF = 0,
  PSM_DRAFT_MODEL = 1, /* draft_executor, a smaller model with the same vocabulary */
  PSM_DRAFT_NGRAM = 2  /* what followed the same n tokens earlier in prompt and output */
};

/* Priority of a cached block: 0 goes first, 100 last. */
enum { PSM_MIN_RETENTION = 0, PSM_DEFAULT_RETENTION = 35, PSM_MAX_RETENTION = 100 };

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
  /* Requests that may wait to start; one more is PSM_ERROR_QUEUE_FULL. Each of
   * num_return_sequences counts, but they come in together. Default (and 0) 1024. */
  int32_t max_queue_size;
  /* Iteration records kept for psm_engine_iteration_stats; 0 = none. Default 1000. */
  int32_t iter_stats_max_iterations;
  /* Hard cap of the KV pools: they get kv_cache_bytes / kv_bytes_per_block blocks, rounded down.
   * 0 = enough for max_batch_size x max_seq_len, at most 1 GiB. */
  uint64_t kv_cache_bytes;
  /* 1: no thread; the caller runs psm_engine_step. Default 0. */
  int32_t manual_step;

  /* Prefix reuse. A block is shared as soon as it is filled, by requests whose tokens, salt and
   * adapter are the same up to its end; nobody else's tokens change by that. 0: blocks live as long
   * as their request (the sequences of one request still share). Default 1. */
  int32_t enable_block_reuse;
  /* 1: a block of which only the first tokens fit is copied and used up to there. Default 1. */
  int32_t enable_partial_reuse;
  /* Bytes of host blocks that take what the device evicts. Default 0. */
  uint64_t host_cache_bytes;
  /* Evicted blocks below this priority are dropped rather than kept on the host. Default 35. */
  int32_t host_offload_min_priority;
  /* KV events kept for psm_engine_kv_events; 0 = none are made. Default 0. */
  int32_t max_kv_events;

  int32_t chunking_policy; /* default PSM_CHUNK_FIRST_COME_FIRST_SERVED */
  int32_t pause_policy;    /* default PSM_PAUSE_AUTO */
  /* Share of max_batch_size up to which a tenant_id comes before those of the same priority that
   * hold theirs. When all who wait hold it, the one that holds the least is next: no place in a
   * batch stays empty. (0, 1]; 1 = by queue_order alone. Default 1. */
  float max_tenant_share;

  /* Speculation. Default PSM_DRAFT_OFF. */
  int32_t draft_mode;
  /* Most draft tokens of a sequence in a step; 0 = 8, or as many as a step has rows for. */
  int32_t max_draft_len;
  /* 1: each request's length follows its measured acceptance and the cost of a step, down to
   * none; 0: always max_draft_len. Default 1. */
  int32_t adaptive_draft_len;
  /* N-gram lookup: longest and shortest match, tokens. Defaults 4 and 2. */
  int32_t ngram_max;
  int32_t ngram_min;
  /* Of PSM_DRAFT_MODEL; same vocabulary and tokens_per_block, limits no smaller than the engine's.
   * Its KV pool has as many blocks as the target's and counts in kv_cache_bytes. The engine owns it
   * like its executor, when psm_engine_create succeeds. */
  const psm_executor* draft_executor;

  /* ABI 1.3: set struct_size to PSM_ENGINE_OPTIONS_SIZE. */
  int32_t queue_order; /* PSM_QUEUE_...; default PSM_QUEUE_ARRIVAL */
} psm_engine_options;

/* Fill *options with the defaults. Like every init function it sets the fields of ABI 1.0 and
 * struct_size to match: to use a field that was appended later, set it and struct_size (to the
 * _SIZE macro). NULL is ignored. Any thread. */
PSM_API void psm_engine_options_init(psm_engine_options* options);

/* Start an engine over an executor. On success the engine owns the executor and closes it; on
 * failure the caller still does. options may be NULL. Blocks while the executor opens. Fails with
 * INVALID_ARGUMENT (options, table), UNSUPPORTED (host_cache_bytes with an executor that has no
 * host blocks), EXECUTOR (its description or open), OUT_OF_MEMORY (kv_cache_bytes below one block,
 * no thread to be had, or what open says). An executor that has been opened is used up even so:
 * close it. */
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

enum { PSM_MAX_ERROR_TEXT = 240 };

/* Token sequences as the old word lists hold them: ids of all words one after another, and where
 * each ends. {5, 6, 7}, {2, 3} = the words [5, 6] and [7]. */
typedef struct psm_token_lists {
  const int32_t* ids;  /* [ends[num_lists - 1]] */
  const int32_t* ends; /* [num_lists] strictly increasing */
  int32_t num_lists;
} psm_token_lists;

/* How long what a part of the prompt left in the cache is worth keeping. */
typedef struct psm_retention_range {
  int32_t start;       /* first token */
  int32_t end;         /* behind the last; -1 = the prompt's end */
  int32_t priority;    /* PSM_MIN_RETENTION..PSM_MAX_RETENTION */
  int32_t duration_ms; /* then PSM_DEFAULT_RETENTION again; -1 = for ever */
} psm_retention_range;

/* What restricts a request's tokens to a language (a schema, a regular expression): a table of
 * functions over a state that stands behind the tokens accepted so far. The engine calls fill_mask
 * and accept on one thread of its own beside the model's step, one at a time. */
typedef struct psm_guide {
  size_t struct_size;
  void* self;
  /* Write the tokens that may follow the accepted ones and then ahead[0..num_ahead) (a draft; the
   * state does not move): bit id % 32 of mask[id / 32], (V + 31) / 32 words, all of them written.
   * A draft that leaves the language: write all zeros. */
  psm_status (*fill_mask)(void* self, const int32_t* ahead, int32_t num_ahead, uint32_t* mask);
  /* Move past tokens that were generated, all of them allowed. */
  psm_status (*accept)(void* self, const int32_t* tokens, int32_t num_tokens);
  /* A second state like this one at its beginning, for the further sequences of a request; called
   * inside psm_engine_submit, before any accept. May be NULL with num_return_sequences 1. */
  psm_status (*clone)(void* self, void** out);
  /* Release self (or a clone). Called once, when its sequence has ended and no other call is in
   * progress, on the thread that steps, shuts down, loads or unloads an adapter; of a clone whose
   * submission failed, on that of the submission. */
  void (*close)(void* self);
  /* Text of the last failure, or NULL. May be NULL. */
  const char* (*last_error)(void* self);
} psm_guide;

/* Called on the stepping thread with the logits [vocab_size] of the token that follows
 * token_ids[num_tokens] (prompt, output and, with speculation, drafts that may yet be refused), to
 * change them in place, before anything else does (with beams, as in transformers, they are
 * log-probabilities by then). Must depend on its arguments alone. A status
 * other than PSM_OK fails the request. */
typedef psm_status (*psm_logits_processor)(void* self, uint64_t client_id, int32_t sequence_idx,
                                           const int32_t* token_ids, int32_t num_tokens,
                                           float* logits, int32_t vocab_size);

/* early_stopping of beams: stop when no open beam looks better than the finished ones at its
 * present length (NO), when beam_width are finished (YES), or when none can become better at any
 * length (NEVER): transformers' False, True and "never". */
enum { PSM_EARLY_STOPPING_NO = 0, PSM_EARLY_STOPPING_YES = 1, PSM_EARLY_STOPPING_NEVER = 2 };

/* One request. Set it up with psm_request_init (the defaults stand beside the fields). The logits
 * of a token go through the logits processor, the guide, the penalties, logit_bias, bad_words,
 * no_repeat_ngram_size, min_tokens, temperature, top_k, top_p (over what top_k left) and min_p, in
 * this order, before the draw. */
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

  /* Independent outputs, 1..1024; sequence i draws with seed + i. Prompt blocks are computed once.
   * 1 */
  int32_t num_return_sequences;
  /* Beam search: greedy otherwise (temperature, top_k, top_p, min_p and seed are not used, nor may
   * they ask for sampling), not with num_return_sequences, guides, prompt log-probabilities or
   * logits outputs; never drafted for. Its beams come when it ends, best first, as sequences
   * 0..beam_width - 1, with the log-probabilities of their tokens alone. What ends before its first
   * token ends as sequence 0, without beams. 1 = off */
  int32_t beam_width;
  float length_penalty;   /* a beam's score = cum_logprob / (output tokens ^ length_penalty). 1.0 */
  int32_t early_stopping; /* PSM_EARLY_STOPPING_NO */
  float beam_search_diversity_rate; /* taken from a candidate's score for each better one of the
                                       same beam. 0 */

  uint64_t cache_salt;                         /* only requests of the same salt share blocks. 0 */
  uint64_t adapter_id;                         /* of psm_engine_load_adapter. 0 = none */
  uint64_t tenant_id;                          /* whose share of the slots it counts in. 0 */
  const psm_retention_range* retention_ranges; /* ascending, not overlapping. NULL */
  int32_t num_retention_ranges;
  int32_t decode_retention_priority;    /* of blocks with generated tokens. PSM_DEFAULT_RETENTION */
  int32_t decode_retention_duration_ms; /* -1 = for ever */

  /* Of the prompt's tokens, as num_logprobs of the output's: a CONTEXT event for each position, of
   * sequence 0 alone. -1 = none, 0 = the tokens' own. The prompt is then computed whole, reused
   * prefix or not. -1 */
  int32_t num_prompt_logprobs;
  int32_t return_context_logits;    /* 1: each CONTEXT event brings its row. 0 */
  int32_t return_generation_logits; /* 1: each TOKEN event brings the row it was drawn from. 0 */
  int32_t max_draft_len;            /* -1 = the engine's; less, or 0 = none for this request. -1 */
  psm_logits_processor logits_processor; /* NULL */
  void* logits_processor_self;           /* must live until the request's last event */
  const psm_guide* guide;                /* NULL. The engine owns it when the submission succeeds */

  /* ABI 1.1: set struct_size to PSM_REQUEST_SIZE and all of these; all zero = none of it.
   *
   * What the caller thinks the output begins with (the old draft_input_ids): drafts like those of
   * draft_mode, whatever that is, so they change the time and nothing else. As long as the output
   * is their beginning, the rest is verified: first in the step that ends the prompt, so n of them
   * that are right give n + 1 tokens there. Neither max_draft_len nor adaptive_draft_len bounds
   * them, the limits of a step do, and with a guide 64 a step. Those beyond max_tokens - 1 or an
   * end id are not used. Each of num_return_sequences uses them; not with beams. NULL */
  const int32_t* draft_ids;
  int32_t num_draft_ids;
  /* No token may complete an n-gram of this size that is in prompt and output already. 0 = off */
  int32_t no_repeat_ngram_size;
  /* After each token top_p becomes max(top_p * top_p_decay, top_p_min); after top_p_reset_id it is
   * top_p again. (0, 1], 0 = off; [0, 1]; -1 = none, not looked at when off */
  float top_p_decay;
  float top_p_min;
  int32_t top_p_reset_id;
} psm_request;

/* Fill *request with the defaults (see psm_engine_options_init). NULL is ignored. Any thread. */
PSM_API void psm_request_init(psm_request* request);

/* Queue a request; its events come out of psm_engine_poll. *request_id is never 0. Copies
 * everything. Does not block. Any thread. Fails with INVALID_ARGUMENT, SHAPE (too long), NOT_FOUND
 * (the adapter), QUEUE_FULL, SHUTDOWN, or OUT_OF_MEMORY when the request could not fit into the
 * whole KV cache even alone, or the host has no memory for it. */
PSM_API psm_status psm_engine_submit(psm_engine* engine, const psm_request* request,
                                     uint64_t* request_id);

/* Ask for a request's end; its FINISHED event follows with PSM_FINISH_CANCELLED, unless the step in
 * progress ends it otherwise. NOT_FOUND if it has already finished or never was. Again is fine.
 * Does not block. Any thread. */
PSM_API psm_status psm_engine_cancel(psm_engine* engine, uint64_t request_id);

/* Make a LoRA adapter known under an id (not 0). Copies everything. Waits for the step in progress;
 * not from inside one. Fails with INVALID_ARGUMENT (id taken or 0, a module the model has not),
 * SHAPE (features or rank that do not fit), OUT_OF_MEMORY (max_adapters are loaded), UNSUPPORTED
 * (the executor takes none). Any thread. */
PSM_API psm_status psm_engine_load_adapter(psm_engine* engine, uint64_t adapter_id,
                                           const psm_lora_module* modules, size_t num_modules);

/* Forget an adapter and what was cached with it. NOT_FOUND, or INVALID_ARGUMENT while requests use
 * it. Waits like psm_engine_load_adapter. Any thread. */
PSM_API psm_status psm_engine_unload_adapter(psm_engine* engine, uint64_t adapter_id);

/* ---------------------------------------------------------------- events */

/* psm_event.kind */
enum {
  PSM_EVENT_TOKEN = 1,    /* one generated token */
  PSM_EVENT_FINISHED = 2, /* no more events of this sequence; stats are filled */
  PSM_EVENT_FAILED = 3,   /* likewise; status and message tell why */
  PSM_EVENT_CONTEXT = 4   /* one position of the prompt, with num_prompt_logprobs or
                             return_context_logits; before the first TOKEN, in order */
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

/* Times are nanoseconds of the engine's clock; 0 = did not happen. */
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
  int32_t missed_blocks;    /* full context blocks that had to be computed */
  int32_t reused_tokens;    /* positions that were not computed, parts of blocks included */
  int32_t num_decode_iters; /* steps that gave it tokens */
  int32_t num_draft_tokens;
  int32_t num_accepted_draft_tokens;
} psm_request_stats;

typedef struct psm_event {
  uint64_t request_id;
  uint64_t client_id;
  int32_t kind;
  int32_t finish_reason; /* of FINISHED */
  int32_t token_id;      /* of TOKEN; of CONTEXT: the token that follows, -1 at the prompt's end */
  int32_t output_idx;    /* of TOKEN: 0 for the first generated token; of CONTEXT: the position */
  float logprob;     /* natural log of the model's own probability (before temperature, penalties,
                        bias), when num_logprobs > 0 */
  float cum_logprob; /* sum so far */
  int32_t num_top_logprobs;
  int32_t top_ids[PSM_MAX_TOP_LOGPROBS]; /* best first */
  float top_logprobs[PSM_MAX_TOP_LOGPROBS];
  psm_status status; /* of FAILED */
  char message[PSM_MAX_ERROR_TEXT];
  psm_request_stats stats; /* of FINISHED and FAILED */
  int32_t sequence_idx;    /* 0 .. num_return_sequences or beam_width - 1 */
  int32_t is_final;        /* of FINISHED and FAILED: 1 = the last event of the whole request */
  float* logits; /* [V] or NULL; yours: give it back with psm_logits_free. The model's own, before
                    anything changed them */
} psm_event;

/* Free event.logits. NULL is fine. Any thread. */
PSM_API void psm_logits_free(float* logits);

/* Take up to max_events events, in order per request. Waits up to timeout_ms (0 = not at all, -1 =
 * for ever) for the first. *num_events may be 0: on time-out and after psm_engine_wake. SHUTDOWN
 * once the engine is shut down and all events are taken. Any thread; several may poll, each event
 * goes to one of them. Events wait without limit: a client that does not poll stalls nobody, and
 * costs memory for what its requests produce: at most max_tokens + 1 events of sizeof(psm_event)
 * bytes for each sequence or beam, one for each position of a prompt whose CONTEXT events it wants,
 * and V floats for each that brings logits. */
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
  int32_t num_active_requests;     /* running or paused; here and below each sequence counts */
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
  uint64_t alloc_new_blocks;
  uint64_t reused_blocks;  /* cache hit rate = reused / (reused + missed) */
  uint64_t missed_blocks;  /* full context blocks that had to be computed */
  uint64_t kv_cache_bytes; /* bytes of the pools */
  /* Sums over steps, for the share of allocated positions that hold nothing: waste = 1 - used /
   * allocated. Allocated: blocks x tokens_per_block while the step runs; used: positions held at
   * its end. */
  uint64_t kv_allocated_token_steps;
  uint64_t kv_used_token_steps;
  uint64_t step_time_ns;     /* in the executor: step, or launch until collect has returned */
  uint64_t schedule_time_ns; /* outside it, drafts and copies, while there was work */
  uint64_t plan_time_ns;     /* the part of it that decides and packs: no sampling, no events */
  int32_t cached_num_blocks; /* of the free ones: hold what a later request may reuse */
  int32_t host_max_num_blocks;
  int32_t host_used_num_blocks;
  uint64_t reused_tokens;
  uint64_t offloaded_blocks; /* device to host */
  uint64_t onboarded_blocks; /* host to device */
  /* SpecDecodingStats. Acceptance length = 1 + accepted / requests with draft tokens. */
  uint64_t num_draft_tokens;
  uint64_t num_accepted_draft_tokens;
  uint64_t num_requests_with_draft_tokens; /* summed over steps */
  uint64_t num_failed_drafts;              /* draft steps that failed; the target went on alone */
  uint64_t draft_time_ns; /* proposing; draft overhead = draft_time / (draft_time + step_time) */
  uint64_t copy_time_ns;  /* copying blocks */
} psm_engine_stats;

/* The caller sets stats->struct_size. A finished request is counted before its last event can be
 * polled. Any thread. */
PSM_API psm_status psm_engine_get_stats(psm_engine* engine, psm_engine_stats* stats);

/* Write what each op of the engine's own executor took since its creation (a draft's are left out):
 * up to `capacity` records, those of one kind of step together, the whole step first. *num_ops =
 * how many there are; BUFFER_TOO_SMALL when that is more than `capacity` (ops may be NULL with
 * capacity 0), and nothing is written. They are 0 before the first step, and grow while it runs: a
 * record may miss a part of the step in progress. UNSUPPORTED when the executor keeps no profile
 * (the cpu one: psm_cpu_options.profile). Any thread. */
PSM_API psm_status psm_engine_profile(psm_engine* engine, psm_op_profile* ops, size_t capacity,
                                      size_t* num_ops);

/* What this machine's cores reach at most, together: what a profile is compared with. */
typedef struct psm_cpu_peaks {
  size_t struct_size;
  int32_t num_threads;     /* measured with */
  int32_t reserved;        /* 0 */
  double read_bytes_per_s; /* an array far larger than the caches, in order: the best short try */
  double read_sustained_bytes_per_s; /* the same over a quarter of a second */
  double f32_ops_per_s;  /* multiply-adds of float32, two operations each; 0 = not known here */
  double int8_ops_per_s; /* products of bytes and their sums, likewise */
  double bf16_ops_per_s; /* dot products of bf16, likewise; 0 where the cores have none */
} psm_cpu_peaks;

/* Measure them, with the instructions of an isa (as psm_cpu_options.isa; NULL = the best) on
 * num_threads threads (0 = one a core that may be used), each the best of many tries: about a
 * second. The caller sets peaks->struct_size. INVALID_ARGUMENT, UNSUPPORTED (the isa),
 * OUT_OF_MEMORY. Any thread; what else runs on the machine at the time takes its share. */
PSM_API psm_status psm_cpu_measure_peaks(int32_t num_threads, const char* isa,
                                         psm_cpu_peaks* peaks);

/* One step. */
typedef struct psm_iteration_stats {
  uint64_t iter;
  int64_t timestamp_ns; /* the engine's clock at its start */
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
  int32_t num_draft_tokens;
  int32_t num_accepted_draft_tokens;
  int32_t num_requests_with_draft_tokens;
  double draft_latency_ms;
} psm_iteration_stats;

/* Take up to max_records records, oldest first; each is given once; beyond
 * iter_stats_max_iterations the oldest are dropped. Any thread. */
PSM_API psm_status psm_engine_iteration_stats(psm_engine* engine, psm_iteration_stats* records,
                                              size_t max_records, size_t* num_records);

/* psm_kv_event.kind */
enum {
  PSM_KV_CREATED = 1, /* first of all: num_blocks of level */
  PSM_KV_STORED = 2,  /* a block can be reused */
  PSM_KV_REMOVED = 3, /* it no longer can */
  PSM_KV_UPDATED = 4  /* its level or priority changed */
};

/* What a router needs to know where a prefix is cached. */
typedef struct psm_kv_event {
  uint64_t event_id; /* 1, 2, ...; a gap = events were dropped, begin anew */
  int32_t kind;
  int32_t level;           /* 0 device, 1 host */
  uint64_t block_hash;     /* of the block's tokens and everything before them, salt and adapter */
  uint64_t parent_hash;    /* of STORED: the block before it; 0 = it is the first */
  uint64_t cache_salt;     /* of STORED */
  uint64_t adapter_id;     /* of STORED */
  int32_t priority;        /* of STORED and UPDATED */
  int32_t num_blocks;      /* of CREATED */
  int32_t num_tokens;      /* of STORED: tokens_per_block of them ... */
  int32_t first_token_idx; /* ... from here on in the caller's token_ids */
} psm_kv_event;

/* Take up to max_events events, oldest first, and the tokens of the stored blocks among them, as
 * far as token_ids has room (0 of an event's tokens or all). Each is given once; beyond
 * max_kv_events the oldest are dropped. *num_events may be 0. INVALID_ARGUMENT when max_token_ids
 * is below tokens_per_block. Any thread. */
PSM_API psm_status psm_engine_kv_events(psm_engine* engine, psm_kv_event* events, size_t max_events,
                                        int32_t* token_ids, size_t max_token_ids,
                                        size_t* num_events);

/* ---------------------------------------------------------------- struct sizes */

#define PSM_SIZE_UP_TO_(type, last) (offsetof(type, last) + sizeof(((type*)0)->last))
#define PSM_MODEL_INFO_SIZE PSM_SIZE_UP_TO_(psm_model_info, kv_bytes_per_block)
#define PSM_BATCH_SIZE PSM_SIZE_UP_TO_(psm_batch, candidates)
/* What it was before ABI 1.3; such a batch wants no candidates. */
#define PSM_BATCH_SIZE_1_2 PSM_SIZE_UP_TO_(psm_batch, adapter_slots)
#define PSM_STEP_SAMPLING_SIZE PSM_SIZE_UP_TO_(psm_step_sampling, masks)
#define PSM_EXECUTOR_SIZE PSM_SIZE_UP_TO_(psm_executor, profile)
#define PSM_CPU_OPTIONS_SIZE PSM_SIZE_UP_TO_(psm_cpu_options, reserved)
#define PSM_CPU_PEAKS_SIZE PSM_SIZE_UP_TO_(psm_cpu_peaks, bf16_ops_per_s)
#define PSM_SIMULATED_OPTIONS_SIZE PSM_SIZE_UP_TO_(psm_simulated_options, draft_of_seed)
#define PSM_GUIDE_SIZE PSM_SIZE_UP_TO_(psm_guide, last_error)
#define PSM_ENGINE_OPTIONS_SIZE PSM_SIZE_UP_TO_(psm_engine_options, queue_order)
#define PSM_REQUEST_SIZE PSM_SIZE_UP_TO_(psm_request, top_p_reset_id)
#define PSM_ENGINE_STATS_SIZE PSM_SIZE_UP_TO_(psm_engine_stats, copy_time_ns)

#if defined(__cplusplus) && !defined(PSM_CDEF)
}
#endif

#endif /* PLANSMITH_PLANSMITH_H_ */
