"""What is measured: names, kinds, labels and meanings, the same on Triton's port and on our own server's.

The first nine families have the names, labels and values that dashboards of TensorRT-LLM's Triton backend read; those
that mean nothing to this engine are there, at 0. The others are plansmith's own. Every series has the labels
`model` and `version`.
"""

from __future__ import annotations

import dataclasses

GAUGE, COUNTER, HISTOGRAM = "gauge", "counter", "histogram"

REASONS = ("stop", "length", "timeout", "cancelled")
FAILURES = ("invalid", "queue_full", "out_of_memory", "shutdown", "internal")
STATUSES = ("2xx", "3xx", "4xx", "5xx")

_TOKEN_BOUNDS = (10.0, 50.0, 100.0, 500.0, 1000.0)
# A CPU's small model answers in milliseconds, a queue of long prompts in minutes.
_FIRST_TOKEN_BOUNDS = (
    0.005,
    0.01,
    0.025,
    0.05,
    0.1,
    0.2,
    0.3,
    0.5,
    0.75,
    1.0,
    2.0,
    3.0,
    5.0,
    10.0,
    30.0,
    60.0,
)
_TOKEN_TIME_BOUNDS = (0.001, 0.0025, 0.005, 0.0075, 0.01, 0.015, 0.02, 0.03, 0.05, 0.075, 0.1, 0.2, 0.5, 1.0)
_REQUEST_BOUNDS = (0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 20.0, 30.0, 60.0, 120.0, 300.0, 600.0)
_QUEUE_BOUNDS = (0.001, 0.005, 0.01, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0)


@dataclasses.dataclass(frozen=True)
class Family:
    """One family of series.

    name : as it is exposed, letter by letter
    kind : "gauge", "counter" or "histogram"
    help : one line
    label : the name of the label besides model and version; None = there is none
    values : every value of that label, all of which are always exposed
    bounds : of a histogram's buckets, ascending; the one without a bound is added
    """

    name: str
    kind: str
    help: str
    label: str | None = None
    values: tuple[str, ...] = ()
    bounds: tuple[float, ...] = ()

    @property
    def keys(self) -> tuple[str | None, ...]:
        """The values of `label`, or (None,) for a family of one series."""
        return self.values if self.label is not None else (None,)

    def labels(self, model: str, version: str, value: str | None) -> dict[str, str]:
        """Return the labels of one series, in the order they are written."""
        own = {} if self.label is None or value is None else {self.label: value}
        return {"model": model, "version": version, **own}


def bound_text(bound: float) -> str:
    """Return a bound as Triton writes it into the label `le`: 10, 0.005."""
    return f"{bound:g}"


_OLD = (
    Family(
        "nv_trt_llm_request_metrics",
        GAUGE,
        "Requests: active (scheduled or next in line), max, scheduled in the last step, of these in their prompt "
        "(context), and waiting = active - scheduled",
        "request_type",
        ("active", "max", "scheduled", "context", "waiting"),
    ),
    Family(
        "nv_trt_llm_runtime_memory_metrics",
        GAUGE,
        "Bytes of memory: resident memory of the engine's process, of the GPU, pinned",
        "memory_type",
        ("cpu", "gpu", "pinned"),
    ),
    Family(
        "nv_trt_llm_kv_cache_block_metrics",
        GAUGE,
        "KV cache blocks: max, free (cached ones included), used, tokens_per block, reused since the start, and "
        "fraction = used / max",
        "kv_cache_block_type",
        ("max", "free", "used", "tokens_per", "reused", "fraction"),
    ),
    Family(
        "nv_trt_llm_inflight_batcher_metrics",
        GAUGE,
        "The last step: prompt tokens, requests that generated, the micro batch (always 0), paused requests",
        "inflight_batcher_specific_metric",
        ("total_context_tokens", "generation_requests", "micro_batch_id", "paused_requests"),
    ),
    Family(
        "nv_trt_llm_v1_metrics",
        GAUGE,
        "Of static batching, which this engine does not have: always 0",
        "v1_specific_metric",
        ("total_context_tokens", "total_generation_tokens", "empty_generation_slots"),
    ),
    Family(
        "nv_trt_llm_general_metrics",
        GAUGE,
        "When the last step began, in microseconds since 1970 (0 before the first), and the steps run",
        "general_type",
        ("timestamp", "iteration_counter"),
    ),
    Family(
        "nv_trt_llm_disaggregated_serving_metrics",
        COUNTER,
        "Of prompts computed on other engines, which this engine does not do: always 0",
        "disaggregated_serving_type",
        ("kv_cache_transfer_ms", "request_count"),
    ),
    Family(
        "nv_llm_input_token_len",
        HISTOGRAM,
        "Prompt tokens of a finished request",
        "response_metric_type",
        ("total_input_tokens",),
        _TOKEN_BOUNDS,
    ),
    Family(
        "nv_llm_output_token_len",
        HISTOGRAM,
        "Generated tokens of a finished request, all its outputs together",
        "response_metric_type",
        ("total_output_tokens",),
        _TOKEN_BOUNDS,
    ),
)

