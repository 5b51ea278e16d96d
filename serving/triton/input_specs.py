"""The inputs of tensorrt_llm, as triton_repo/tensorrt_llm/config.pbtxt declares them; a test compares the two."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

from ...runtime.sampling import MAX_SEQUENCES

_FLOATS = ("FP32", "FP16")


@dataclasses.dataclass(frozen=True)
class TensorSpec:
    """One input.

    types : Triton's names of the types that are read, the declared one first
    dims : without the batch dimension; -1 = any
    is_scalar : the configuration reshapes [1] to []
    is_ragged : allow_ragged_batch
    is_required : not optional
    low, high : of a value, both inclusive; None = no limit. A float is finite besides
    """

    name: str
    types: tuple[str, ...]
    dims: tuple[int, ...] = (1,)
    is_scalar: bool = False
    is_ragged: bool = False
    is_required: bool = False
    low: float | None = None
    high: float | None = None

    @property
    def is_single(self) -> bool:
        """Whether a row has one value."""
        return self.dims == (1,)


def _scalar(name: str, *types: str, low: float | None = None, high: float | None = None) -> TensorSpec:
    return TensorSpec(name, types, is_scalar=True, low=low, high=high)


def _required(name: str, kind: str, low: float) -> TensorSpec:
    return TensorSpec(name, (kind,), is_scalar=True, is_required=True, low=low)


def _one(name: str, kind: str, low: float | None = None, high: float | None = None) -> TensorSpec:
    return TensorSpec(name, (kind,), is_ragged=True, low=low, high=high)


def _ragged(name: str, *types: str, dims: tuple[int, ...] = (-1,)) -> TensorSpec:
    return TensorSpec(name, types, dims, is_ragged=True)


_SPECS = (
    # The prompt and its end.
    _ragged("input_ids", "INT32"),
    _required("input_lengths", "INT32", low=1),
    _required("request_output_len", "INT32", low=1),
    _scalar("end_id", "INT32", low=-1),
    _scalar("pad_id", "INT32"),
    _ragged("stop_words_list", "INT32", dims=(2, -1)),
    _ragged("bad_words_list", "INT32", dims=(2, -1)),
    _scalar("min_tokens", "INT32", low=0),
    # Sampling. runtime_top_k_min is the name under which the older backend looked for runtime_top_p_min.
    _scalar("temperature", "FP32", low=0),
    _scalar("runtime_top_k", "INT32", low=0),
    _scalar("runtime_top_p", "FP32", high=1),
    _scalar("runtime_top_p_min", "FP32", low=0, high=1),
    _scalar("runtime_top_k_min", "FP32", low=0, high=1),
    _scalar("runtime_top_p_decay", "FP32", low=0, high=1),
    _scalar("runtime_top_p_reset_ids", "INT32", low=-1),
    _scalar("min_p", "FP32", low=0, high=1),
    _scalar("repetition_penalty", "FP32", low=0),
    _scalar("presence_penalty", "FP32"),
    _scalar("frequency_penalty", "FP32"),
    _scalar("no_repeat_ngram_size", "INT32", low=0),
    _scalar("seed", "UINT64"),
    _ragged("embedding_bias", *_FLOATS),
    # Limited here: a request has room made for each of its sequences before the engine sees it.
    _scalar("num_return_sequences", "INT32", low=1, high=MAX_SEQUENCES),
    # Beams. early_stopping was declared BOOL and read as INT32.
    _scalar("beam_width", "INT32", low=1),
    _scalar("len_penalty", "FP32"),
    _scalar("early_stopping", "BOOL", "INT32", low=0),
    _scalar("beam_search_diversity_rate", "FP32", low=0),
    # What the answers have.
    _scalar("streaming", "BOOL"),
    _scalar("stop", "BOOL"),
    _scalar("exclude_input_in_output", "BOOL"),
    _scalar("return_log_probs", "BOOL"),
    _scalar("return_context_logits", "BOOL"),
    _scalar("return_generation_logits", "BOOL"),
    _scalar("return_perf_metrics", "BOOL"),
    _scalar("return_kv_cache_reuse_stats", "BOOL"),
    _scalar("return_num_input_tokens", "BOOL"),
    _scalar("return_num_output_tokens", "BOOL"),
    # Drafts.
    _ragged("draft_input_ids", "INT32"),
    _ragged("draft_logits", *_FLOATS, dims=(-1, -1)),
    _scalar("draft_acceptance_threshold", "FP32", low=0, high=1),
    _one("lookahead_window_size", "INT32", low=1),
    _one("lookahead_ngram_size", "INT32", low=1),
    _one("lookahead_verification_set_size", "INT32", low=0),
    _scalar("max_draft_len", "INT32", low=0),
    # Structured output, adapters, the cache, the queue.
    _one("guided_decoding_guide_type", "STRING"),
    _one("guided_decoding_guide", "STRING"),
    _scalar("lora_task_id", "UINT64"),
    _ragged("lora_weights", "FP16", "FP32", dims=(-1, -1)),
    _ragged("lora_config", "INT32", dims=(-1, 3)),
    _ragged("retention_token_range_starts", "INT32"),
    _ragged("retention_token_range_ends", "INT32"),
    _ragged("retention_token_range_priorities", "INT32"),
    _ragged("retention_token_range_durations_ms", "INT32"),
    _one("retention_decode_priority", "INT32", low=0, high=100),
    _one("retention_decode_duration_ms", "INT32", low=-1),
    _scalar("cache_salt", "STRING"),
    _scalar("priority", "FP32", low=0, high=1),
    _scalar("timeout_ms", "INT32", low=0),
    # Of models that this engine does not run: unsupported.py.
    _ragged("encoder_input_features", *_FLOATS, dims=(-1, -1)),
    _scalar("encoder_output_lengths", "INT32"),
    _ragged("decoder_input_ids", "INT32"),
    _scalar("decoder_input_lengths", "INT32"),
    _ragged("prompt_embedding_table", "FP16", "FP32", dims=(-1, -1)),
    _ragged("prompt_table_extra_ids", "UINT64"),
    _scalar("prompt_vocab_size", "INT32"),
    _ragged("multimodal_embedding", *_FLOATS, dims=(-1, -1)),
    _ragged("cross_attention_mask", "BOOL", dims=(-1, -1)),
    TensorSpec("skip_cross_attn_blocks", ("BOOL",), is_ragged=True),
    TensorSpec("mrope_rotary_cos_sin", ("FP32",), (-1,)),
    TensorSpec("mrope_position_deltas", ("INT64",)),
    _ragged("context_phase_params", "UINT8"),
)

INPUTS: Mapping[str, TensorSpec] = {spec.name: spec for spec in _SPECS}

OLDER_NAMES: Mapping[str, str] = {"min_length": "min_tokens", "random_seed": "seed"}
"""What inputs were called before the spring of 2025, and are called now; the models take both."""
