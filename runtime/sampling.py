"""How a request samples and when it ends, under the names users of vLLM and TensorRT-LLM know."""

from __future__ import annotations

import dataclasses
import math
import os
from collections.abc import Callable, Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from .checks import check_bool, check_float, check_int, check_key, entries, is_finite, plain
from .errors import InvalidArgumentError
from .guided import GuidedParams

MAX_LOGPROBS = 20
MAX_SEQUENCES = 1024  # of one request
DEFAULT_RETENTION = 35  # priority of a cached block: 0 goes first, 100 last

LogitsProcessor = Callable[[NDArray[np.int32], NDArray[np.float32]], None]
"""Called as (token_ids, logits): prompt and output so far, (n,) int32, read only, and the (V,) float32 logits of the
next token, to be changed in place. Both are valid during the call only. It runs on the engine's thread, which waits for
it, and must depend on its arguments alone: with speculation it is also asked about tokens that are then refused."""


@dataclasses.dataclass(frozen=True)
class RetentionRange:
    """How long what a part of the prompt left in the KV cache is worth keeping.

    start, end : tokens [start, end); end None = the prompt's end
    priority : 0 is evicted first, 100 last
    duration_ms : then the default priority again; None = for ever
    """

    start: int
    end: int | None
    priority: int
    duration_ms: int | None = None

    def __post_init__(self) -> None:
        """Take numpy's numbers too."""
        _make_plain(self)


