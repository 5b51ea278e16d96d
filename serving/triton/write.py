"""Answers as tensors of the shapes on the wire: a leading 1, then beams or the sequences that are answered together."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ...runtime.completion import Completion, SequenceOutput
from ...runtime.stats import RequestStats
from .row import Row

__all__ = ["PREFIX_LEN", "Outputs", "Piece", "Writer"]

Outputs = dict[str, NDArray[Any]]

PREFIX_LEN = 16  # output tokens, at least, that come with an answer's new ones, so that they can be made text
_NO_TOKEN = -1
_NO_LOGPROB = -1.0  # what the older backend filled with; sequence_length tells where it begins

# finish_reason of the runtime -> the older stack's numbers: 1 end id, 2 stop words, 3 length, 4 timed out, 5 cancelled.
_FINISH_REASONS = {None: 0, "length": 3, "timeout": 4, "cancelled": 5}
_END_ID, _STOP_WORDS = 1, 2

_STATS: Mapping[str, tuple[str, type[np.generic]]] = {
    "kv_cache_alloc_new_blocks": ("alloc_new_blocks", np.int32),
    "kv_cache_reused_blocks": ("reused_blocks", np.int32),
    "kv_cache_alloc_total_blocks": ("alloc_total_blocks", np.int32),
    "arrival_time_ns": ("arrival_time_ns", np.int64),
    "first_scheduled_time_ns": ("first_scheduled_time_ns", np.int64),
    "first_token_time_ns": ("first_token_time_ns", np.int64),
    "last_token_time_ns": ("last_token_time_ns", np.int64),
    "acceptance_rate": ("acceptance_rate", np.float32),
    "total_accepted_draft_tokens": ("num_accepted_draft_tokens", np.int32),
    "total_draft_tokens": ("num_draft_tokens", np.int32),
}


@dataclasses.dataclass(frozen=True)
class Piece:
    """What an answer says of one sequence: what is new since its last answer, or all of it.

    token_ids, logprobs : new tokens, and the log-probability of each where it was asked for
    cum_logprob : the sum over all tokens so far
    prefix_ids : the output tokens before the new ones, PREFIX_LEN of them or what their text takes (PrefixRule)
    finish_reason, stop_reason : as Delta has them; None while it goes on
    logits : (tokens, V) float32, where they were asked for
    """

    token_ids: Sequence[int]
    logprobs: Sequence[float] = ()
    cum_logprob: float = 0.0
    prefix_ids: Sequence[int] = ()
    finish_reason: str | None = None
    stop_reason: str | int | None = None
    logits: NDArray[np.float32] | None = None

    @classmethod
    def of_output(cls, output: SequenceOutput) -> Piece:
        """Return all of an output as one piece."""
        return cls(
            token_ids=output.token_ids,
            logprobs=[one.logprob for one in output.logprobs or ()],
            cum_logprob=output.cumulative_logprob or 0.0,
            finish_reason=output.finish_reason,
            stop_reason=output.stop_reason,
            logits=output.generation_logits,
        )


class Writer:
    """Writes the answers of one row. Any thread.

    row : what its client wants to see
    names : the outputs that the request asked for; others are left out
    logits_dtype : "float32" or "float16"
    """

    def __init__(self, row: Row, names: Collection[str], logits_dtype: str = "float32") -> None:
        self._row = row
        self._names = frozenset(names)
        self._logits_dtype = np.dtype(logits_dtype)

    def partial(
        self,
        piece: Piece,
        *,
        sequence_idx: int | None = None,
        stats: RequestStats | None = None,
        context_logits: NDArray[np.float32] | None = None,
    ) -> Outputs:
        """Return an answer with what is new of one sequence.

        sequence_idx : None = the row's only one
        stats : with the last answer of a sequence; None = not known yet
        """
        return self._answer([piece], sequence_idx, stats, context_logits)

    def whole(self, completion: Completion) -> Outputs:
        """Return one answer with all outputs of a completion, one below the other."""
        outputs = completion.outputs[: self._row.num_beams]
        pieces = [Piece.of_output(one) for one in outputs]
        return self._answer(
            pieces, None, completion.stats, completion.context_logits, prompt_ids=self._prompt()
        )

    def each(self, completion: Completion) -> list[Outputs]:
        """Return an answer for every output of a completion, marked with its index."""
        return [
            self._answer(
                [Piece.of_output(one)],
                one.index,
                one.stats,
                completion.context_logits if one.index == 0 else None,
                prompt_ids=self._prompt(),
            )
            for one in completion.outputs
        ]

    def _prompt(self) -> NDArray[np.int32] | None:
        return None if self._row.exclude_input else self._row.prompt_ids

    def _answer(
        self,
        pieces: Sequence[Piece],
        sequence_idx: int | None,
        stats: RequestStats | None,
        context_logits: NDArray[np.float32] | None,
        *,
        prompt_ids: NDArray[np.int32] | None = None,
    ) -> Outputs:
        row, wants = self._row, self._row.wants
        made = self._tokens(pieces, prompt_ids)
        if "log_probs" in wants:
            made["cum_log_probs"] = np.array([[one.cum_logprob for one in pieces]], np.float32)
            made["output_log_probs"] = _padded([one.logprobs for one in pieces], np.float32, _NO_LOGPROB)
        if "context_logits" in wants and context_logits is not None:
            made["context_logits"] = context_logits.astype(self._logits_dtype)[None]
        if "generation_logits" in wants:
            made["generation_logits"] = self._generation_logits(pieces)
        if row.is_batch:
            made["batch_index"] = _one(row.row_idx)
        if sequence_idx is not None:
            made["sequence_index"] = _one(sequence_idx)
        if "num_input_tokens" in wants:
            made["num_input_tokens"] = _one(len(row.prompt_ids))
        if "num_output_tokens" in wants:
            made["num_output_tokens"] = _one(sum(len(one.token_ids) for one in pieces))
        if (
            "perf_metrics" in wants
        ):  # clients read them of every answer of a stream; before the last they are 0
            for name, (field, dtype) in _STATS.items():
                made[name] = _one(getattr(stats, field, 0), dtype)
        return {name: array for name, array in made.items() if name in self._names}

    def _tokens(self, pieces: Sequence[Piece], prompt_ids: NDArray[np.int32] | None) -> Outputs:
        ids: list[Sequence[int] | NDArray[np.int32]] = [one.token_ids for one in pieces]
        if prompt_ids is not None:
            ids = [np.concatenate([prompt_ids, np.asarray(one, np.int32)]) for one in ids]
        is_final = all(one.finish_reason is not None for one in pieces)
        width = max(PREFIX_LEN, *(len(one.prefix_ids) for one in pieces))
        prefix_ids = np.full((1, len(pieces), width), _NO_TOKEN, np.int32)
        for i, one in enumerate(pieces):
            if one.prefix_ids:
                prefix_ids[0, i, -len(one.prefix_ids) :] = one.prefix_ids
        return {
            "output_ids": _padded(ids, np.int32, _NO_TOKEN),
            "sequence_length": np.array([[len(one) for one in ids]], np.int32),
            "prefix_ids": prefix_ids,
            "is_final": np.array([[is_final]]),
            "finish_reasons": np.array([[_finish_reason(one, self._row) for one in pieces]], np.int32),
        }

    def _generation_logits(self, pieces: Sequence[Piece]) -> NDArray[Any]:
        """Return (1, sequences, tokens, V), zeros behind a sequence's end."""
        rows = [one.logits for one in pieces if one.logits is not None and one.logits.size]
        shape = (max((len(one) for one in rows), default=0), rows[0].shape[1] if rows else 0)
        made = np.zeros((1, len(pieces), *shape), self._logits_dtype)
        for i, one in enumerate(pieces):
            if one.logits is not None and one.logits.size:
                made[0, i, : len(one.logits)] = one.logits
        return made


