"""One output on its way: tokens in, text deltas and a whole output out."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence

import numpy as np

from .completion import Delta, SequenceOutput, TokenLogprobs
from .detokenizer import Detokenizer
from .events import EndEvent, Logits, TokenEvent
from .sampling import SamplingParams
from .stop_strings import StopStrings

# finish_reason of the C API -> the words users of the OpenAI API know.
_FINISH_END_ID = 1
_FINISH_REASONS = {1: "stop", 2: "stop", 3: "length", 4: "timeout", 5: "cancelled"}


class SequenceState:
    """Turns the events of one sequence into deltas. Called by one thread at a time.

    detokenizer : None = no text
    emit : gets each delta but the last, which `finish` returns
    """

    def __init__(
        self,
        index: int,
        params: SamplingParams,
        end_ids: frozenset[int],
        detokenizer: Detokenizer | None,
        emit: Callable[[Delta], None],
    ) -> None:
        self.index = index
        self._params = params
        self._end_ids = end_ids
        self._detokenizer = detokenizer
        self._stop = StopStrings(params.stop_strings)
        self._emit_delta = emit
        self._held: TokenEvent | None = None  # an end id, which is not text if it ends the sequence
        self._tokens: list[int] = []
        self._texts: list[str] = []
        self._logprobs: list[TokenLogprobs] = []
        self._logits: list[Logits] = []
        self._request_id = 0
        self.cum_logprob = 0.0
        self.output: SequenceOutput | None = None

    @property
    def stopped(self) -> bool:
        """Whether a stop string is complete: no token counts any more."""
        return self._stop.matched is not None

    def on_token(self, event: TokenEvent) -> None:
        """Take one token; `stopped` may be true afterwards."""
        if self.stopped:
            return  # a step may have been under way when the stop string was found
        if self._held is not None:
            held, self._held = self._held, None
            self._emit(held, as_text=True)
        if self.stopped:
            return
        if event.token_id in self._end_ids:
            self._held = event
        else:
            self._emit(event, as_text=True)

    def finish(self, event: EndEvent) -> Delta:
        """Take the last event and return the last delta; `output` is there afterwards."""
        if self._held is not None:
            self._emit(self._held, as_text=event.finish_reason != _FINISH_END_ID)
        text = self._flush()
        self._texts.append(text)
        reason, stop_reason = self._reasons(event)
        wants_sum = self._params.logprobs is not None or self._params.is_ranked
        self.output = SequenceOutput(
            index=self.index,
            text="".join(self._texts),
            token_ids=tuple(self._tokens),
            finish_reason=reason,
            stop_reason=stop_reason,
            logprobs=None if self._params.logprobs is None else tuple(self._logprobs),
            cumulative_logprob=self.cum_logprob if wants_sum else None,
            stats=event.stats,
            generation_logits=rows_of(self._logits) if self._params.return_generation_logits else None,
        )
        return Delta(
            text=text,
            finish_reason=reason,
            stop_reason=stop_reason,
            stats=event.stats,
            index=self.index,
            request_id=event.request_id,
        )

    def stop_delta(self) -> Delta:
        """Return the last delta of a sequence that a stop string ended, ahead of its last event."""
        return Delta(
            finish_reason="stop",
            stop_reason=self._stop.matched,
            index=self.index,
            request_id=self._request_id,
        )

    def renumber(self, index: int) -> SequenceOutput:
        """Return the output under another index."""
        assert self.output is not None
        return dataclasses.replace(self.output, index=index)

    def _emit(self, event: TokenEvent, *, as_text: bool) -> None:
        self._tokens.append(event.token_id)
        self.cum_logprob = event.cum_logprob
        text = ""
        if as_text and self._detokenizer is not None:
            text = self._detokenizer.push(event.token_id)
            if len(self._tokens) > self._params.min_tokens:
                text = self._stop.push(text)
        self._texts.append(text)
        logprobs = None
        if self._params.logprobs is not None:
            entry = TokenLogprobs(event.token_id, event.logprob, event.top[: self._params.logprobs])
            self._logprobs.append(entry)
            logprobs = (entry,)
        if event.logits is not None:
            self._logits.append(event.logits)
        self._request_id = event.request_id
        delta = Delta(
            text,
            (event.token_id,),
            logprobs,
            index=self.index,
            request_id=event.request_id,
            generation_logits=None if event.logits is None else event.logits[None],
        )
        self._emit_delta(delta)

    def _flush(self) -> str:
        if self._detokenizer is None or self.stopped:
            return ""
        text = self._stop.push(self._detokenizer.flush())
        return text if self.stopped else text + self._stop.flush()

    def _reasons(self, event: EndEvent) -> tuple[str, str | int | None]:
        if self._stop.matched is not None:
            return "stop", self._stop.matched
        if event.finish_reason == _FINISH_END_ID and self._tokens[-1] in self._params.stop_token_ids:
            return "stop", self._tokens[-1]
        return _FINISH_REASONS.get(event.finish_reason, "stop"), None


def rows_of(logits: Sequence[Logits]) -> Logits:
    """Return rows of logits as one (rows, V) float32 array; (0, 0) without any, of a request that ended before."""
    return np.stack(logits) if logits else np.empty((0, 0), np.float32)
