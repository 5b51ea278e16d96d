"""One request on its way: the events of its sequences in, deltas and a completion out."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence

from .completion import Completion, Delta, SequenceOutput, TokenLogprobs
from .detokenizer import Detokenizer
from .errors import Error
from .events import ContextEvent, EndEvent, TokenEvent
from .prompt_output import PromptOutput, Sink
from .sampling import SamplingParams
from .sequence import SequenceState
from .stats import RequestStats

__all__ = ["Completion", "Delta", "RequestState", "SequenceOutput", "Sink", "TokenLogprobs"]


class RequestState:
    """Turns a request's events into deltas. Called by one thread at a time, the one that routes events.

    detokenizer : makes one for each sequence; None = no text
    sink : gets each Delta, or the Error the request failed with, as the last thing

    Where outputs are chosen by their log-probability (best_of, beams) all deltas come at the end, one an output.
    """

    def __init__(
        self,
        prompt_ids: Sequence[int],
        params: SamplingParams,
        end_ids: Sequence[int],
        detokenizer: Callable[[], Detokenizer] | None,
        sink: Sink,
    ) -> None:
        self.request_id: int | None = None
        self.completion: Completion | None = None
        self.error: Error | None = None
        self._prompt_ids = tuple(prompt_ids)
        self._params = params
        self._prompt = PromptOutput(params, sink)
        emit = _keep if params.is_ranked else self._prompt.give
        self._sequences = [
            SequenceState(i, params, frozenset(end_ids), detokenizer and detokenizer(), emit)
            for i in range(max(params.num_sequences, params.beam_width))
        ]
        self._told: set[int] = set()  # sequences whose last delta is out, or kept in _last
        self._last: Delta | None = None  # kept back until it is known whether it is the request's last

    @property
    def done(self) -> bool:
        """Whether the completion or the error is there."""
        return self.completion is not None or self.error is not None

    def outcome(self) -> Completion:
        """Return the completion of a request that has ended; raises the Error it failed with."""
        if self.error is not None:
            raise self.error
        assert self.completion is not None
        return self.completion

    def on_token(self, event: TokenEvent) -> bool:
        """Take one token; True when nothing more is wanted of the request, which should then be cancelled."""
        sequence = self._sequences[event.sequence_idx]
        if self.done or sequence.stopped:
            return False  # a step may have been under way when the stop string was found
        sequence.on_token(event)
        if not sequence.stopped:
            return False
        if self._is_over():
            return True
        # The core cannot end one sequence of several: it runs on unseen, and its reader need not wait for that.
        if not self._params.is_ranked:
            self._told.add(sequence.index)
            self._prompt.give(sequence.stop_delta())
        return False

    def on_context(self, event: ContextEvent) -> None:
        """Take what the model says of one position of the prompt."""
        if self.done or event.sequence_idx != 0:
            return
        self._prompt.on_context(event)

    def on_end(self, event: EndEvent) -> bool:
        """Take the last event of a sequence and give the sink what is left; True as of on_token."""
        if self.done:
            return False
        sequence = self._sequences[event.sequence_idx]
        if event.error is not None and not sequence.stopped:  # an output that is whole cannot fail any more
            self.fail(event.error)
            return not event.is_final  # the others go with it
        delta = sequence.finish(event)
        if sequence.index not in self._told and not self._params.is_ranked:
            self._told.add(sequence.index)
            self._last = delta
        if event.is_final:
            self._complete(event.request_id)
            return False
        if self._is_over():
            return True
        if self._last is not None:
            self._prompt.give(self._last)
            self._last = None
        return False

    def fail(self, error: Error) -> None:
        """End the request with an error."""
        if not self.done:
            self.error = error
            self._prompt.give(error)

    def _is_over(self) -> bool:
        """Whether each sequence has ended in the core or by a stop string."""
        return all(one.stopped or one.output is not None for one in self._sequences)

    def _complete(self, request_id: int) -> None:
        outputs = self._outputs()
        self.completion = Completion(
            prompt_ids=self._prompt_ids,
            outputs=outputs,
            stats=RequestStats.of_sequences([one.output.stats for one in self._sequences if one.output]),
            prompt_logprobs=self._prompt.prompt_logprobs(),
            context_logits=self._prompt.context_logits(),
        )
        if self._params.is_ranked:
            deltas = [_whole_delta(one, request_id) for one in outputs]
        else:
            assert self._last is not None
            deltas = [self._last]
        for delta in deltas[:-1]:
            self._prompt.give(delta)
        self._prompt.give(dataclasses.replace(deltas[-1], is_final=True, completion=self.completion))

    def _outputs(self) -> tuple[SequenceOutput, ...]:
        ended = [one for one in self._sequences if one.output is not None]
        if self._params.num_sequences > self._params.n:
            ended = sorted(ended, key=_rank)[: self._params.n]
        return tuple(one.renumber(i) for i, one in enumerate(ended))


def _keep(_delta: Delta) -> None:
    """Emit nothing: the deltas come with the choice of outputs."""


def _rank(sequence: SequenceState) -> float:
    """Return the key that sorts the best first; one that was cancelled before its first token goes last."""
    assert sequence.output is not None
    return -sequence.cum_logprob if sequence.output.token_ids else math.inf


def _whole_delta(output: SequenceOutput, request_id: int) -> Delta:
    return Delta(
        text=output.text,
        token_ids=output.token_ids,
        logprobs=output.logprobs,
        finish_reason=output.finish_reason,
        stop_reason=output.stop_reason,
        stats=output.stats,
        index=output.index,
        request_id=request_id,
        generation_logits=output.generation_logits,
    )
