"""A request as the psm_request that the core takes, and what it has to hold on to until the request's last event."""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Sequence
from typing import Any

import numpy as np

from ._native import native
from .batch import Int32Array
from .checks import key64
from .sampling import LogitsProcessor, SamplingParams

_OK, _ERROR_INVALID_ARGUMENT = 0, 1
_EARLY_STOPPING = {False: 0, True: 1, "never": 2}
_SAME_NAMES = (
    "min_tokens",
    "temperature",
    "top_k",
    "top_p",
    "top_p_decay",
    "top_p_min",
    "no_repeat_ngram_size",
    "min_p",
    "repetition_penalty",
    "presence_penalty",
    "frequency_penalty",
    "priority",
    "beam_width",
    "length_penalty",
    "beam_search_diversity_rate",
    "decode_retention_priority",
)


@dataclasses.dataclass(frozen=True)
class Submission:
    """What an engine needs beside the parameters: all that depends on the model.

    adapter_id : of load_adapter, 0 = none
    guide : a psm_guide*, which the core owns once it has taken the request; None = free text
    """

    prompt_ids: Int32Array
    params: SamplingParams
    max_tokens: int
    end_ids: Sequence[int] = ()
    bad_words: Sequence[Sequence[int]] = ()
    client_id: int = 0
    adapter_id: int = 0
    guide: Any = None


class ProcessorCall:
    """A user's logits processor as a function of the C API. `error_texts` has its exceptions, by sequence."""

    def __init__(self, processor: LogitsProcessor) -> None:
        ffi = native().ffi
        self._processor = processor
        self.error_texts: dict[int, str] = {}
        self.callback_thread: int | None = None  # the thread that is inside the processor
        self.callback = ffi.callback("psm_logits_processor", self._call, error=_ERROR_INVALID_ARGUMENT)

    def _call(
        self,
        _self: Any,
        _client: int,
        sequence_idx: int,
        tokens: Any,
        count: int,
        logits: Any,
        vocab_size: int,
    ) -> int:
        ffi = native().ffi
        self.callback_thread = threading.get_ident()
        try:
            token_ids = np.frombuffer(ffi.buffer(tokens, count * 4), np.int32)
            token_ids.flags.writeable = False
            self._processor(token_ids, np.frombuffer(ffi.buffer(logits, vocab_size * 4), np.float32))
        except BaseException as error:  # the core must get a status whatever happens
            text = f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
            self.error_texts[sequence_idx] = f"the logits processor raised {text}"
            return _ERROR_INVALID_ARGUMENT
        finally:
            self.callback_thread = None
        return _OK


def request_struct(submission: Submission, processor: ProcessorCall | None) -> tuple[Any, list[Any]]:
    """Return a psm_request and the arrays it points to, which the caller keeps until it is submitted."""
    core = native()
    params = submission.params
    request = core.ffi.new("psm_request*")
    core.lib.psm_request_init(request)
    request.struct_size = core.struct_size(
        "psm_request"
    )  # init knows the fields of ABI 1.0; the others follow
    keep_alive: list[Any] = [submission.prompt_ids]
    request.prompt_ids = core.ffi.from_buffer("int32_t[]", submission.prompt_ids)
    request.num_prompt_ids = len(submission.prompt_ids)
    request.max_tokens = submission.max_tokens
    request.client_id = submission.client_id
    for name in _SAME_NAMES:
        setattr(request, name, getattr(params, name))
    request.seed = params.seed_or_random()
    request.num_return_sequences = params.num_sequences
    request.early_stopping = _EARLY_STOPPING[params.early_stopping]
    if params.beam_width > 1:
        request.temperature = 0.0  # beams do not sample
    # The core gives the chosen token's log-probability from one candidate on; sequences are ranked by their sums.
    if params.logprobs is not None or params.is_ranked:
        request.num_logprobs = max(1, params.logprobs or 0)
    request.num_prompt_logprobs = -1 if params.prompt_logprobs is None else params.prompt_logprobs
    request.return_context_logits = int(params.return_context_logits)
    request.return_generation_logits = int(params.return_generation_logits)
    request.allotted_time_ms = params.timeout_ms or 0
    request.max_draft_len = _or_minus_one(params.max_draft_len)
    request.top_p_reset_id = _or_minus_one(params.top_p_reset_id)
    request.adapter_id = submission.adapter_id
    request.cache_salt = 0 if params.cache_salt is None else key64(params.cache_salt)
    request.tenant_id = 0 if params.tenant is None else key64(params.tenant)
    if processor is not None:
        request.logits_processor = processor.callback
    if submission.guide is not None:
        request.guide = submission.guide
    _set_words(request, submission, keep_alive)
    _set_retention(request, params, keep_alive)
    return request, keep_alive


def _array(kind: str, values: Any, keep_alive: list[Any]) -> Any:
    data = native().ffi.new(f"{kind}[]", list(values))
    keep_alive.append(data)
    return data


def _set_words(request: Any, submission: Submission, keep_alive: list[Any]) -> None:
    bias, bad_words = submission.params.logit_bias, submission.bad_words
    request.end_ids = _array("int32_t", submission.end_ids, keep_alive)
    request.num_end_ids = len(submission.end_ids)
    request.num_logit_bias = len(bias)
    request.logit_bias_ids = _array("int32_t", bias.keys(), keep_alive)
    request.logit_bias_values = _array("float", bias.values(), keep_alive)
    draft = submission.params.draft_token_ids
    request.draft_ids = _array("int32_t", draft, keep_alive)
    request.num_draft_ids = len(draft)
    for lists, words in ((request.stop_words, submission.params.stop_words), (request.bad_words, bad_words)):
        if words:
            lists.ids = _array("int32_t", [token for word in words for token in word], keep_alive)
            lists.ends = _array("int32_t", np.cumsum([len(word) for word in words]).tolist(), keep_alive)
            lists.num_lists = len(words)


def _set_retention(request: Any, params: SamplingParams, keep_alive: list[Any]) -> None:
    request.decode_retention_duration_ms = _or_minus_one(params.decode_retention_duration_ms)
    if params.retention:
        ranges = [
            (r.start, _or_minus_one(r.end), r.priority, _or_minus_one(r.duration_ms))
            for r in params.retention
        ]
        request.retention_ranges = _array("psm_retention_range", ranges, keep_alive)
        request.num_retention_ranges = len(ranges)


def _or_minus_one(value: int | None) -> int:
    return -1 if value is None else value
