"""Log-probabilities as the two endpoints of OpenAI's API show them, and as vLLM shows those of prompts."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ...runtime.completion import TokenLogprobs
from .token_text import TokenTexts

_LEAST = -9999.0  # JSON has no -inf


class LogprobWriter:
    """Writes log-probabilities of one choice, whose deltas come in order.

    texts : None for an engine without tokenizer, whose tokens are shown as token_id:7
    as_ids : show every token so
    num_top : of the likeliest tokens to show
    """

    def __init__(self, texts: TokenTexts | None, num_top: int, *, as_ids: bool = False) -> None:
        self._texts = None if as_ids else texts
        self._all_texts = texts
        self._num_top = num_top
        self._offset = 0

    def chat(self, entries: Sequence[TokenLogprobs] | None) -> dict[str, Any]:
        """Return `logprobs` of a chat's choice."""
        return {"content": [self._chat_entry(entry) for entry in entries or ()], "refusal": None}

    def _chat_entry(self, entry: TokenLogprobs) -> dict[str, Any]:
        top = [self._one(token_id, logprob) for token_id, logprob in entry.top[: self._num_top]]
        return {**self._one(entry.token_id, entry.logprob), "top_logprobs": top}

    def _one(self, token_id: int, logprob: float) -> dict[str, Any]:
        data = None if self._all_texts is None else list(self._all_texts.data(token_id))
        return {"token": self._text(token_id), "logprob": _number(logprob), "bytes": data}

    def completion(self, entries: Sequence[TokenLogprobs | None], token_ids: Sequence[int]) -> dict[str, Any]:
        """Return `logprobs` of a completion's choice.

        entries : one a token, None for a token that follows nothing
        """
        tokens = [self._text(token_id) for token_id in token_ids]
        offsets = []
        for token in tokens:
            offsets.append(self._offset)
            self._offset += len(token)
        return {
            "tokens": tokens,
            "token_logprobs": [None if entry is None else _number(entry.logprob) for entry in entries],
            "top_logprobs": [self._top(entry) for entry in entries] if self._num_top else None,
            "text_offset": offsets,
        }

    def _top(self, entry: TokenLogprobs | None) -> dict[str, float] | None:
        """Return the likeliest by their text, and the token itself, which need not be among them."""
        if entry is None:
            return None
        top = {self._text(token_id): _number(logprob) for token_id, logprob in entry.top[: self._num_top]}
        top.setdefault(self._text(entry.token_id), _number(entry.logprob))
        return top

    def prompt(self, entries: Sequence[TokenLogprobs | None]) -> list[dict[str, Any] | None]:
        """Return `prompt_logprobs` of a choice: for each token the ids with their log-probabilities and ranks."""
        return [None if entry is None else self._prompt_entry(entry) for entry in entries]

    def _prompt_entry(self, entry: TokenLogprobs) -> dict[str, Any]:
        shown = {
            str(token_id): self._ranked(token_id, logprob, rank)
            for rank, (token_id, logprob) in enumerate(entry.top, start=1)
        }
        shown.setdefault(str(entry.token_id), self._ranked(entry.token_id, entry.logprob, None))
        return shown

    def _ranked(self, token_id: int, logprob: float, rank: int | None) -> dict[str, Any]:
        text = None if self._all_texts is None else self._all_texts.text(token_id)
        return {"logprob": _number(logprob), "rank": rank, "decoded_token": text}

    def _text(self, token_id: int) -> str:
        return f"token_id:{token_id}" if self._texts is None else self._texts.text(token_id)


def _number(logprob: float) -> float:
    return max(logprob, _LEAST)
