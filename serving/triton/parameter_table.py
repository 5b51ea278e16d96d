"""The `parameters{}` of the model `tensorrt_llm`: one table, by which the repository is written and the model reads.

The first group has the keys of TensorRT-LLM's repositories, so that these can be taken over; the second our own.
"""

from __future__ import annotations

import dataclasses

from .parameter_text import (
    INT64_MAX,
    Reader,
    choice,
    device_ids,
    flag,
    integer,
    integers,
    milliseconds_or_auto,
    number,
    plain,
)


@dataclasses.dataclass(frozen=True)
class Parameter:
    """One key.

    key, variable : its name, and the `${variable}` of the template that fills it
    default : the text that stands for an absent one in a new repository; "" = unset
    read : its text as a value
    becomes : "option NAME" of EngineOptions, "setting NAME" of Settings, "ignored" or "refused"
    meaning : one line for people; of what is ignored or refused, why, and what there is instead
    silent : values that ask for nothing, so that they are neither noted nor refused
    of_gpu : a target without a GPU does nothing with it, which is noted
    """

    key: str
    variable: str
    default: str
    read: Reader
    becomes: str
    meaning: str
    silent: tuple[str, ...] = ()
    of_gpu: bool = False


def _p(key: str, variable: str, default: str, read: Reader, becomes: str, meaning: str) -> Parameter:
    return Parameter(key, variable or key, default, read, becomes, meaning)


def _ignored(key: str, read: Reader, meaning: str, *silent: str, variable: str = "") -> Parameter:
    return Parameter(key, variable or key, "", read, "ignored", meaning, silent)


def _refused(key: str, read: Reader, meaning: str, *silent: str, variable: str = "") -> Parameter:
    return Parameter(key, variable or key, "", read, "refused", meaning, silent)


def _gpu(key: str, read: Reader, becomes: str, meaning: str, *silent: str) -> Parameter:
    return Parameter(key, key, "", read, becomes, meaning, silent, of_gpu=True)


ANY = "*"  # of silent: never noted
_SPECULATIONS = ("auto", "off", "ngram", "model")
_DECODING = ("auto", "top_k", "top_p", "top_k_top_p", "beam_search", "lookahead")
DRAFT_HEADS = ("medusa", "eagle", "redrafter", "explicit_draft_tokens")
_POLICY = choice(
    "guaranteed_no_evict",
    "max_utilization",
    aliases={"guaranteed_completion": "guaranteed_no_evict"},
)

