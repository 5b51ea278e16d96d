"""Prompts of the generate command: what a user wrote becomes token ids and SamplingParams."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from ..runtime.engine import Engine, RetentionRange, SamplingParams
from ..runtime.errors import Error, InvalidArgumentError
from ..runtime.guided import GuidedParams

# Without --max-tokens a request generates so many, or what the engine's max_seq_len leaves.
DEFAULT_MAX_TOKENS = 256
SOURCES = ("prompt", "messages", "prompt_ids")
# Names of other servers and data sets for a text to continue.
_PROMPT_ELSEWHERE = ("text_input", "text", "input", "inputs", "input_text")
# What a line cannot give, or would get nothing for.
_NOT_IN_LINES = {"detokenize", "logits_processor", "return_context_logits", "return_generation_logits"}
SAMPLING_FIELDS = frozenset(field.name for field in dataclasses.fields(SamplingParams)) - _NOT_IN_LINES


@dataclasses.dataclass(frozen=True)
class Prompt:
    """One request that is ready to be submitted.

    new_text : the answer to a conversation, not the continuation of a text
    """

    ids: list[int]
    params: SamplingParams
    new_text: bool


@dataclasses.dataclass(frozen=True)
class Line:
    """One line of an input file: a prompt, or the error it has. `tag` is the line's own "id"."""

    number: int
    prompt: Prompt | None = None
    error: Error | None = None
    tag: Any = None


class PromptMaker:
    """Makes prompts for one engine with the command's flags as defaults."""

    def __init__(
        self,
        engine: Engine,
        params: SamplingParams,
        *,
        raw: bool,
        system: str | None,
        template_variables: Mapping[str, Any] | None = None,
    ) -> None:
        self._engine = engine
        self._params = params
        self._system = system
        self._variables = dict(template_variables or {})
        has_template = engine.tokenizer is not None and engine.tokenizer.chat_template is not None
        self._use_template = has_template and not raw
        if system is not None and not self._use_template:
            why = "with --raw there is none" if raw else "the engine has no chat template"
            raise InvalidArgumentError(f"--system is a message of a conversation, and {why}; leave it out")

    def from_text(self, text: str, params: SamplingParams | None = None) -> Prompt:
        """Return the prompt of a text: a user's message if the model has a chat template, unless --raw."""
        if self._use_template:
            if not text:
                raise InvalidArgumentError("the prompt is empty; give a text")
            return self.from_messages([{"role": "user", "content": text}], params)
        if self._engine.tokenizer is None:
            raise InvalidArgumentError(
                'the engine has no tokenizer, so it takes token ids: --input with "prompt_ids"'
            )
        return self._prompt(self._engine.tokenizer.encode(text), params, new_text=False)

    def from_messages(self, messages: list[dict[str, Any]], params: SamplingParams | None = None) -> Prompt:
        """Return the prompt of a conversation; --system goes before it unless it has a system message."""
        first = messages[0] if isinstance(messages, list) and messages else None
        has_system = isinstance(first, dict) and first.get("role") == "system"
        if self._system is not None and not has_system:
            messages = [{"role": "system", "content": self._system}, *messages]
        return self._prompt(self._engine.chat_ids(messages, **self._variables), params, new_text=True)

    def from_ids(self, ids: list[int], params: SamplingParams | None = None) -> Prompt:
        """Return the prompt of token ids, which go in as they are."""
        if not isinstance(ids, list) or not all(type(i) is int for i in ids):
            raise InvalidArgumentError("prompt_ids must be a list of token ids (integers)")
        return self._prompt(ids, params, new_text=False)

    def lines(self, path: Path) -> Iterator[Line]:
        """Return the prompts of a JSON-lines file; empty lines are left out. A bad line has an error, not a prompt.

        raises InvalidArgumentError when there is no such file
        """
        if not path.is_file():
            raise InvalidArgumentError(
                f"--input {path} is not a file; give a file with one JSON object a line"
            )
        with path.open("rb") as file:
            for number, line in enumerate(file, start=1):
                if line.strip():
                    yield self._line(number, line)

    def _line(self, number: int, line: bytes) -> Line:
        tag = None
        try:
            fields = _parse(line)
            tag = fields.pop("id", None)
            return Line(number, self._from_fields(fields), tag=tag)
        except Error as error:
            return Line(number, error=type(error)(f"line {number}: {error}"), tag=tag)

    def _from_fields(self, fields: dict[str, Any]) -> Prompt:
        sources = [name for name in SOURCES if name in fields]
        if not sources:
            raise InvalidArgumentError(_no_source(fields))
        if len(sources) != 1:
            raise InvalidArgumentError(
                f"it has {' and '.join(sources)} of {', '.join(SOURCES)}; give exactly one"
            )
        value = fields.pop(sources[0])
        params = self._line_params(fields)
        if sources[0] == "messages":
            return self.from_messages(value, params)
        if sources[0] == "prompt_ids":
            return self.from_ids(value, params)
        if not isinstance(value, str):
            raise InvalidArgumentError(f"prompt is {type(value).__name__}, it must be a text")
        return self.from_text(value, params)

    def _line_params(self, fields: dict[str, Any]) -> SamplingParams:
        unknown = sorted(set(fields) - SAMPLING_FIELDS)
        if unknown:
            raise InvalidArgumentError(
                f"it has the unknown field {unknown[0]!r}; known are id, "
                + ", ".join((*SOURCES, *sorted(SAMPLING_FIELDS)))
            )
        if isinstance(fields.get("logit_bias"), dict):  # JSON's keys are texts
            fields["logit_bias"] = {_token_id(key): bias for key, bias in fields["logit_bias"].items()}
        try:
            if isinstance(fields.get("guided"), dict):
                fields["guided"] = GuidedParams(**fields["guided"])
            if isinstance(fields.get("retention"), list):
                fields["retention"] = [RetentionRange(**one) for one in fields["retention"]]
            return dataclasses.replace(self._params, **fields)
        except (TypeError, AttributeError) as error:
            raise InvalidArgumentError(f"a sampling field has a value of the wrong type: {error}") from error

    def _prompt(self, ids: list[int], params: SamplingParams | None, *, new_text: bool) -> Prompt:
        own = params or self._params
        if own.max_tokens is None:
            room = self._engine.model_info.max_seq_len - len(ids)
            most = max(1, own.min_tokens, min(DEFAULT_MAX_TOKENS, room))
            own = dataclasses.replace(own, max_tokens=most)
        self._engine.check_prompt(ids, own)
        return Prompt(ids, own, new_text)


def _parse(line: bytes) -> dict[str, Any]:
    try:
        fields = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise InvalidArgumentError(f"it is not JSON: {error}; write one JSON object a line") from error
    if not isinstance(fields, dict):
        raise InvalidArgumentError(f'it is a {type(fields).__name__}, it must be an object with a "prompt"')
    return fields


def _no_source(fields: dict[str, Any]) -> str:
    """Say what a line without a prompt has instead."""
    found = ", ".join(repr(name[:40]) for name in list(fields)[:8]) or "no fields"
    alias = next((name for name in _PROMPT_ELSEWHERE if name in fields), None)
    if alias is not None:
        return f'it has {found} and none of {", ".join(SOURCES)}; {alias!r} is called "prompt" here'
    return f"it has {found} and none of {', '.join(SOURCES)}; give exactly one"


def _token_id(key: str) -> int:
    if not (key.isascii() and key.isdigit() and len(key) < 20):
        raise InvalidArgumentError(f"logit_bias has the key {key[:40]!r}, it must be a token id")
    return int(key)