@dataclasses.dataclass(frozen=True)
class SamplingParams:
    """Parameters of one request. Checked when made; `dataclasses.replace` makes a changed copy.

    Numpy's numbers are taken for Python's, and arrays for lists.

    max_tokens : most tokens to generate, >= 1; None = as many as the engine's max_seq_len leaves
    min_tokens : end ids, stop strings and stop words are ignored before this many
    temperature : 0 = greedy, else > 0
    top_k : sample from the k likeliest; 0 = all
    top_p : sample from the likeliest whose probabilities reach top_p, in (0, 1]
    top_p_decay, top_p_min, top_p_reset_id : after each token top_p becomes max(top_p * top_p_decay, top_p_min), and
        after the token top_p_reset_id it is as at the beginning; decay in (0, 1], min in [0, 1], None = no such token
    min_p : least probability relative to the likeliest, in [0, 1]
    repetition_penalty : > 0, over prompt and output; 1 = none
    presence_penalty, frequency_penalty : over the output; 0 = none
    seed : 0 .. 2**64 - 1; None = a new one from the operating system for each request
    stop : strings that end generation; the text is cut before them
    stop_token_ids : ids that end generation, besides the model's own end ids
    stop_words : id sequences that end generation when the output ends with one, which stays in the output
    bad_words : strings or id sequences that must not be generated
    no_repeat_ngram_size : no so many tokens come twice in prompt and output; 0 = off
    logit_bias : added to the logits, by token id; -inf forbids a token
    logprobs : None = none; n = the log-probability of each chosen token and of the n likeliest, n <= 20
    priority : 0..1, higher runs first
    timeout_ms : ends the request after so long, with what it has; None = never
    ignore_eos : go on behind the model's own end ids
    detokenize : make text; False saves the time where ids are enough
    skip_special_tokens : leave special tokens out of the text

    n : outputs, each drawn by itself (output i with seed + i); the prompt is computed once
    best_of : so many are drawn, the n of the best cumulative log-probability returned; None = n
    beam_width : beam search when above 1: the beams come at the end, best first, as outputs. Nothing is drawn
    length_penalty : a beam's score = cumulative log-probability / output length ** length_penalty
    early_stopping : of beams, as in transformers: False, True or "never"
    beam_search_diversity_rate : taken from a candidate's score for each better one of the same beam

    prompt_logprobs : as logprobs, of the prompt's tokens; the prompt is then computed whole, cached or not
    return_context_logits, return_generation_logits : the model's own logits of the prompt and of the output
    logits_processor : changes the logits of each token before anything else does, see LogitsProcessor
    guided : what the text must be: a JSON schema, a regular expression, a grammar or a choice

    adapter : the LoRA adapter, by the name or the id that load_adapter gave; None = the model alone
    cache_salt : only requests of the same salt share cached prefixes; None = one for all
    retention : how long parts of the prompt are kept in the cache, RetentionRange's in ascending order
    decode_retention_priority, decode_retention_duration_ms : likewise of generated tokens
    tenant : whose share of the engine's slots it counts in; None = one for all
    max_draft_len : most draft tokens at a time, at most the engine's; 0 = no speculation; None = the engine's
    draft_token_ids : what the output may begin with, verified like drafts, whatever the engine's speculation is: as
        long as they are right, many come in one step, and no token changes. max_draft_len does not bound them
    """

    max_tokens: int | None = 16
    min_tokens: int = 0
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    top_p_decay: float = 1.0
    top_p_min: float = 0.0
    top_p_reset_id: int | None = None
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    seed: int | None = None
    stop: str | Sequence[str] = ()
    stop_token_ids: Sequence[int] = ()
    stop_words: Sequence[Sequence[int]] = ()
    bad_words: Sequence[str | Sequence[int]] = ()
    no_repeat_ngram_size: int = 0
    logit_bias: Mapping[int, float] = dataclasses.field(default_factory=dict)
    logprobs: int | None = None
    priority: float = 0.5
    timeout_ms: int | None = None
    ignore_eos: bool = False
    detokenize: bool = True
    skip_special_tokens: bool = True

    n: int = 1
    best_of: int | None = None
    beam_width: int = 1
    length_penalty: float = 1.0
    early_stopping: bool | str = False
    beam_search_diversity_rate: float = 0.0

    prompt_logprobs: int | None = None
    return_context_logits: bool = False
    return_generation_logits: bool = False
    logits_processor: LogitsProcessor | None = None
    guided: GuidedParams | None = None

    adapter: str | int | None = None
    cache_salt: str | int | None = None
    retention: Sequence[RetentionRange] = ()
    decode_retention_priority: int = DEFAULT_RETENTION
    decode_retention_duration_ms: int | None = None
    tenant: str | int | None = None
    max_draft_len: int | None = None
    draft_token_ids: Sequence[int] = ()

    def __post_init__(self) -> None:
        """Raise InvalidArgumentError naming the parameter, what it got and what it can be."""
        _make_plain(self)
        stop = self.stop if isinstance(self.stop, str) else tuple(entries("stop", self.stop))
        object.__setattr__(self, "stop", stop)  # a copy: the caller's list may change
        self._check_lengths()
        self._check_distribution()
        self._check_words()
        self._check_switches()
        self._check_sequences()
        self._check_beams()
        self._check_cache()
        self._check_callables()

    def seed_or_random(self) -> int:
        """Return the seed; when none was given and the request samples, one from the operating system."""
        if self.seed is not None:
            return self.seed
        return 0 if self.greedy else int.from_bytes(os.urandom(8), "little")

    @property
    def greedy(self) -> bool:
        """Whether the likeliest token is always taken."""
        return self.temperature == 0 or self.top_k == 1

    @property
    def num_sequences(self) -> int:
        """How many outputs the core makes: best_of, or n."""
        return self.n if self.best_of is None else self.best_of

    @property
    def is_ranked(self) -> bool:
        """Whether the outputs are chosen and ordered by log-probability, so that they come at the end."""
        return self.num_sequences > self.n or self.beam_width > 1

    @property
    def num_outputs(self) -> int:
        """How many outputs the completion has at most: n, or the beams."""
        return max(self.n, self.beam_width)

    @property
    def stop_strings(self) -> tuple[str, ...]:
        """`stop` as a tuple."""
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop)

    def _check_lengths(self) -> None:
        if self.max_tokens is not None:
            check_int("max_tokens", self.max_tokens, 1, 2**31 - 1)
        check_int("min_tokens", self.min_tokens, 0, 2**31 - 1)
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise InvalidArgumentError(
                f"min_tokens is {self.min_tokens}, more than max_tokens {self.max_tokens}; lower one or raise the other"
            )
        if self.timeout_ms is not None:
            check_int("timeout_ms", self.timeout_ms, 1, 2**31 - 1)
        if self.seed is not None:
            check_int("seed", self.seed, 0, 2**64 - 1)
        if self.logprobs is not None:
            check_int("logprobs", self.logprobs, 0, MAX_LOGPROBS)

    def _check_distribution(self) -> None:
        check_float("temperature", self.temperature, 0.0, math.inf)
        check_int("top_k", self.top_k, 0, 2**31 - 1)
        check_float("top_p", self.top_p, 0.0, 1.0, above=True)
        check_float("top_p_decay", self.top_p_decay, 0.0, 1.0, above=True)
        check_float("top_p_min", self.top_p_min, 0.0, 1.0)
        if self.top_p_reset_id is not None:
            check_int("top_p_reset_id", self.top_p_reset_id, 0, 2**31 - 1)
        check_float("min_p", self.min_p, 0.0, 1.0)
        check_float("repetition_penalty", self.repetition_penalty, 0.0, math.inf, above=True)
        check_float("presence_penalty", self.presence_penalty, -math.inf, math.inf)
        check_float("frequency_penalty", self.frequency_penalty, -math.inf, math.inf)
        check_float("priority", self.priority, 0.0, 1.0)

    def _check_words(self) -> None:
        for text in self.stop_strings:
            if not isinstance(text, str) or not text:
                raise InvalidArgumentError(f"stop has {text!r}, every entry must be a non-empty string")
        for name, words in (("stop_words", self.stop_words), ("bad_words", self.bad_words)):
            for word in entries(name, words):
                if not (isinstance(word, str) and name == "bad_words"):
                    for token in entries(name, word):
                        check_int(name, token, 0, 2**31 - 1)
                if len(word) == 0:
                    raise InvalidArgumentError(f"{name} has an empty entry; leave it out")
        for name in ("stop_token_ids", "draft_token_ids"):
            for token in entries(name, getattr(self, name)):
                check_int(name, token, 0, 2**31 - 1)
        check_int("no_repeat_ngram_size", self.no_repeat_ngram_size, 0, 2**31 - 1)
        if not isinstance(self.logit_bias, Mapping):
            raise InvalidArgumentError(f"logit_bias is {self.logit_bias!r}, it must map token ids to numbers")
        for token, bias in self.logit_bias.items():
            check_int("logit_bias", token, 0, 2**31 - 1)
            if not is_finite(bias) and bias != -math.inf:
                raise InvalidArgumentError(
                    f"logit_bias of token {token} is {bias!r}, it must be a number (or -inf)"
                )

    def _check_switches(self) -> None:
        for name in (
            "ignore_eos",
            "detokenize",
            "skip_special_tokens",
            "return_context_logits",
            "return_generation_logits",
        ):
            check_bool(name, getattr(self, name))

    def _check_sequences(self) -> None:
        check_int("n", self.n, 1, MAX_SEQUENCES)
        if self.best_of is not None:
            check_int("best_of", self.best_of, 1, MAX_SEQUENCES)
            if self.best_of < self.n:
                raise InvalidArgumentError(
                    f"best_of is {self.best_of}, fewer than n {self.n}; raise it, or leave it out"
                )
            if self.best_of > self.n and self.greedy:
                raise InvalidArgumentError(
                    f"best_of is {self.best_of}, but with temperature 0 or top_k 1 all outputs are the same; "
                    "raise temperature, or leave it out"
                )
        if self.prompt_logprobs is not None:
            check_int("prompt_logprobs", self.prompt_logprobs, 0, MAX_LOGPROBS)
        if self.max_draft_len is not None:
            check_int("max_draft_len", self.max_draft_len, 0, 2**31 - 1)

    def _check_beams(self) -> None:
        check_int("beam_width", self.beam_width, 1, MAX_SEQUENCES)
        check_float("length_penalty", self.length_penalty, -math.inf, math.inf)
        check_float("beam_search_diversity_rate", self.beam_search_diversity_rate, 0.0, math.inf)
        if not isinstance(self.early_stopping, bool) and self.early_stopping != "never":
            raise InvalidArgumentError(
                f'early_stopping is {self.early_stopping!r}, it must be False, True or "never"'
            )
        rules = {
            "n (ask for a wider beam_width instead)": self.num_sequences > 1,
            "temperature (beams do not sample; leave it 0 or 1)": self.temperature not in (0, 1),
            "top_k (beams do not sample; leave it 0)": self.top_k > 1,
            "top_p (beams do not sample; leave it 1)": self.top_p != 1,
            "top_p_decay (beams do not sample; leave it 1)": self.top_p_decay != 1,
            "min_p (beams do not sample; leave it 0)": self.min_p != 0,
            "guided (use n and best_of with it)": self.guided is not None,
            "max_draft_len (beams are not drafted for; leave it out)": bool(self.max_draft_len),
            "draft_token_ids (beams are not drafted for; leave them out)": len(self.draft_token_ids) > 0,
            "prompt_logprobs (leave it out)": self.prompt_logprobs is not None,
            "return_context_logits (leave it out)": self.return_context_logits,
            "return_generation_logits (leave it out)": self.return_generation_logits,
        }
        for what, wrong in rules.items():
            if self.beam_width > 1 and wrong:
                raise InvalidArgumentError(f"beam_width {self.beam_width} does not go with {what}")

    def _check_cache(self) -> None:
        for name in ("adapter", "cache_salt", "tenant"):
            if getattr(self, name) is not None:
                check_key(name, getattr(self, name))
        check_int("decode_retention_priority", self.decode_retention_priority, 0, 100)
        if self.decode_retention_duration_ms is not None:
            check_int("decode_retention_duration_ms", self.decode_retention_duration_ms, 0, 2**31 - 1)
        before = 0
        for part in entries("retention", self.retention):
            if not isinstance(part, RetentionRange):
                raise InvalidArgumentError(f"retention has {part!r}, every entry must be a RetentionRange")
            check_int("the start of a retention range", part.start, 0, 2**31 - 1)
            if part.end is not None:
                check_int("the end of a retention range", part.end, part.start + 1, 2**31 - 1)
            if part.start < before:
                raise InvalidArgumentError(
                    f"retention has a range that begins at {part.start}, inside the one before it; give ranges in "
                    "ascending order that do not overlap"
                )
            check_int("the priority of a retention range", part.priority, 0, 100)
            if part.duration_ms is not None:
                check_int("the duration_ms of a retention range", part.duration_ms, 0, 2**31 - 1)
            before = 2**31 if part.end is None else part.end

    def _check_callables(self) -> None:
        if self.logits_processor is not None and not callable(self.logits_processor):
            raise InvalidArgumentError(
                f"logits_processor is {self.logits_processor!r}, it must be a function of (token_ids, logits)"
            )
        if self.guided is not None and not isinstance(self.guided, GuidedParams):
            raise InvalidArgumentError(f"guided is {self.guided!r}, it must be GuidedParams")
        if self.guided is not None and self.ignore_eos:
            raise InvalidArgumentError(
                "guided does not go with ignore_eos: a grammar's end is an end token; leave one of them out"
            )


def _make_plain(params: RetentionRange | SamplingParams) -> None:
    """Replace what is numpy's in the fields of a frozen dataclass; lists become tuples, the caller's own may change."""
    for field in dataclasses.fields(params):
        object.__setattr__(params, field.name, plain(getattr(params, field.name)))
