"""A request's tensors as rows: what each asks the engine for, and what its client wants to see."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ...runtime.errors import InvalidArgumentError, ShapeError
from .read_extras import read_extras, read_lora
from .read_sampling import read_sampling
from .row import Row, RowDefaults
from .tensors import Inputs
from .unsupported import refuse_unsupported

_WANTS = {
    "return_log_probs": "log_probs",
    "return_context_logits": "context_logits",
    "return_generation_logits": "generation_logits",
    "return_perf_metrics": "perf_metrics",
    "return_kv_cache_reuse_stats": "perf_metrics",
    "return_num_input_tokens": "num_input_tokens",
    "return_num_output_tokens": "num_output_tokens",
}
_WANTED_PARAMS: dict[str, dict[str, Any]] = {
    "log_probs": {"logprobs": 0},
    "context_logits": {"return_context_logits": True},
    "generation_logits": {"return_generation_logits": True},
}


def read_rows(
    tensors: Mapping[str, NDArray[Any]], parameters: Mapping[str, Any], defaults: RowDefaults
) -> list[Row]:
    """Return a request's rows in the batch's order; each checked as far as that needs no engine. Any thread.

    tensors : by name, in one of the forms of tensors.py; BYTES are arrays of objects
    parameters : of the request; those named like an input of one value stand for it, others have no effect
    raises : InvalidArgumentError, ShapeError or UnsupportedError naming the tensor; no row counts then
    """
    inputs = Inputs(tensors, parameters)
    refuse_unsupported(inputs, parameters)
    return [_read_row(inputs, i, defaults) for i in range(inputs.num_rows)]


def is_stop(tensors: Mapping[str, NDArray[Any]]) -> bool:
    """Return whether a request asks for the end of the one with its id; its other tensors then say nothing."""
    stop = tensors.get("stop")
    return stop is not None and stop.size > 0 and bool(stop.reshape(-1)[0])


def _read_row(inputs: Inputs, row: int, defaults: RowDefaults) -> Row:
    prompt_ids = _prompt(inputs, row, defaults)
    params = read_sampling(inputs, row, len(prompt_ids), defaults)
    params |= read_extras(inputs, row, defaults.vocab_size, defaults.logits_dtype)
    wants = frozenset(want for name, want in _WANTS.items() if inputs.flag(name, row))
    for want in wants:
        params |= _WANTED_PARAMS.get(want, {})
    pad_id = inputs.integer("pad_id", row)
    exclude_input = inputs.flag("exclude_input_in_output", row)
    num_beams = inputs.integer("num_return_sequences", row) if "beam_width" in params else None
    return Row(
        prompt_ids=prompt_ids,
        params=params,
        streaming=bool(inputs.flag("streaming", row)),
        exclude_input=defaults.exclude_input if exclude_input is None else exclude_input,
        end_id=inputs.integer("end_id", row),
        pad_id=-1 if pad_id is None else pad_id,
        wants=wants,
        lora=read_lora(inputs, row),
        row_idx=row,
        is_batch=inputs.num_rows > 1,
        num_beams=num_beams,
        notes=inputs.take_notes(),
    )


def _prompt(inputs: Inputs, row: int, defaults: RowDefaults) -> NDArray[np.int32]:
    """Return the ids of a row without their padding."""
    length = inputs.integer("input_lengths", row)
    if length is None:
        raise InvalidArgumentError(
            "input_lengths is missing; send each row's number of prompt tokens, [B, 1] INT32"
        )
    ids = inputs.row("input_ids", row)
    if ids is None:
        raise InvalidArgumentError("input_ids is missing or empty; send the prompt's token ids, [B, n] INT32")
    where = f" of row {row}" if inputs.num_rows > 1 else ""
    if length > ids.size:
        raise ShapeError(
            f"input_lengths{where} is {length}, input_ids has {ids.size} tokens a row; send the number of them that "
            "are not padding"
        )
    limit = defaults.max_seq_len
    if limit is not None and length > limit:  # a prompt of millions would hold up all others on its way
        raise InvalidArgumentError(
            f"input_lengths{where} is {length}, the engine's max_seq_len is {limit}; shorten the prompt, or rebuild "
            "with --max-seq-len"
        )
    ids = np.array(ids[:length], np.int32)  # the request's buffer may be gone when the row is used
    vocab_size = defaults.vocab_size
    wrong = np.flatnonzero((ids < 0) | (ids >= vocab_size))
    if wrong.size:
        i = int(wrong[0])
        raise InvalidArgumentError(
            f"input_ids{where} has {ids[i]} at {i}, the model's ids go from 0 to {vocab_size - 1}; use the model's own "
            "tokenizer"
        )
    return ids
