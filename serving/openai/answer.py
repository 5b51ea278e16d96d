"""What answers have in common: ids, usage, headers."""

from __future__ import annotations

import dataclasses
import time
import uuid
from collections.abc import Mapping, Sequence
from typing import Any

from ...runtime.completion import Completion, Delta
from .context import Context
from .prompts import Prompt
from .protocol import SamplingFields, unknown_fields

PREFIX_HEADER = "x-plansmith-prefix-hash"
IGNORED_HEADER = "x-plansmith-ignored-fields"


@dataclasses.dataclass(frozen=True)
class Head:
    """The fields that every chunk of an answer repeats."""

    id: str
    kind: str
    created: int
    model: str

    def chunk(self, choices: Sequence[Mapping[str, Any]], **more: Any) -> dict[str, Any]:
        """Return an answer, or a part of it, with its choices."""
        return {
            "id": self.id,
            "object": self.kind,
            "created": self.created,
            "model": self.model,
            "choices": list(choices),
            **more,
        }


def make_head(prefix: str, kind: str, model: str) -> Head:
    """Return a new answer's head. prefix : of its id, "cmpl" or "chatcmpl"."""
    return Head(f"{prefix}-{uuid.uuid4().hex}", kind, int(time.time()), model)


def headers_of(
    ctx: Context, body: SamplingFields, prompt: Prompt, adapter: str | None, salt: str | None
) -> dict[str, str]:
    """Return the headers that tell a gateway the prompt's prefix, and a client which fields were ignored."""
    headers = {}
    if value := ctx.prefixes.header(prompt.ids, adapter, salt):
        headers[PREFIX_HEADER] = value
    if names := unknown_fields(body):
        headers[IGNORED_HEADER] = ",".join(names)
    return headers


def usage_of(completions: Sequence[Completion], num_output_tokens: int | None = None) -> dict[str, Any]:
    """Return token counts over all prompts. num_output_tokens : where not all that was generated is shown."""
    usage = Usage()
    for completion in completions:
        usage.add_prompt(len(completion.prompt_ids), _cached(completion))
        usage.completion_tokens += completion.usage["completion_tokens"]
    if num_output_tokens is not None:
        usage.completion_tokens = num_output_tokens
    return usage.as_dict()


@dataclasses.dataclass
class Usage:
    """Token counts as they grow."""

    prompt_tokens: int = 0
    cached_tokens: int = 0
    completion_tokens: int = 0

    def add_prompt(self, num_tokens: int, num_cached: int) -> None:
        """Count a prompt."""
        self.prompt_tokens += num_tokens
        self.cached_tokens += num_cached

    def add(self, delta: Delta) -> None:
        """Count what a delta brings."""
        self.completion_tokens += len(delta.token_ids)
        if delta.is_final and delta.completion is not None:
            self.cached_tokens += _cached(delta.completion)

    def as_dict(self) -> dict[str, Any]:
        """Return the JSON of an answer's usage."""
        return {
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": self.completion_tokens,
            "total_tokens": self.prompt_tokens + self.completion_tokens,
            "prompt_tokens_details": {"cached_tokens": self.cached_tokens},
        }


def _cached(completion: Completion) -> int:
    """Return how many of the prompt's tokens were cached; each of several outputs counts them for itself."""
    return min(completion.stats.reused_tokens // len(completion.outputs), len(completion.prompt_ids))
