"""The answers to the rounds of one row as the answers of a request that was not cut into rounds."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

__all__ = ["Rounds"]

_LENGTH = 3  # of finish_reasons: the round had its tokens
_UNFINISHED = 0
_FIRST_TIMES = ("arrival_time_ns", "first_scheduled_time_ns", "first_token_time_ns")
_SUMMED = ("total_accepted_draft_tokens", "total_draft_tokens", "kv_cache_alloc_new_blocks")

Tensors = dict[str, NDArray[Any]]


class Rounds:
    """The answers of the rounds so far as one. One thread at a time.

    prompt_ids : (n,) int32, what a whole answer begins with
    token_ids : of all rounds, behind it
    """

    def __init__(self, prompt_ids: NDArray[np.int32]) -> None:
        self._prompt_ids = prompt_ids
        self._rounds: list[Tensors] = []
        self._cum_log_prob = 0.0
        self.token_ids = np.empty(0, np.int32)
        self.is_final = False

    @property
    def num_tokens(self) -> int:
        """How many tokens the rounds have made."""
        return len(self.token_ids)

    def add(self, answer: Tensors, max_tokens: int, *, is_stopped: bool) -> None:
        """Take the answer of a round, and see whether it is the last."""
        length = int(answer["sequence_length"].reshape(-1)[0])
        self.token_ids = np.concatenate([self.token_ids, answer["output_ids"].reshape(-1)[:length]])
        reason = int(answer["finish_reasons"].reshape(-1)[0])
        is_full = self.num_tokens >= max_tokens
        self.is_final = is_full or is_stopped or not length or reason not in (_UNFINISHED, _LENGTH)
        if not self.is_final:
            answer["finish_reasons"] = np.zeros_like(answer["finish_reasons"])
        answer["is_final"] = np.array([[self.is_final]])
        if "cum_log_probs" in answer:
            self._cum_log_prob += float(answer["cum_log_probs"].reshape(-1)[0])
            answer["cum_log_probs"] = np.array([[self._cum_log_prob]], np.float32)
        self._rounds.append(answer)

    def partial(self, answer: Tensors) -> Tensors:
        """Return the answer of the last round as one of a stream: metrics come with the last."""
        if self.is_final:
            return {**answer, **self._metrics()}
        names = (*_FIRST_TIMES, *_SUMMED, "last_token_time_ns", "acceptance_rate", "kv_cache_reused_blocks")
        return {name: array for name, array in answer.items() if name not in names}

    def whole(self) -> Tensors:
        """Return all rounds as one answer."""
        made = {**self._rounds[-1], **self._metrics()}
        ids = np.concatenate([self._prompt_ids, self.token_ids])
        made["output_ids"] = ids.reshape(1, 1, -1)
        made["sequence_length"] = np.array([[len(ids)]], np.int32)
        made["num_output_tokens"] = np.array([[self.num_tokens]], np.int32)
        for name in ("output_log_probs", "generation_logits"):
            if name in made:
                made[name] = np.concatenate([one[name] for one in self._rounds], axis=2)
        return made

    def _metrics(self) -> Tensors:
        first, last = self._rounds[0], self._rounds[-1]
        made = {name: first[name] for name in _FIRST_TIMES if name in last}
        for name in _SUMMED:
            if name in last:
                made[name] = np.sum([one[name] for one in self._rounds], axis=0, dtype=last[name].dtype)
        if "num_input_tokens" in last:
            made["num_input_tokens"] = first["num_input_tokens"]
        if "acceptance_rate" in last and "total_draft_tokens" in made:
            drafted = made["total_draft_tokens"].astype(np.float32)
            rate = made["total_accepted_draft_tokens"] / np.maximum(drafted, 1)
            made["acceptance_rate"] = rate.astype(np.float32)
        return made
