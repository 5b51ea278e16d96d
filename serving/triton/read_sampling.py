"""How a row samples and when it ends: inputs to fields of SamplingParams, with the older stack's defaults.

What is not sent means what it meant to the older stack, also where SamplingParams has another default:

- No runtime_top_k (or 0) and no runtime_top_p (or one <= 0) is greedy. One of them alone is used without the other;
  runtime_top_p 1 alone samples from all. min_p, which is ours, makes a request sample too.
- No seed is seed 0: the same request gets the same answer.
- No min_tokens is 1: the first token is no end token. One above request_output_len is lowered to it.
- A request_output_len that goes beyond the engine's max_seq_len is lowered to what the prompt leaves of it.
- Of beams, len_penalty is 0 and early_stopping 1, and what only drawing needs (runtime_top_k, runtime_top_p and its
  decay, min_p) has no effect.

What differs:

- A request without end_id ends at the model's own end tokens, where it ran to its full length; end_id -1 still has it
  run, and one of the model's own stands for all of them, as a tokenizer names one where a model has several. With a
  guide the model's own end tokens end it whatever end_id says, as the grammar's end must be sayable.
- Temperature 0 is greedy; the older stack divided by a tiny number, to the same effect.
- min_tokens holds for stop words too.
- A beam is taken or dropped by transformers' rules, so that scores of equal requests can differ in the last beams.
- bad and stop words, end_id and embedding_bias outside the vocabulary are errors; they were ignored.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from ...runtime.errors import InvalidArgumentError, ShapeError
from .row import RowDefaults
from .tensors import Inputs
from .word_lists import read_word_list

_NGRAM_OFF = 1 << 30  # the older default: longer than any output
_SAME = {
    "temperature": "temperature",
    "repetition_penalty": "repetition_penalty",
    "presence_penalty": "presence_penalty",
    "frequency_penalty": "frequency_penalty",
}


def read_sampling(inputs: Inputs, row: int, prompt_len: int, defaults: RowDefaults) -> dict[str, Any]:
    """Return the fields of SamplingParams that a row's inputs of sampling, beams and words give.

    raises : InvalidArgumentError or ShapeError naming the input
    """
    params = _lengths(inputs, row, prompt_len, defaults.max_seq_len)
    params |= {"seed": inputs.integer("seed", row) or 0, "detokenize": False}
    for name, field in _SAME.items():
        value = inputs.number(name, row)
        if value is not None:
            params[field] = value
    if params.get("repetition_penalty") == 0:
        raise InvalidArgumentError("repetition_penalty is 0.0, wanted above 0; 1 is none")
    width = inputs.integer("beam_width", row) or 1
    params |= _beams(inputs, row, width, defaults.max_beam_width) if width > 1 else _drawing(inputs, row)
    params |= _ends(inputs, row, defaults)
    ngram_size = inputs.integer("no_repeat_ngram_size", row)
    if ngram_size and ngram_size < _NGRAM_OFF:
        params["no_repeat_ngram_size"] = ngram_size
    bias = _bias(inputs, row, defaults.vocab_size)
    return params | ({"logit_bias": bias} if bias else {})


def _lengths(inputs: Inputs, row: int, prompt_len: int, max_seq_len: int | None) -> dict[str, Any]:
    max_tokens = inputs.integer("request_output_len", row)
    if max_tokens is None:
        raise InvalidArgumentError(
            "request_output_len is missing; send the most tokens to generate, [B, 1] INT32"
        )
    room = (max_seq_len or 2**31) - prompt_len
    if 0 < room < max_tokens:
        inputs.notes.append(f"request_output_len is {max_tokens}, of which max_seq_len leaves {room}")
        max_tokens = room
    min_tokens = inputs.integer("min_tokens", row)
    return {
        "max_tokens": max_tokens,
        "min_tokens": min(1 if min_tokens is None else min_tokens, max_tokens),
    }


def _drawing(inputs: Inputs, row: int) -> dict[str, Any]:
    top_k = inputs.integer("runtime_top_k", row) or 0
    top_p = inputs.number("runtime_top_p", row) or 0.0
    min_p = inputs.number("min_p", row) or 0.0
    if not top_k and top_p <= 0 and not min_p:
        top_k = 1
    params: dict[str, Any] = {"top_k": top_k, "top_p": top_p if top_p > 0 else 1.0, "min_p": min_p}
    count = inputs.integer("num_return_sequences", row)
    if count is not None:
        params["n"] = count
    if top_k != 1:
        params |= _decay(inputs, row)
    return params


def _decay(inputs: Inputs, row: int) -> dict[str, Any]:
    """Return what moves top_p from token to token."""
    params: dict[str, Any] = {}
    least = inputs.number("runtime_top_p_min", row)
    if least is None:
        least = inputs.number("runtime_top_k_min", row)
    if least:
        params["top_p_min"] = least
    decay = inputs.number("runtime_top_p_decay", row)
    if decay == 0:
        raise InvalidArgumentError("runtime_top_p_decay is 0.0, wanted above 0 and at most 1; 1 is none")
    if decay is not None:
        params["top_p_decay"] = decay
    reset_id = inputs.integer("runtime_top_p_reset_ids", row)
    if reset_id is not None and reset_id >= 0:
        params["top_p_reset_id"] = reset_id
    return params


def _beams(inputs: Inputs, row: int, width: int, max_beam_width: int) -> dict[str, Any]:
    if width > max_beam_width:
        raise InvalidArgumentError(
            f"beam_width is {width}, the model's max_beam_width is {max_beam_width}; raise that parameter of the "
            "model, or ask for fewer beams"
        )
    early = inputs.integer("early_stopping", row)
    count = inputs.integer("num_return_sequences", row)
    if count is not None and count > width:
        raise InvalidArgumentError(
            f"num_return_sequences is {count}, more than the {width} of beam_width; widen the beam, or ask for fewer"
        )
    return {
        "beam_width": width,
        "length_penalty": inputs.number("len_penalty", row) or 0.0,
        "early_stopping": {0: False, 1: True, None: True}.get(early, "never"),
        "beam_search_diversity_rate": inputs.number("beam_search_diversity_rate", row) or 0.0,
    }


def _ends(inputs: Inputs, row: int, defaults: RowDefaults) -> dict[str, Any]:
    """Return what ends a row besides its length, and the words it must not have."""
    vocab_size = defaults.vocab_size
    params: dict[str, Any] = {}
    end_id = inputs.integer("end_id", row)
    if end_id in defaults.own_end_ids:
        end_id = None
    if end_id is not None:
        params["ignore_eos"] = not inputs.text("guided_decoding_guide_type", row)
    if end_id is not None and end_id >= 0:
        _check_ids([end_id], "end_id", vocab_size)
        params["stop_token_ids"] = (end_id,)
    for name, field in (("stop_words_list", "stop_words"), ("bad_words_list", "bad_words")):
        array = inputs.row(name, row)
        words = [] if array is None else read_word_list(array, name)
        for word in words:
            _check_ids(word, name, vocab_size)
        if words:
            params[field] = tuple(map(tuple, words))
    return params


def _check_ids(ids: list[int], name: str, vocab_size: int) -> None:
    if max(ids) >= vocab_size:
        raise InvalidArgumentError(
            f"{name} has the token {max(ids)}, the model's ids go from 0 to {vocab_size - 1}; use the model's own "
            "tokenizer"
        )


def _bias(inputs: Inputs, row: int, vocab_size: int) -> dict[int, float]:
    """Return embedding_bias by token. Its size is the tokenizer's vocabulary or the model's."""
    array = inputs.row("embedding_bias", row)
    if array is None:
        return {}
    ids = np.flatnonzero(array)
    if ids.size and ids[-1] >= vocab_size:
        raise ShapeError(
            f"embedding_bias has {array.size} values, and one for the token {ids[-1]}; the model's ids go from 0 to "
            f"{vocab_size - 1}"
        )
    values = array[ids].astype(np.float32)
    if np.isnan(values).any() or np.isposinf(values).any():
        raise InvalidArgumentError("embedding_bias has a NaN or an infinity above 0, wanted numbers or -inf")
    return dict(zip(ids.tolist(), values.tolist(), strict=True))
