"""Speculation with a model of its own in the server: it drafts some tokens, `tensorrt_llm` checks them, and so on.

Each round sends what there is so far as a prompt; both models have it in their caches. Drafts are to change the time
and never the tokens, so only requests whose next token depends on the text alone take this way: see `can_speculate`.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from ...runtime.errors import Error, InvalidArgumentError
from .bls_rounds import Rounds

Tensors = dict[str, NDArray[Any]]


class Caller(Protocol):
    """A model that can be called; ModelCaller is one."""

    def call(
        self, tensors: Mapping[str, NDArray[Any]], names: Collection[str], request_id: str, parameters: Any
    ) -> Iterator[Tensors]:
        """Start a request and return its answers; raises the error it ends with, here or there."""

    def stop(self, request_id: str) -> None:
        """End a running request."""


def can_speculate(inputs: Mapping[str, NDArray[Any]]) -> bool:
    """Return whether a request's tokens are the same when it is sent in rounds: it is greedy, has one sequence, no
    penalty of the output alone, no grammar, and asks for nothing of the prompt or of its drafts.
    """
    top_k, top_p = _values(inputs, "runtime_top_k", 0), _values(inputs, "runtime_top_p", 0.0)
    is_greedy = np.all(top_k == 1) or (
        np.all(top_k == 0) and np.all(top_p <= 0) and np.all(_values(inputs, "min_p", 0.0) == 0)
    )
    is_greedy = is_greedy or np.all(_values(inputs, "temperature", 1.0) == 0)
    plain = {
        "beam_width": 1,
        "num_return_sequences": 1,
        "presence_penalty": 0,
        "frequency_penalty": 0,
        "return_context_logits": 0,
    }
    is_plain = all(np.all(_values(inputs, name, value) == value) for name, value in plain.items())
    given = ("guided_decoding_guide_type", "draft_input_ids", "lora_weights", "timeout_ms")
    is_batched = inputs["input_ids"].ndim == 2
    return bool(is_batched and is_greedy and is_plain and not any(name in inputs for name in given))


def _values(inputs: Mapping[str, NDArray[Any]], name: str, default: float) -> NDArray[Any]:
    return inputs[name] if name in inputs else np.array([default])


def speculate(
    target: Caller,
    draft: Caller,
    inputs: Tensors,
    names: frozenset[str],
    *,
    num_draft_tokens: int,
    use_draft_logits: bool,
    request_id: str,
    parameters: Mapping[str, Any],
    is_cancelled: Callable[[], bool],
) -> Iterator[Tensors]:
    """Yield a request's answers as `tensorrt_llm` would give them, those of a batch's rows as they come.

    inputs : of `tensorrt_llm`, [B, ...]
    names : of the outputs
    raises the first error of a row; the others are then ended
    """
    rows = [
        _Row(
            target,
            draft,
            _row(inputs, i),
            names,
            num_draft_tokens,
            use_draft_logits,
            parameters,
            is_cancelled,
        )
        for i in range(len(inputs["input_ids"]))
    ]
    if len(rows) == 1:
        yield from rows[0].run(request_id)
    else:
        yield from _together(rows, request_id)


def _together(rows: Sequence[_Row], request_id: str) -> Iterator[Tensors]:
    """Yield the answers of rows that run beside each other, as they come; the first error ends all of them."""
    answers: queue.SimpleQueue[Tensors | BaseException | None] = queue.SimpleQueue()
    for i, row in enumerate(rows):
        arguments = (row, i, f"{request_id}/{i}", answers)
        threading.Thread(target=_run_row, args=arguments, name=f"plansmith-draft-{i}", daemon=True).start()
    num_open, failure = len(rows), None
    try:
        while num_open:
            item = answers.get()
            if isinstance(item, BaseException):
                failure = failure or item
                _stop(rows)
            if item is None or isinstance(item, BaseException):
                num_open -= 1
            elif failure is None:
                yield item
    finally:  # nobody may want more
        _stop(rows)
    if failure is not None:
        raise failure


def _stop(rows: Sequence[_Row]) -> None:
    for row in rows:
        row.is_stopped = True


def _run_row(
    row: _Row, row_idx: int, request_id: str, answers: queue.SimpleQueue[Tensors | BaseException | None]
) -> None:
    try:
        for answer in row.run(request_id):
            answers.put({**answer, "batch_index": np.array([[row_idx]], np.int32)})
        answers.put(None)
    except BaseException as error:
        answers.put(error)


def _row(inputs: Tensors, row_idx: int) -> Tensors:
    return {name: array[row_idx : row_idx + 1] for name, array in inputs.items()}


class _Row:
    """The rounds of one row."""

    def __init__(
        self,
        target: Caller,
        draft: Caller,
        inputs: Tensors,
        names: frozenset[str],
        num_draft_tokens: int,
        use_draft_logits: bool,
        parameters: Mapping[str, Any],
        is_cancelled: Callable[[], bool],
    ) -> None:
        self._target, self._draft, self._names = target, draft, names
        self._num_draft_tokens, self._use_draft_logits = num_draft_tokens, use_draft_logits
        self._parameters, self._is_cancelled = parameters, is_cancelled
        self._inputs = {**inputs, "exclude_input_in_output": _one(True, np.bool_)}
        self._is_streaming = bool(np.any(self._inputs.pop("streaming", False)))
        length = int(inputs["input_lengths"].reshape(-1)[0])
        self._prompt_ids = inputs["input_ids"].reshape(-1)[:length]
        self._has_prompt = not self._is_streaming and not np.any(inputs.get("exclude_input_in_output", False))
        self._max_tokens = int(inputs["request_output_len"].reshape(-1)[0])
        self._min_tokens = int(_values(inputs, "min_tokens", 0).reshape(-1)[0])
        self.is_stopped = False

    def run(self, request_id: str) -> Iterator[Tensors]:
        """Yield an answer a round of a stream, else one in all."""
        made = Rounds(self._prompt_ids if self._has_prompt else self._prompt_ids[:0])
        while True:
            ids = np.concatenate([self._prompt_ids, made.token_ids])
            answer = self._round(ids, made.num_tokens, request_id)
            made.add(answer, self._max_tokens, is_stopped=self.is_stopped or self._is_cancelled())
            if self._is_streaming:
                yield made.partial(answer)
            elif made.is_final:
                yield made.whole()
            if made.is_final:
                return

    def _round(self, ids: NDArray[np.int32], num_tokens: int, request_id: str) -> Tensors:
        left = self._max_tokens - num_tokens
        drafted = self._drafted(ids, min(self._num_draft_tokens, left - 1), request_id)
        asked = drafted["output_ids"].shape[-1] + 1 if drafted else left
        inputs = self._at(ids, asked, max(self._min_tokens - num_tokens, 0))
        if drafted:
            inputs["draft_input_ids"] = drafted["output_ids"].reshape(1, -1)
            if "generation_logits" in drafted:
                inputs["draft_logits"] = drafted["generation_logits"][:, 0]
        try:
            (answer,) = self._target.call(inputs, self._names, request_id, self._parameters)
        except InvalidArgumentError:
            if not num_tokens:
                raise
            return self._rest(num_tokens, request_id)
        return answer

    def _rest(self, num_tokens: int, request_id: str) -> Tensors:
        """Return what is missing of the output, made from the prompt: what is there may be too long for a prompt."""
        inputs = self._at(self._prompt_ids, self._max_tokens, self._min_tokens)
        (answer,) = self._target.call(inputs, self._names, request_id, self._parameters)
        rest = dict(answer)
        rest["output_ids"] = answer["output_ids"][:, :, num_tokens:]
        rest["sequence_length"] = answer["sequence_length"] - num_tokens
        for name in ("output_log_probs", "generation_logits"):
            if name in rest:
                rest[name] = answer[name][:, :, num_tokens:]
        if "cum_log_probs" in rest and "output_log_probs" in rest:
            rest["cum_log_probs"] = rest["output_log_probs"].sum(axis=2)
        return rest

    def _drafted(self, ids: NDArray[np.int32], num_tokens: int, request_id: str) -> Tensors | None:
        """Return a draft; None when there is none to be had: what drafts cannot be worth is the request."""
        if num_tokens < 1 or self.is_stopped or self._is_cancelled():
            return None
        inputs = self._at(ids, num_tokens, num_tokens)
        for name in ("return_log_probs", "return_perf_metrics", "return_generation_logits", "lora_task_id"):
            inputs.pop(name, None)
        names = ["output_ids", "sequence_length"]
        if self._use_draft_logits:
            inputs["return_generation_logits"] = _one(True, np.bool_)
            names.append("generation_logits")
        try:
            (drafted,) = self._draft.call(inputs, names, request_id, self._parameters)
        except (Error, ValueError):
            return None
        return drafted if drafted["output_ids"].size else None

    def _at(self, ids: NDArray[np.int32], output_len: int, min_tokens: int) -> Tensors:
        return {
            **self._inputs,
            "input_ids": ids.reshape(1, -1),
            "input_lengths": _one(len(ids), np.int32),
            "request_output_len": _one(output_len, np.int32),
            "min_tokens": _one(min(min_tokens, output_len), np.int32),
        }


def _one(value: int | bool, dtype: Any) -> NDArray[Any]:
    return np.array([[value]], dtype)