def _finish_reason(piece: Piece, row: Row) -> int:
    if piece.finish_reason != "stop":
        return _FINISH_REASONS[piece.finish_reason]
    if piece.stop_reason is not None:
        return _END_ID if piece.stop_reason == row.end_id else _STOP_WORDS
    end = (*piece.prefix_ids, *piece.token_ids)
    words = [tuple(word) for word in row.params.get("stop_words", ())]
    return _STOP_WORDS if any(_ends_with(end, word) for word in words) else _END_ID


def _ends_with(end: tuple[int, ...], word: tuple[int, ...]) -> bool:
    """Return whether an output ends with a word; of a longer one than the part of the output that is known, its end."""
    known = end[-len(word) :]
    return len(known) >= min(len(word), PREFIX_LEN) and known == word[-len(known) :]


def _padded(rows: Sequence[Any], dtype: type[np.generic], fill: float) -> NDArray[Any]:
    """Return (1, rows, longest), filled behind each row's end."""
    made = np.full((1, len(rows), max(map(len, rows), default=0)), fill, dtype)
    for i, row in enumerate(rows):
        made[0, i, : len(row)] = row
    return made


def _one(value: float, dtype: type[np.generic] = np.int32) -> NDArray[Any]:
    return np.array([[value]], dtype)
