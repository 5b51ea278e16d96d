"""What a request gives: deltas while it runs, a completion at the end."""

from __future__ import annotations

import dataclasses

from .events import Logits
from .stats import RequestStats


@dataclasses.dataclass(frozen=True)
class TokenLogprobs:
    """Natural logs of the model's own probabilities: the token's, and the likeliest ones' (best first)."""

    token_id: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()


@dataclasses.dataclass(frozen=True)
class Delta:
    """What is new in one of a request's outputs. Its last one has a finish_reason, a stop_reason if any, and stats.

    text : new text; "" while a character or a possible stop string is incomplete
    token_ids : new tokens
    finish_reason : None, or "stop", "length", "timeout", "cancelled"
    stop_reason : the stop string or the token of stop_token_ids that ended it
    stats : of the output; None also where it ended by a stop string while others of its request run on
    index : which output, from 0
    is_final : no more deltas of the whole request
    request_id : of the whole request: RequestHandle.request_id, what Engine.cancel takes

    generation_logits : (tokens, V) float32, the rows that its tokens were drawn from; None unless asked for
    prompt_logprobs, context_logits : those of Completion, where they were asked for: in the first delta of output 0
    completion : of the final delta: the whole request
    """

    text: str = ""
    token_ids: tuple[int, ...] = ()
    logprobs: tuple[TokenLogprobs, ...] | None = None
    finish_reason: str | None = None
    stop_reason: str | int | None = None
    stats: RequestStats | None = None
    index: int = 0
    is_final: bool = False
    request_id: int = dataclasses.field(default=0, compare=False)
    generation_logits: Logits | None = dataclasses.field(default=None, compare=False, repr=False)
    prompt_logprobs: tuple[TokenLogprobs | None, ...] | None = dataclasses.field(
        default=None, compare=False, repr=False
    )
    context_logits: Logits | None = dataclasses.field(default=None, compare=False, repr=False)
    completion: Completion | None = dataclasses.field(default=None, compare=False, repr=False)


@dataclasses.dataclass(frozen=True)
class SequenceOutput:
    """One whole output of a request; the fields are those of Delta, summed.

    cumulative_logprob : the sum over its tokens; None unless logprobs, best_of or beams ask for it
    generation_logits : (tokens, V) float32, the rows that the tokens were drawn from; None unless asked for
    """

    index: int
    text: str
    token_ids: tuple[int, ...]
    finish_reason: str
    stop_reason: str | int | None
    logprobs: tuple[TokenLogprobs, ...] | None
    cumulative_logprob: float | None
    stats: RequestStats
    generation_logits: Logits | None = dataclasses.field(default=None, compare=False, repr=False)


@dataclasses.dataclass(frozen=True)
class Completion:
    """A finished request: its outputs in order (of best_of and beams the best first), and what was asked of the prompt.

    The fields of an output are also here, where they are the first one's.

    stats : of the whole request, its outputs together
    prompt_logprobs : one a token of the prompt, None for the first, which follows nothing; None unless asked for
    context_logits : (prompt tokens, V) float32, row i the logits behind token i; None unless asked for
    """

    prompt_ids: tuple[int, ...]
    outputs: tuple[SequenceOutput, ...]
    stats: RequestStats
    prompt_logprobs: tuple[TokenLogprobs | None, ...] | None = None
    context_logits: Logits | None = dataclasses.field(default=None, compare=False, repr=False)

    @property
    def text(self) -> str:
        """The first output's."""
        return self.outputs[0].text

    @property
    def token_ids(self) -> tuple[int, ...]:
        """The first output's."""
        return self.outputs[0].token_ids

    @property
    def finish_reason(self) -> str:
        """The first output's."""
        return self.outputs[0].finish_reason

    @property
    def stop_reason(self) -> str | int | None:
        """The first output's."""
        return self.outputs[0].stop_reason

    @property
    def logprobs(self) -> tuple[TokenLogprobs, ...] | None:
        """The first output's."""
        return self.outputs[0].logprobs

    @property
    def cumulative_logprob(self) -> float | None:
        """The first output's."""
        return self.outputs[0].cumulative_logprob

    @property
    def generation_logits(self) -> Logits | None:
        """The first output's."""
        return self.outputs[0].generation_logits

    @property
    def usage(self) -> dict[str, int]:
        """Token counts under the OpenAI API's names, over all outputs."""
        prompt, output = len(self.prompt_ids), sum(len(one.token_ids) for one in self.outputs)
        return {"prompt_tokens": prompt, "completion_tokens": output, "total_tokens": prompt + output}
