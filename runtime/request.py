"""One request on its way: tokens in, text deltas and a completion out."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence

from .detokenizer import Detokenizer
from .errors import Error
from .events import EndEvent, TokenEvent
from .sampling import SamplingParams
from .stats import RequestStats
from .stop_strings import StopStrings

# finish_reason of the C API -> the words users of the OpenAI API know.
_FINISH_END_ID, _FINISH_CANCELLED = 1, 5
_FINISH_REASONS = {1: "stop", 2: "stop", 3: "length", 4: "timeout", 5: "cancelled"}


@dataclasses.dataclass(frozen=True)
class TokenLogprobs:
    """Natural logs of the model's own probabilities: the chosen token's, and the likeliest ones' (best first)."""

    token_id: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()


@dataclasses.dataclass(frozen=True)
class Delta:
    """What is new in a request's output. The last one has a finish_reason, a stop_reason if any, and stats.

    text : new text; "" while a character or a possible stop string is incomplete
    token_ids : new tokens
    finish_reason : None, or "stop", "length", "timeout", "cancelled"
    stop_reason : the stop string or the token of stop_token_ids that ended it
    """

    text: str = ""
    token_ids: tuple[int, ...] = ()
    logprobs: tuple[TokenLogprobs, ...] | None = None
    finish_reason: str | None = None
    stop_reason: str | int | None = None
    stats: RequestStats | None = None


@dataclasses.dataclass(frozen=True)
class Completion:
    """A finished request's whole output; the fields are those of Delta, summed."""

    prompt_ids: tuple[int, ...]
    text: str
    token_ids: tuple[int, ...]
    finish_reason: str
    stop_reason: str | int | None
    logprobs: tuple[TokenLogprobs, ...] | None
    cumulative_logprob: float | None
    stats: RequestStats

    @property
    def usage(self) -> dict[str, int]:
        """Token counts under the OpenAI API's names."""
        prompt, output = len(self.prompt_ids), len(self.token_ids)
        return {"prompt_tokens": prompt, "completion_tokens": output, "total_tokens": prompt + output}


Sink = Callable[["Delta | Error"], None]


class RequestState:
    """Turns a request's events into deltas. Called by one thread at a time, the one that routes events.

    sink : gets each Delta, or the Error the request failed with, as the last thing
    detokenizer : None = no text
    """

    def __init__(
        self,
        prompt_ids: Sequence[int],
        params: SamplingParams,
        end_ids: Sequence[int],
        detokenizer: Detokenizer | None,
        sink: Sink,
    ) -> None:
        self.request_id: int | None = None
        self.completion: Completion | None = None
        self.error: Error | None = None
        self._prompt_ids = tuple(prompt_ids)
        self._params = params
        self._end_ids = frozenset(end_ids)
        self._detokenizer = detokenizer
        self._stop = StopStrings(params.stop_strings)
        self._sink = sink
        self._held: TokenEvent | None = None  # an end id, which is not text if it ends the request
        self._tokens: list[int] = []
        self._texts: list[str] = []
        self._logprobs: list[TokenLogprobs] = []
        self._cum_logprob = 0.0

    @property
    def done(self) -> bool:
        """Whether the completion or the error is there."""
        return self.completion is not None or self.error is not None

    def on_token(self, event: TokenEvent) -> bool:
        """Take one token; True when a stop string is complete, so that the request should be cancelled."""
        if self.done or self._stop.matched is not None:
            return False  # a step may have been under way when the stop string was found
        if self._held is not None:
            held, self._held = self._held, None
            self._emit(held, as_text=True)
        if self._stop.matched is not None:
            return True
        if event.token_id in self._end_ids:
            self._held = event
        else:
            self._emit(event, as_text=True)
        return self._stop.matched is not None

    def on_end(self, event: EndEvent) -> None:
        """Take the last event and give the sink what is left."""
        if self.done:
            return
        if event.error is not None:
            self.fail(event.error)
            return
        if self._held is not None:
            self._emit(self._held, as_text=event.finish_reason != _FINISH_END_ID)
        text = self._flush()
        self._texts.append(text)
        reason, stop_reason = self._reasons(event)
        self.completion = Completion(
            prompt_ids=self._prompt_ids,
            text="".join(self._texts),
            token_ids=tuple(self._tokens),
            finish_reason=reason,
            stop_reason=stop_reason,
            logprobs=None if self._params.logprobs is None else tuple(self._logprobs),
            cumulative_logprob=None if self._params.logprobs is None else self._cum_logprob,
            stats=event.stats,
        )
        self._sink(Delta(text=text, finish_reason=reason, stop_reason=stop_reason, stats=event.stats))

    def fail(self, error: Error) -> None:
        """End the request with an error."""
        if not self.done:
            self.error = error
            self._sink(error)

    def _emit(self, event: TokenEvent, *, as_text: bool) -> None:
        self._tokens.append(event.token_id)
        self._cum_logprob = event.cum_logprob
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
        self._sink(Delta(text, (event.token_id,), logprobs))

    def _flush(self) -> str:
        if self._detokenizer is None or self._stop.matched is not None:
            return ""
        text = self._stop.push(self._detokenizer.flush())
        return text if self._stop.matched is not None else text + self._stop.flush()

    def _reasons(self, event: EndEvent) -> tuple[str, str | int | None]:
        if self._stop.matched is not None:
            return "stop", self._stop.matched
        if event.finish_reason == _FINISH_END_ID and self._tokens[-1] in self._params.stop_token_ids:
            return "stop", self._tokens[-1]
        return _FINISH_REASONS.get(event.finish_reason, "stop"), None
