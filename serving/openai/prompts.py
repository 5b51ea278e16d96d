"""Prompts as token ids: texts, ids, batches of both, and chats through the model's template."""

from __future__ import annotations

import dataclasses
import functools
import json
from collections.abc import Mapping, Sequence
from typing import Any

from ...runtime.errors import Error
from .context import Context
from .errors import bad_request, of_error
from .protocol import ChatBody, CompletionBody, TokenizeBody


@dataclasses.dataclass(frozen=True)
class Prompt:
    """One prompt. text : as it was given, None for token ids."""

    ids: list[int]
    text: str | None = None


async def completion_prompts(ctx: Context, body: CompletionBody) -> list[Prompt]:
    """Return the prompts of /v1/completions, at least one; ApiError 400 for more than the server takes at once."""
    given = body.prompt
    batch: list[Any] = (
        [given] if isinstance(given, str) or (given and isinstance(given[0], int)) else list(given)
    )
    most = ctx.settings.max_prompts
    if not batch:
        raise bad_request("prompt is empty; give at least one", "prompt", "invalid_value")
    if len(batch) > most:
        raise bad_request(
            f"prompt has {len(batch)} prompts, the most in one request is {most}; send several requests",
            "prompt",
        )
    return [await _encoded(ctx, one, body) for one in batch]


async def _encoded(ctx: Context, prompt: str | list[int], body: CompletionBody) -> Prompt:
    if isinstance(prompt, str):
        special = body.add_special_tokens is not False
        ids = await encode(ctx, prompt, add_special_tokens=special)
        return Prompt(_truncated(ids, body.truncate_prompt_tokens), prompt)
    return Prompt(_truncated(prompt, body.truncate_prompt_tokens))


async def encode(ctx: Context, text: str, *, add_special_tokens: bool) -> list[int]:
    """Return a text's ids; ApiError 400 for half characters."""
    work = functools.partial(ctx.tokenizer.encode, text, add_special_tokens=add_special_tokens)
    try:
        return await ctx.beside(len(text), work)
    except Error as error:
        raise of_error(error) from error


async def chat_prompt(ctx: Context, body: ChatBody | TokenizeBody) -> Prompt:
    """Return the prompt of a conversation by the model's chat template."""
    assert body.messages is not None
    messages = [_message(i, message) for i, message in enumerate(body.messages)]
    variables: dict[str, Any] = dict(body.chat_template_kwargs or {})
    for name in ("messages", "self"):
        if name in variables:
            raise bad_request(
                f"chat_template_kwargs must not set {name}; leave it out", "chat_template_kwargs"
            )
    if body.tools and getattr(body, "tool_choice", None) != "none":
        if ctx.tool_format is None:
            raise bad_request(
                "the model's chat template has no place for tools; leave tools out, or serve the engine with "
                "--chat-template",
                "tools",
                "unsupported",
            )
        variables["tools"] = [tool.model_dump(exclude_none=True) for tool in body.tools]
    if body.documents:
        variables["documents"] = body.documents
    if body.add_generation_prompt is not None:
        variables["add_generation_prompt"] = body.add_generation_prompt
    size = sum(len(str(message["content"])) for message in messages) + len(str(variables))
    ids = await _render(ctx, messages, variables, size)
    return Prompt(_truncated(ids, getattr(body, "truncate_prompt_tokens", None)))


async def _render(
    ctx: Context, messages: Sequence[Mapping[str, Any]], variables: Mapping[str, Any], size: int
) -> list[int]:
    try:
        return await ctx.beside(size, functools.partial(ctx.engine.chat_ids, messages, **variables))
    except Error as error:
        api = of_error(error)
        api.param = api.param or "messages"
        raise api from error


def _message(i: int, message: dict[str, Any]) -> dict[str, Any]:
    """Return a message as templates take it: content is text, arguments of tool calls are objects."""
    if not isinstance(message.get("role"), str):
        raise bad_request(
            f"messages.{i} has no role; give one", f"messages.{i}.role", "missing_required_parameter"
        )
    made = {**message, "content": _content(i, message.get("content"))}
    calls = message.get("tool_calls")
    if calls is None:
        made.pop("tool_calls", None)
        return made
    if not isinstance(calls, list):
        raise bad_request(
            f"messages.{i}.tool_calls must be a list", f"messages.{i}.tool_calls", "invalid_type"
        )
    made["tool_calls"] = [_call(i, call) for call in calls]
    return made


def _content(i: int, content: Any) -> str:
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    where = f"messages.{i}.content"
    if not isinstance(content, list):
        raise bad_request(f"{where} must be text or a list of parts", where, "invalid_type")
    texts = []
    for part in content:
        if not isinstance(part, dict) or part.get("type") not in ("text", "refusal"):
            kind = part.get("type") if isinstance(part, dict) else type(part).__name__
            raise bad_request(
                f"{where} has a part {kind!r}, the model reads text alone", where, "unsupported"
            )
        text = part.get("text", part.get("refusal"))
        if not isinstance(text, str):
            raise bad_request(f"{where} has a part without its text", where, "invalid_type")
        texts.append(text)
    return "\n".join(texts)


def _call(i: int, call: Any) -> dict[str, Any]:
    where = f"messages.{i}.tool_calls"
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise bad_request(f"{where} has an entry without function.name", where, "invalid_type")
    arguments = function.get("arguments")
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments) if arguments.strip() else {}
        except (ValueError, RecursionError):
            raise bad_request(f"{where} has arguments that are not JSON", where, "invalid_value") from None
    return {**call, "function": {**function, "arguments": arguments if arguments is not None else {}}}


def _truncated(ids: list[int], most: int | None) -> list[int]:
    """Return the last `most` ids, as vLLM's truncate_prompt_tokens does."""
    if most is None:
        return ids
    if most < 1:
        raise bad_request(
            f"truncate_prompt_tokens is {most}, it must be at least 1",
            "truncate_prompt_tokens",
            "invalid_value",
        )
    return ids[-most:]
