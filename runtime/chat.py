"""Chat templates: a list of messages becomes the model's prompt text."""

from __future__ import annotations

import datetime
import json
from collections.abc import Mapping, Sequence
from typing import Any, NoReturn

import jinja2
import jinja2.ext
import jinja2.meta
import jinja2.nodes
import jinja2.parser
import jinja2.sandbox

from .errors import EngineFileError, InvalidArgumentError

Message = Mapping[str, Any]


class ChatTemplate:
    """A Hugging Face chat template. It is a program of the checkpoint's author, so it runs in jinja2's sandbox.

    source : its text
    """

    def __init__(self, source: str, special_tokens: Mapping[str, str] | None = None) -> None:
        """Compile the template; raises EngineFileError when it is not valid."""
        self.source = source
        self._special_tokens = dict(special_tokens or {})
        try:
            self._template = _environment().from_string(source)
        except jinja2.TemplateError as error:
            raise EngineFileError(
                f"the chat template is not valid ({error}); correct chat_template.jinja in the "
                "checkpoint and build again"
            ) from error

    def reads(self, variable: str) -> bool:
        """Return whether the template looks at a variable that callers may give, e.g. tools."""
        return variable in jinja2.meta.find_undeclared_variables(_environment().parse(self.source))

    def render(
        self,
        messages: Sequence[Message],
        *,
        add_generation_prompt: bool = True,
        tools: Sequence[Mapping[str, Any]] | None = None,
        documents: Sequence[Mapping[str, Any]] | None = None,
        **variables: Any,
    ) -> str:
        """Return the prompt text, which already has its special tokens: encode it without adding any.

        messages : each with "role" and "content"
        variables : what else the template reads, e.g. enable_thinking=False
        raises InvalidArgumentError when the template refuses the messages
        """
        _check_messages(messages)
        values = {**self._special_tokens, **variables}
        try:
            return self._template.render(
                messages=list(messages),
                tools=tools,
                documents=documents,
                add_generation_prompt=add_generation_prompt,
                **values,
            )
        except (jinja2.TemplateError, TypeError, ValueError, LookupError, ArithmeticError) as error:
            raise InvalidArgumentError(f"the chat template refused the messages: {error}") from error


def _check_messages(messages: Sequence[Message]) -> None:
    if isinstance(messages, (str, Mapping)) or not isinstance(messages, Sequence):
        raise InvalidArgumentError(f"messages is {messages!r}, it must be a list of objects")
    for i, message in enumerate(messages):
        if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
            raise InvalidArgumentError(
                f'message {i} is {message!r}, it must be an object with a "role" and a "content"'
            )
    if not messages:
        raise InvalidArgumentError("there are no messages; give at least one")


class _Generation(jinja2.ext.Extension):
    """Accepts {% generation %}...{% endgeneration %}, which marks the assistant's text for training masks."""

    tags = {"generation"}  # noqa: RUF012 - jinja2's own type

    def parse(self, parser: jinja2.parser.Parser) -> jinja2.nodes.Node:
        """Return a block that renders its body, in a scope of its own as the original tag has."""
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return jinja2.nodes.Scope(body, lineno=line)


def _environment() -> jinja2.sandbox.ImmutableSandboxedEnvironment:
    environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[jinja2.ext.loopcontrols, _Generation]
    )
    environment.filters["tojson"] = _tojson
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = _strftime_now
    return environment


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    # jinja2's own filter escapes HTML, which a model must not see.
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


def _raise_exception(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


def _strftime_now(pattern: str) -> str:
    return datetime.datetime.now().strftime(pattern)
