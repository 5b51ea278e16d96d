"""What a row may ask for beside sampling: structured output, drafts, an adapter, and what the cache keeps."""

from __future__ import annotations

from typing import Any

import numpy as np

from ...runtime.errors import InvalidArgumentError, ShapeError, UnsupportedError
from ...runtime.guided import GuidedParams
from ...runtime.sampling import RetentionRange
from .row import LoraRequest
from .tensors import Inputs, triton_type

_GUIDES = {"json_schema": "json_schema", "regex": "regex", "ebnf_grammar": "ebnf"}
_LOOKAHEAD = ("lookahead_window_size", "lookahead_ngram_size", "lookahead_verification_set_size")
_RANGES = ("starts", "ends", "priorities", "durations_ms")


def read_extras(
    inputs: Inputs, row: int, vocab_size: int, logits_dtype: type[np.floating[Any]]
) -> dict[str, Any]:
    """Return the fields of SamplingParams that these inputs give; raises what names the input."""
    params = _drafts(inputs, row, vocab_size, logits_dtype) | _retention(inputs, row)
    guided = _guided(inputs, row)
    if guided is not None:
        params["guided"] = guided
    salt = inputs.text("cache_salt", row)
    if salt:
        params["cache_salt"] = salt
    priority = inputs.number("priority", row)
    if priority is not None:
        params["priority"] = priority
    timeout_ms = inputs.integer("timeout_ms", row)
    if timeout_ms:
        params["timeout_ms"] = timeout_ms
    return params


def read_lora(inputs: Inputs, row: int) -> LoraRequest | None:
    """Return the adapter that a row names, with its arrays where it brings them; None = none."""
    task_id = inputs.integer("lora_task_id", row)
    weights, config = inputs.row("lora_weights", row), inputs.row("lora_config", row)
    if (weights is None) != (config is None):
        there, missing = (
            ("lora_weights", "lora_config") if config is None else ("lora_config", "lora_weights")
        )
        raise InvalidArgumentError(f"{there} came without {missing}; send both, or lora_task_id alone")
    if task_id is None:
        if weights is not None:
            raise InvalidArgumentError(
                "lora_weights came without lora_task_id; send the number it is cached under"
            )
        return None
    if weights is not None and config is not None and len(weights) != len(config):
        raise ShapeError(
            f"lora_weights has {len(weights)} rows and lora_config {len(config)}, wanted one a module in both"
        )
    if weights is None or config is None:
        return LoraRequest(task_id)
    return LoraRequest(
        task_id, weights.copy(), config.copy()
    )  # the request's buffers go before the adapter does


def _guided(inputs: Inputs, row: int) -> GuidedParams | None:
    kind = inputs.text("guided_decoding_guide_type", row)
    guide = inputs.text("guided_decoding_guide", row)
    if not kind:
        if guide:
            raise InvalidArgumentError(
                f"guided_decoding_guide came without guided_decoding_guide_type; send one of json, {', '.join(_GUIDES)}"
            )
        return None
    if kind == "json":
        return GuidedParams(json=True)
    if kind == "structural_tag":
        raise UnsupportedError(
            "guided_decoding_guide_type structural_tag is not compiled by this engine; write it as an ebnf_grammar"
        )
    if kind not in _GUIDES:
        raise InvalidArgumentError(
            f"guided_decoding_guide_type is {kind!r}, wanted json or one of {', '.join(_GUIDES)}"
        )
    if not guide:
        raise InvalidArgumentError(f"guided_decoding_guide is missing, which the guide type {kind} needs")
    given: dict[str, Any] = {_GUIDES[kind]: guide}
    return GuidedParams(**given)


