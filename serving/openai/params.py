"""A request's fields as SamplingParams."""

from __future__ import annotations

from typing import Any

from ...runtime.errors import InvalidArgumentError
from ...runtime.guided import GuidedParams
from ...runtime.sampling import MAX_LOGPROBS, SamplingParams
from .errors import bad_request, of_error
from .protocol import ChatBody, CompletionBody, SamplingFields

# Of OpenAI's legacy API; a chat goes on until the model ends it or its length does.
DEFAULT_COMPLETION_TOKENS = 16
_MOST_ENTRIES = {"stop": 64, "bad_words": 256, "stop_token_ids": 1024}
_SAME_NAMES = (
    "temperature",
    "top_p",
    "presence_penalty",
    "frequency_penalty",
    "top_k",
    "min_p",
    "repetition_penalty",
    "min_tokens",
    "ignore_eos",
    "stop",
    "stop_token_ids",
    "bad_words",
    "skip_special_tokens",
    "priority",
    "max_draft_len",
    "prompt_logprobs",
)


def completion_params(body: CompletionBody, guided: GuidedParams | None, **more: Any) -> SamplingParams:
    """Return the parameters of /v1/completions.

    more : fields that are the server's to say: adapter, cache_salt, tenant, timeout_ms
    """
    values = _common(body, guided)
    values["max_tokens"] = DEFAULT_COMPLETION_TOKENS if body.max_tokens is None else body.max_tokens
    if body.echo and body.max_tokens == 0:
        values["max_tokens"] = 1  # the prompt alone is asked for; what is generated is thrown away
    values["logprobs"] = body.logprobs
    if body.echo and body.logprobs is not None and body.prompt_logprobs is None:
        values["prompt_logprobs"] = body.logprobs
    return _make(values, more)


def chat_params(body: ChatBody, guided: GuidedParams | None, **more: Any) -> SamplingParams:
    """Return the parameters of /v1/chat/completions; more as in completion_params."""
    values = _common(body, guided)
    given = body.max_tokens if body.max_completion_tokens is None else body.max_completion_tokens
    values["max_tokens"] = given
    if body.top_logprobs is not None and not body.logprobs:
        raise bad_request("top_logprobs needs logprobs true; set it", "top_logprobs", "invalid_value")
    if body.logprobs:
        top = body.top_logprobs or 0
        if not 0 <= top <= MAX_LOGPROBS:
            raise bad_request(
                f"top_logprobs is {top}, it must be from 0 to {MAX_LOGPROBS}", "top_logprobs", "invalid_value"
            )
        values["logprobs"] = top
    return _make(values, more)


def outputs_wanted(body: SamplingFields) -> int:
    """Return how many choices a prompt gets."""
    return 1 if body.n is None else body.n


def _check_counts(body: SamplingFields) -> None:
    """Refuse lists that would cost every step: each token's text is compared with each stop string."""
    for name, most in _MOST_ENTRIES.items():
        value = getattr(body, name)
        if isinstance(value, list) and len(value) > most:
            raise bad_request(f"{name} has {len(value)} entries, the most is {most}", name, "invalid_value")


def _common(body: SamplingFields, guided: GuidedParams | None) -> dict[str, Any]:
    values = {name: value for name in _SAME_NAMES if (value := getattr(body, name)) is not None}
    values["guided"] = guided
    _check_counts(body)
    if values.get("top_k") == -1:
        values["top_k"] = 0  # vLLM's way to say all
    if body.seed is not None:
        values["seed"] = body.seed % 2**64  # OpenAI's are signed
    if body.logit_bias is not None:
        values["logit_bias"] = {_token_id(key): bias for key, bias in body.logit_bias.items()}
    if body.use_beam_search:
        width = values["beam_width"] = max(outputs_wanted(body), body.best_of or 1)
        if width == 1:
            values["temperature"] = 0.0  # the one best path is the greedy one, nothing is drawn
        for name in ("length_penalty", "early_stopping"):
            if getattr(body, name) is not None:
                values[name] = getattr(body, name)
    else:
        values["n"] = outputs_wanted(body)
        values["best_of"] = body.best_of
    return values


def _make(values: dict[str, Any], more: dict[str, Any]) -> SamplingParams:
    try:
        return SamplingParams(**values, **more)
    except InvalidArgumentError as error:
        raise of_error(error) from error


def _token_id(key: str) -> int:
    if not (key.isascii() and key.isdigit() and len(key) < 11):
        raise bad_request(f"logit_bias has the key {key[:40]!r}, it must be a token id", "logit_bias")
    return int(key)