_OWN_STATE = (
    Family(
        "plansmith_requests",
        GAUGE,
        "Sequences after the last step: running, paused for lack of KV blocks, queued; each output of a request counts",
        "state",
        ("running", "paused", "queued"),
    ),
    Family(
        "plansmith_requests_unfinished",
        GAUGE,
        "Requests that the engine has taken and not ended, those in their first step included",
    ),
    Family(
        "plansmith_kv_cache_blocks",
        GAUGE,
        "KV cache blocks now: max, used, cached (free, and hold a prefix), of the host's memory max and used",
        "state",
        ("max", "used", "cached", "host_max", "host_used"),
    ),
    Family("plansmith_kv_cache_bytes", GAUGE, "Bytes of the KV cache's pools"),
    Family(
        "plansmith_prefix_cache_hit_ratio",
        GAUGE,
        "Share of the full blocks of all prompts since the start that were cached already, 0 to 1",
    ),
    Family(
        "plansmith_draft_acceptance_ratio",
        GAUGE,
        "Share of the draft tokens since the start that were accepted, 0 to 1; 0 without speculation",
    ),
    Family(
        "plansmith_last_update_timestamp_seconds",
        GAUGE,
        "When these metrics were last brought up to date, in seconds since 1970; old where the engine's process died",
    ),
    Family(
        "plansmith_http_requests_in_flight", GAUGE, "HTTP requests now being answered; 0 on Triton's port"
    ),
)

_OWN_TOTALS = (
    Family("plansmith_requests_submitted_total", COUNTER, "Requests that the engine took"),
    Family(
        "plansmith_requests_finished_total",
        COUNTER,
        "Requests that ended with an answer, by what ended the first output",
        "reason",
        REASONS,
    ),
    Family(
        "plansmith_requests_failed_total",
        COUNTER,
        "Requests that were refused or ended with an error, by its kind",
        "kind",
        FAILURES,
    ),
    Family(
        "plansmith_http_responses_total",
        COUNTER,
        "HTTP answers by class of status; 0 on Triton's port",
        "status",
        STATUSES,
    ),
    Family("plansmith_prompt_tokens_total", COUNTER, "Prompt tokens computed, cached ones not"),
    Family("plansmith_generation_tokens_total", COUNTER, "Tokens generated"),
    Family(
        "plansmith_prefix_cache_blocks_total",
        COUNTER,
        "Full blocks of prompts that were found in the cache (hit) or had to be computed (miss)",
        "result",
        ("hit", "miss"),
    ),
    Family("plansmith_prefix_cache_tokens_total", COUNTER, "Prompt tokens that were taken from the cache"),
    Family(
        "plansmith_kv_cache_copied_blocks_total",
        COUNTER,
        "Blocks copied to the host's memory (offloaded) and back (onboarded)",
        "direction",
        ("offloaded", "onboarded"),
    ),
    Family(
        "plansmith_draft_tokens_total",
        COUNTER,
        "Draft tokens that were proposed, and that were accepted",
        "result",
        ("proposed", "accepted"),
    ),
    Family(
        "plansmith_draft_failures_total",
        COUNTER,
        "Steps of the draft model that failed; the model went on alone",
    ),
    Family(
        "plansmith_pauses_total", COUNTER, "Times that a running request was paused for lack of KV blocks"
    ),
    Family("plansmith_steps_total", COUNTER, "Steps of the engine"),
    Family(
        "plansmith_step_seconds_total",
        COUNTER,
        "Seconds of steps by what they went into: the model, drafting, copying blocks, all else (scheduling, sampling)",
        "part",
        ("model", "draft", "copy", "other"),
    ),
)

_OWN_TIMES = (
    Family(
        "plansmith_time_to_first_token_seconds",
        HISTOGRAM,
        "From a request's arrival to its first token",
        bounds=_FIRST_TOKEN_BOUNDS,
    ),
    Family(
        "plansmith_inter_token_latency_seconds",
        HISTOGRAM,
        "Mean time between a request's tokens behind the first; one observation a request",
        bounds=_TOKEN_TIME_BOUNDS,
    ),
    Family(
        "plansmith_request_latency_seconds",
        HISTOGRAM,
        "From a request's arrival to its last token",
        bounds=_REQUEST_BOUNDS,
    ),
    Family(
        "plansmith_queue_time_seconds",
        HISTOGRAM,
        "From a request's arrival to the first step that it was part of",
        bounds=_QUEUE_BOUNDS,
    ),
)

OLD_FAMILIES = _OLD
FAMILIES = _OLD + _OWN_STATE + _OWN_TOTALS + _OWN_TIMES
BY_NAME = {family.name: family for family in FAMILIES}