def _drafts(
    inputs: Inputs, row: int, vocab_size: int, logits_dtype: type[np.floating[Any]]
) -> dict[str, Any]:
    """Return draft tokens and lengths.

    Every draft is checked against the model's own choice, so neither draft_logits nor the threshold are needed for
    the answer; they are checked, so that what was wrong before is wrong here.
    """
    params: dict[str, Any] = {}
    draft = inputs.integers("draft_input_ids", row) or []
    for token in (min(draft, default=0), max(draft, default=0)):
        if not 0 <= token < vocab_size:
            raise InvalidArgumentError(
                f"draft_input_ids has the token {token}, the model's ids go from 0 to {vocab_size - 1}; draft with a "
                "model of the same vocabulary"
            )
    if draft:
        params["draft_token_ids"] = tuple(draft)
    _check_draft_logits(inputs, row, len(draft), vocab_size, logits_dtype)
    if inputs.number("draft_acceptance_threshold", row) == 0:
        raise InvalidArgumentError("draft_acceptance_threshold is 0.0, wanted above 0 and at most 1")
    lookahead = [inputs.integer(name, row) for name in _LOOKAHEAD]
    if None in lookahead and lookahead != [None] * 3:
        missing = _LOOKAHEAD[lookahead.index(None)]
        raise InvalidArgumentError(f"{missing} is missing; send all of {', '.join(_LOOKAHEAD)}, or none")
    if lookahead[1] is not None:
        params["max_draft_len"] = lookahead[1] - 1  # an n-gram is a token that is known and n - 1 that follow
    length = inputs.integer("max_draft_len", row)
    if length is not None:
        params["max_draft_len"] = length
    return params


def _check_draft_logits(
    inputs: Inputs, row: int, num_tokens: int, vocab_size: int, logits_dtype: type[np.floating[Any]]
) -> None:
    logits = inputs.row("draft_logits", row)
    if logits is None:
        return
    if logits.dtype != np.dtype(logits_dtype):
        wanted = triton_type(np.empty(0, logits_dtype))
        raise InvalidArgumentError(
            f"draft_logits is {triton_type(logits)}, the model's logits_datatype is {wanted}; send that, or leave "
            "draft_logits out, which is as good"
        )
    if len(logits) != num_tokens or logits.shape[1] < vocab_size:
        raise ShapeError(
            f"draft_logits has shape {list(logits.shape)}, wanted [{num_tokens}, {vocab_size}]: a row for each of "
            "draft_input_ids"
        )


def _retention(inputs: Inputs, row: int) -> dict[str, Any]:
    params: dict[str, Any] = {}
    priority = inputs.integer("retention_decode_priority", row)
    if priority is not None:
        params["decode_retention_priority"] = priority
    duration_ms = inputs.integer("retention_decode_duration_ms", row)
    if duration_ms is not None and duration_ms >= 0:
        params["decode_retention_duration_ms"] = duration_ms
    columns = {name: inputs.integers(f"retention_token_range_{name}", row) for name in _RANGES}
    starts = columns["starts"]
    if starts is None:
        sent = [name for name in _RANGES[1:] if columns[name] is not None]
        if sent:
            raise InvalidArgumentError(
                f"retention_token_range_{sent[0]} came without retention_token_range_starts; send both, or neither"
            )
        return params
    columns["durations_ms"] = columns["durations_ms"] or [-1] * len(starts)
    for name in _RANGES[1:]:
        got = columns[name]
        if got is None or len(got) != len(starts):
            raise ShapeError(
                f"retention_token_range_{name} has {len(got or ())} values, wanted {len(starts)}, as "
                "retention_token_range_starts has"
            )
    rows = zip(*(columns[name] or () for name in _RANGES), strict=True)
    params["retention"] = _ranges(sorted(rows))
    return params


def _ranges(rows: list[tuple[int, ...]]) -> tuple[RetentionRange, ...]:
    """Return ranges in ascending order, each (start, end, priority, duration_ms) checked; -1 = no end, for ever."""
    ranges = []
    before: int | None = 0
    for start, end, priority, duration_ms in rows:
        if start < 0 or before is None or start < before:
            raise InvalidArgumentError(
                f"retention_token_range_starts has {start}, wanted at least 0 and outside every other range"
            )
        if end != -1 and end <= start:
            raise InvalidArgumentError(
                f"retention_token_range_ends has {end} for a range that starts at {start}, wanted more, or -1 for the "
                "prompt's end"
            )
        if not 0 <= priority <= 100:
            raise InvalidArgumentError(f"retention_token_range_priorities has {priority}, wanted 0 to 100")
        if duration_ms < -1:
            raise InvalidArgumentError(
                f"retention_token_range_durations_ms has {duration_ms}, wanted at least 0, or -1 for ever"
            )
        before = None if end == -1 else end
        ranges.append(RetentionRange(start, before, priority, None if duration_ms == -1 else duration_ms))
    return tuple(ranges)
