"""How a request samples and when it ends, under the names users of vLLM and TensorRT-LLM know."""

from __future__ import annotations

import dataclasses
import math
import os
from collections.abc import Mapping, Sequence
from typing import Any

from .errors import InvalidArgumentError

MAX_LOGPROBS = 20
_FLOAT32_MAX = (2 - 2**-23) * 2**127


@dataclasses.dataclass(frozen=True)
class SamplingParams:
    """Parameters of one request. Checked when made; `dataclasses.replace` makes a changed copy.

    max_tokens : most tokens to generate, >= 1; None = as many as the engine's max_seq_len leaves
    min_tokens : end ids and stop strings are ignored before this many
    temperature : 0 = greedy, else > 0
    top_k : sample from the k likeliest; 0 = all
    top_p : sample from the likeliest whose probabilities reach top_p, in (0, 1]
    min_p : least probability relative to the likeliest, in [0, 1]
    repetition_penalty : > 0, over prompt and output; 1 = none
    presence_penalty, frequency_penalty : over the output; 0 = none
    seed : 0 .. 2**64 - 1; None = a new one from the operating system for each request
    stop : strings that end generation; the text is cut before them
    stop_token_ids : ids that end generation, besides the model's own end ids
    bad_words : strings or id sequences that must not be generated
    logit_bias : added to the logits, by token id; -inf forbids a token
    logprobs : None = none; n = the log-probability of each chosen token and of the n likeliest, n <= 20
    priority : 0..1, higher runs first
    timeout_ms : ends the request after so long, with what it has; None = never
    ignore_eos : go on behind the model's own end ids
    detokenize : make text; False saves the time where ids are enough
    skip_special_tokens : leave special tokens out of the text
    """

    max_tokens: int | None = 16
    min_tokens: int = 0
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    seed: int | None = None
    stop: str | Sequence[str] = ()
    stop_token_ids: Sequence[int] = ()
    bad_words: Sequence[str | Sequence[int]] = ()
    logit_bias: Mapping[int, float] = dataclasses.field(default_factory=dict)
    logprobs: int | None = None
    priority: float = 0.5
    timeout_ms: int | None = None
    ignore_eos: bool = False
    detokenize: bool = True
    skip_special_tokens: bool = True

    def __post_init__(self) -> None:
        """Raise InvalidArgumentError naming the parameter, what it got and what it can be."""
        stop = self.stop if isinstance(self.stop, str) else tuple(_entries("stop", self.stop))
        object.__setattr__(self, "stop", stop)  # a copy: the caller's list may change
        self._check_lengths()
        self._check_distribution()
        self._check_sequences()
        self._check_switches()

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
    def stop_strings(self) -> tuple[str, ...]:
        """`stop` as a tuple."""
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop)

    def _check_lengths(self) -> None:
        if self.max_tokens is not None:
            _check_int("max_tokens", self.max_tokens, 1, 2**31 - 1)
        _check_int("min_tokens", self.min_tokens, 0, 2**31 - 1)
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise InvalidArgumentError(
                f"min_tokens is {self.min_tokens}, more than max_tokens {self.max_tokens}; lower one or raise the other"
            )
        if self.timeout_ms is not None:
            _check_int("timeout_ms", self.timeout_ms, 1, 2**31 - 1)
        if self.seed is not None:
            _check_int("seed", self.seed, 0, 2**64 - 1)
        if self.logprobs is not None:
            _check_int("logprobs", self.logprobs, 0, MAX_LOGPROBS)

    def _check_distribution(self) -> None:
        _check_float("temperature", self.temperature, 0.0, math.inf)
        _check_int("top_k", self.top_k, 0, 2**31 - 1)
        _check_float("top_p", self.top_p, 0.0, 1.0, above=True)
        _check_float("min_p", self.min_p, 0.0, 1.0)
        _check_float("repetition_penalty", self.repetition_penalty, 0.0, math.inf, above=True)
        _check_float("presence_penalty", self.presence_penalty, -math.inf, math.inf)
        _check_float("frequency_penalty", self.frequency_penalty, -math.inf, math.inf)
        _check_float("priority", self.priority, 0.0, 1.0)

    def _check_sequences(self) -> None:
        for text in self.stop_strings:
            if not isinstance(text, str) or not text:
                raise InvalidArgumentError(f"stop has {text!r}, every entry must be a non-empty string")
        for word in _entries("bad_words", self.bad_words):
            if not isinstance(word, str):
                for token in _entries("bad_words", word):
                    _check_int("bad_words", token, 0, 2**31 - 1)
            if len(word) == 0:
                raise InvalidArgumentError("bad_words has an empty entry; leave it out")
        for token in _entries("stop_token_ids", self.stop_token_ids):
            _check_int("stop_token_ids", token, 0, 2**31 - 1)
        if not isinstance(self.logit_bias, Mapping):
            raise InvalidArgumentError(f"logit_bias is {self.logit_bias!r}, it must map token ids to numbers")
        for token, bias in self.logit_bias.items():
            _check_int("logit_bias", token, 0, 2**31 - 1)
            if not _is_finite(bias) and bias != -math.inf:
                raise InvalidArgumentError(
                    f"logit_bias of token {token} is {bias!r}, it must be a number (or -inf)"
                )

    def _check_switches(self) -> None:
        for name in ("ignore_eos", "detokenize", "skip_special_tokens"):
            if not isinstance(getattr(self, name), bool):
                raise InvalidArgumentError(f"{name} is {getattr(self, name)!r}, it must be True or False")


def _entries(name: str, value: object) -> Sequence[Any]:
    """Return a list parameter; a string is a sequence too, but never what is meant."""
    if isinstance(value, str) or not isinstance(value, Sequence):
        raise InvalidArgumentError(f"{name} has {value!r}, it must be a list")
    return value


def _check_int(name: str, value: object, low: int, high: int) -> None:
    # bool is an int in Python; True as a token count is a caller's slip.
    if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
        raise InvalidArgumentError(f"{name} is {value!r}, it must be an integer between {low} and {high}")


def _is_finite(value: object) -> bool:
    """Return whether a value is a number that float32, the core's type, holds."""
    return isinstance(value, (int, float)) and not isinstance(value, bool) and abs(value) <= _FLOAT32_MAX


def _check_float(name: str, value: object, low: float, high: float, *, above: bool = False) -> None:
    if not _is_finite(value) or not low <= value <= high or (above and value == low):  # type: ignore[operator]
        bounds = f"{'above' if above else 'at least'} {low:g}" if low > -math.inf else "finite"
        bounds += f" and at most {high:g}" if high < math.inf else ""
        raise InvalidArgumentError(f"{name} is {value!r}, it must be a number, {bounds}")
