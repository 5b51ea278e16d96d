"""What was asked of a request's prompt, and its way to the reader: with the first delta, and with the completion."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

from .completion import Delta, TokenLogprobs
from .errors import Error
from .events import ContextEvent, Logits
from .sampling import SamplingParams
from .sequence import rows_of

Sink = Callable[["Delta | Error"], None]


class PromptOutput:
    """Stands before a request's sink. Called by one thread at a time, the one that routes events.

    Knows neither the request nor its sequences, which hold it: what a cycle holds is freed late, and logits are large.
    """

    def __init__(self, params: SamplingParams, sink: Sink) -> None:
        self._params = params
        self._sink = sink
        self._is_told = params.prompt_logprobs is None and not params.return_context_logits
        self._logprobs: list[TokenLogprobs | None] = [None]
        self._rows: list[Logits] = []
        self._logits: Logits | None = None

    def on_context(self, event: ContextEvent) -> None:
        """Take what the model says of one position of the prompt; they all come before the first token."""
        if self._params.prompt_logprobs is not None and event.token_id >= 0:
            top = event.top[: self._params.prompt_logprobs]
            self._logprobs.append(TokenLogprobs(event.token_id, event.logprob, top))
        if event.logits is not None:
            self._rows.append(event.logits)

    def give(self, item: Delta | Error) -> None:
        """Give the sink a delta or the error; the first delta of output 0 gets what was asked of the prompt."""
        if not self._is_told and isinstance(item, Delta) and item.index == 0:
            self._is_told = True
            item = dataclasses.replace(
                item, prompt_logprobs=self.prompt_logprobs(), context_logits=self.context_logits()
            )
        self._sink(item)

    def prompt_logprobs(self) -> tuple[TokenLogprobs | None, ...] | None:
        """Return Completion.prompt_logprobs."""
        return None if self._params.prompt_logprobs is None else tuple(self._logprobs)

    def context_logits(self) -> Logits | None:
        """Return Completion.context_logits, the same array each time."""
        if self._logits is None and self._params.return_context_logits:
            self._logits = rows_of(self._rows)
            self._rows.clear()
        return self._logits