PARAMETERS: tuple[Parameter, ...] = (
    _ignored(
        "gpt_model_type",
        choice("inflight_fused_batching", "inflight_batching", "v1"),
        "requests are always batched in flight",
        "inflight_fused_batching",
        "inflight_batching",
        variable="batching_strategy",
    ),
    _p("gpt_model_path", "engine_dir", "", plain, "setting engine_dir", "the engine directory"),
    _refused(
        "encoder_model_path",
        plain,
        "models with an encoder cannot be run; leave it empty",
        variable="encoder_engine_dir",
    ),
    _ignored("executor_worker_path", plain, "the engine runs in the model's own process", ANY),
    _ignored("worker_path", plain, "the engine runs in the model's own process", ANY),
    _p("max_beam_width", "", "1", integer(1, 1024), "setting max_beam_width", "a wider beam is refused"),
    Parameter(
        "FORCE_CPU_ONLY_INPUT_TENSORS",
        "FORCE_CPU_ONLY_INPUT_TENSORS",
        "no",  # Triton refuses an empty one
        choice("no", "yes"),
        "ignored",
        "Triton's own",
        (ANY,),
    ),
    _ignored("EXECUTION_ENV_PATH", plain, "Triton's own", ANY),
    _p(
        "max_tokens_in_paged_kv_cache",
        "",
        "",
        integer(1),
        "setting max_kv_tokens",
        "tokens that the KV cache holds; with kv_cache_bytes the smaller counts",
    ),
    _p(
        "kv_cache_free_gpu_mem_fraction",
        "",
        "",
        number(0, 1, above=True),
        "option kv_cache_free_gpu_mem_fraction",
        "share of a GPU's free memory for the KV pools where kv_cache_bytes is 0 (0.9); on cpu without effect",
    ),
    _ignored("cross_kv_cache_fraction", number(0, 1), "of models with an encoder", ANY),
    _p(
        "kv_cache_host_memory_bytes",
        "",
        "0",
        integer(0, INT64_MAX),
        "option host_cache_bytes",
        "host memory for blocks of the KV cache that are evicted",
    ),
    _ignored(
        "kv_cache_onboard_blocks", flag, "blocks in host memory are always copied back before use", "true"
    ),
    _p(
        "enable_kv_cache_reuse",
        "",
        "true",
        flag,
        "option enable_block_reuse",
        "requests share the blocks of equal prefixes",
    ),
    _p(
        "max_attention_window_size",
        "",
        "",
        integers(1),
        "setting attention_windows",
        "by layer; the model's own windows always hold, narrower ones are refused",
    ),
    _refused("sink_token_length", integer(0), "attention sinks do not exist here; leave it empty", "0"),
    _p(
        "batch_scheduler_policy",
        "",
        "guaranteed_no_evict",
        _POLICY,
        "option scheduler_policy",
        "guaranteed_no_evict never pauses a request, max_utilization starts more at once",
    ),
    _p(
        "enable_chunked_context",
        "",
        "true",
        flag,
        "option enable_chunked_context",
        "long prompts are computed in pieces between other requests' tokens",
    ),
    _ignored("enable_trt_overlap", flag, "nothing is left to switch: it was of an older batcher", "false"),
    _p(
        "exclude_input_in_output",
        "",
        "false",
        flag,
        "setting exclude_input",
        "leave the prompt out of output_ids where a request does not say",
    ),
    _ignored("normalize_log_probs", flag, "requests say it: beams are ranked by len_penalty", "true"),
    _p(
        "cancellation_check_period_ms",
        "",
        "100",
        integer(1),
        "setting cancellation_check_period_ms",
        "between two looks for clients that went away",
    ),
    _p(
        "stats_check_period_ms",
        "",
        "100",
        integer(1),
        "setting stats_check_period_ms",
        "between two updates of the metrics",
    ),
    _p(
        "iter_stats_max_iterations",
        "",
        "1000",
        integer(0),
        "option iter_stats_max_iterations",
        "records of steps that are kept",
    ),
    _ignored(
        "request_stats_max_iterations",
        integer(0),
        "a request's statistics come with its answer: return_perf_metrics",
        "0",
    ),
    _ignored("recv_poll_period_ms", integer(0), "the engine waits for requests without polling", ANY),
    _gpu(
        "gpu_device_ids",
        device_ids,
        "setting gpu_device_ids",
        "one id: the GPU of a GPU target, as device says it; several are refused",
    ),
    _ignored("participant_ids", plain, "there is one process an engine, without MPI"),
    _refused("num_nodes", integer(1), "an engine runs on one machine; start a server on each of them", "1"),
    _ignored("lora_cache_optimal_adapter_size", integer(1), "adapters need no pages of one size", ANY),
    _p(
        "lora_cache_max_adapter_size",
        "",
        "64",
        integer(1, 1024),
        "setting max_adapter_rank",
        "the largest rank of a LoRA adapter",
    ),
    _ignored("lora_cache_gpu_memory_fraction", number(0, 1), "max_adapters bounds it", "0.05"),
    _p(
        "lora_cache_host_memory_bytes",
        "",
        str(1 << 30),
        integer(0, INT64_MAX),
        "setting lora_host_memory_bytes",
        "of adapters that requests brought",
    ),
    _p(
        "lora_prefetch_dir",
        "",
        "",
        plain,
        "setting lora_prefetch_dir",
        "adapters loaded at the start, in directories named by their task id",
    ),
    _p(
        "decoding_mode",
        "",
        "auto",
        choice(*_DECODING, *DRAFT_HEADS),
        "setting decoding_mode",
        "lookahead is speculation ngram; the others but auto are up to each request",
    ),
    _ignored("lookahead_window_size", integer(1), "speculation ngram needs no window; see max_draft_len"),
    _ignored("lookahead_ngram_size", integer(1), "speculation ngram finds the length itself"),
    _ignored("lookahead_verification_set_size", integer(1), "speculation ngram checks one continuation"),
    _ignored("medusa_choices", plain, "Medusa heads do not exist here", ANY),
    _ignored("eagle_choices", plain, "EAGLE heads do not exist here", ANY),
    _ignored(
        "speculative_decoding_fast_logits",
        flag,
        "a draft model runs beside its target (draft_engine_dir), no logits are sent",
        "false",
    ),
    _gpu(
        "gpu_weights_percent",
        number(0, 1),
        "setting gpu_weights_percent",
        "share of the weights that stay on the GPU, of an engine built with --weight-streaming; empty = what fits",
        "1.0",
        "1",
    ),
    _ignored(
        "enable_context_fmha_fp32_acc",
        flag,
        "our attention kernels always accumulate in float32; in TensorRT-RTX plans the compiler's own do it",
        "false",
        "true",
    ),
    _ignored(
        "multi_block_mode",
        flag,
        "our attention kernels always split long contexts; in TensorRT-RTX plans the compiler decides",
        "true",
    ),
    _gpu(
        "cuda_graph_mode",
        flag,
        "setting cuda_graph_mode",
        "true is cuda_graphs auto, false is off; empty = as cuda_graphs says",
        "false",
    ),
    _gpu(
        "cuda_graph_cache_size",
        integer(0),
        "setting cuda_graph_cache_size",
        "graphs kept at a time where this program captures them (see cuda_graphs); 0 = 64",
        "0",
    ),
    _p(
        "guided_decoding_backend",
        "",
        "",
        choice("llguidance", "off", aliases={"xgrammar": "llguidance"}),
        "setting guided_backend",
        "structured output is llguidance's, also where xgrammar is asked for; off refuses it",
    ),
    _ignored("tokenizer_dir", plain, "the engine has its own tokenizer", ANY),
    _ignored("xgrammar_tokenizer_info_path", plain, "the engine has its own tokenizer"),
    _p(
        "max_num_sequences",
        "",
        "",
        integer(1),
        "option max_batch_size",
        "an older name of what is max_num_seqs here",
    ),
    # Our own.
    _p(
        "target",
        "",
        "cpu",
        plain,
        "setting target",
        "of the engine directory; auto = the first that a GPU here runs",
    ),
    _p(
        "device",
        "",
        "",
        plain,
        "setting device",
        "of a GPU target: index or UUID; empty = the first that runs it",
    ),
    _p(
        "cuda_graphs",
        "",
        "auto",
        choice("auto", "own", "off"),
        "setting cuda_graphs",
        "who captures a GPU target's decode steps; own = always this program",
    ),
    _p(
        "num_threads",
        "",
        "0",
        integer(0, 1024),
        "setting num_threads",
        "of the cpu target; 0 = one a core that may be used",
    ),
    _p("pin_threads", "", "false", flag, "setting pin_threads", "bind threads to cores"),
    _p("isa", "", "", plain, "setting isa", "kernels of the cpu target; empty = the best of this machine"),
    _p(
        "weights",
        "",
        "auto",
        choice("auto", "mapped", "huge_pages"),
        "setting weights",
        "where the cpu target's lie: mapped from the file, in huge_pages of the process, or auto",
    ),
    _p(
        "kv_cache_bytes",
        "",
        "0",
        integer(0, INT64_MAX),
        "option kv_cache_bytes",
        "hard cap of the KV pools; 0 = a full batch, at most 1 GiB, on a GPU target a share of its free memory",
    ),
    _p(
        "enable_block_reuse",
        "",
        "",
        flag,
        "option enable_block_reuse",
        "another name of enable_kv_cache_reuse",
    ),
    _p("enable_partial_reuse", "", "true", flag, "option enable_partial_reuse", "share parts of blocks too"),
    _p(
        "host_offload_min_priority",
        "",
        "35",
        integer(0, 100),
        "option host_offload_min_priority",
        "blocks below it are dropped instead of copied to host memory",
    ),
    _p("max_kv_events", "", "0", integer(0), "option max_kv_events", "events of the prefix cache kept"),
    _p("draft_engine_dir", "", "", plain, "setting draft", "an engine of a smaller model that drafts"),
    _p(
        "speculation",
        "",
        "auto",
        choice(*_SPECULATIONS),
        "setting speculation",
        "auto (draft_engine_dir, or the engine's own draft), model, ngram or off",
    ),
    _p("max_draft_len", "", "0", integer(0), "option max_draft_len", "most draft tokens in a step; 0 = 8"),
    _p("ngram_max", "", "4", integer(1), "option ngram_max", "longest match of speculation ngram"),
    _p("ngram_min", "", "2", integer(1), "option ngram_min", "shortest match of speculation ngram"),
    _p(
        "max_num_seqs",
        "",
        "0",
        integer(0),
        "option max_batch_size",
        "most sequences in a step; 0 = the engine's limit. The max_batch_size of config.pbtxt is a request's rows",
    ),
    _p(
        "max_num_tokens",
        "",
        "0",
        integer(0),
        "option max_num_tokens",
        "most tokens in a step; 0 = the engine's limit, on the cpu target at most 512",
    ),
    _p(
        "max_queue_size",
        "",
        "0",
        integer(0),
        "option max_queue_size",
        "requests waiting in the engine; 0 = that of the queue policy, or 1024",
    ),
    _p(
        "chunking_policy",
        "",
        "first_come_first_served",
        choice("first_come_first_served", "equal_progress"),
        "option chunking_policy",
        "who gets the tokens of a step when prompts do not all fit",
    ),
    _p(
        "queue_order",
        "",
        "arrival",
        choice("arrival", "shortest"),
        "option queue_order",
        "who starts next of one priority: by arrival, or the prompt with the fewest tokens to compute",
    ),
    _p(
        "pause_policy",
        "",
        "auto",
        choice("auto", "recompute", "swap"),
        "option pause_policy",
        "what happens to the blocks of a paused request; swap needs kv_cache_host_memory_bytes",
    ),
    _p(
        "max_tenant_share",
        "",
        "1",
        number(0, 1, above=True),
        "option max_tenant_share",
        "share of the sequences up to which a tenant comes first",
    ),
    _p(
        "max_adapters",
        "",
        "8",
        integer(1, 4096),
        "setting max_adapters",
        "LoRA adapters held at a time; GPU targets take none",
    ),
    _p(
        "stream_interval_ms",
        "",
        "auto",
        milliseconds_or_auto,
        "setting stream_interval_ms",
        "least time between two answers of a stream; auto = by what they cost",
    ),
    _p("verify_hashes", "", "false", flag, "setting verify_hashes", "read every file before it is opened"),
)
