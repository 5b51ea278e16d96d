"""The choices of a chat's answer: messages, or deltas of them, with their tool calls."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ...runtime.completion import Completion, Delta, SequenceOutput
from .answer import Usage
from .context import Context
from .finish import finish_of, stop_text
from .logprobs import LogprobWriter
from .params import outputs_wanted
from .prompts import Prompt
from .protocol import ChatBody
from .tool_parser import Called, Event, Said, ToolParser
from .tools import ToolFormat


class ChatChoices:
    """Makes the choices of one answer.

    form : how the model writes calls; None = the text is not looked at
    tool_names : that it may call
    """

    def __init__(
        self, ctx: Context, body: ChatBody, prompt: Prompt, form: ToolFormat | None, tool_names: Sequence[str]
    ) -> None:
        self._ctx = ctx
        self._body = body
        self._prompt = prompt
        self._form = form
        self._tool_names = tool_names
        self._num_outputs = outputs_wanted(body)
        self._counts: dict[int, int] = {}
        self._parsers: dict[int, ToolParser] = {}
        self.usage = Usage()
        self.usage.add_prompt(len(prompt.ids), 0)

    def whole(self, completion: Completion) -> list[dict[str, Any]]:
        """Return the choices of a whole answer."""
        return [self._choice(completion, output) for output in completion.outputs[: self._num_outputs]]

    def _choice(self, completion: Completion, output: SequenceOutput) -> dict[str, Any]:
        finish, stop = finish_of(output.finish_reason, output.stop_reason, len(output.token_ids))
        text = output.text + stop_text(self._body, stop)
        parser = self._parser(output.index)
        message: dict[str, Any] = {"role": "assistant", "content": text, "refusal": None}
        if parser is not None:
            events = [*parser.feed(text), *parser.finish()]
            message["content"] = "".join(one.text for one in events if isinstance(one, Said))
            if parser.num_calls:
                message["content"] = message["content"] or None
                message["tool_calls"] = _calls(events)
                finish = "tool_calls" if finish == "stop" else finish
        choice: dict[str, Any] = {
            "index": output.index,
            "message": message,
            "logprobs": self._writer().chat(output.logprobs) if self._body.logprobs else None,
            "finish_reason": finish,
            "stop_reason": stop,
        }
        if self._body.prompt_logprobs is not None and completion.prompt_logprobs is not None:
            choice["prompt_logprobs"] = self._writer().prompt(completion.prompt_logprobs)
        if self._body.return_token_ids:
            choice["token_ids"] = list(output.token_ids)
            choice["prompt_token_ids"] = list(completion.prompt_ids)
        return choice

    def parts(self, delta: Delta) -> list[dict[str, Any]]:
        """Return the choices of the chunks that a delta makes, none where there is nothing to tell yet."""
        if delta.index >= self._num_outputs:
            return []
        is_first = delta.index not in self._counts
        count = self._counts[delta.index] = self._counts.get(delta.index, 0) + len(delta.token_ids)
        self.usage.add(delta)
        finish, stop = finish_of(delta.finish_reason, delta.stop_reason, count)
        messages = self._messages(delta, stop)
        parser = self._parser(delta.index)
        if finish == "stop" and parser is not None and parser.num_calls:
            finish = "tool_calls"
        if is_first:
            messages[:1] = [{"role": "assistant", "content": "", **(messages[0] if messages else {})}]
        shows_more = finish is not None or delta.logprobs is not None or self._body.return_token_ids
        if not messages and shows_more:
            messages = [{}]
        parts = [self._part(delta.index, message) for message in messages]
        if parts:
            self._complete(parts[-1], delta, finish, stop, is_first=is_first)
        return parts

    def _messages(self, delta: Delta, stop: str | int | None) -> list[dict[str, Any]]:
        """Return what is new of the message."""
        text = delta.text + stop_text(self._body, stop)
        parser = self._parser(delta.index)
        if parser is None:
            return [{"content": text}] if text else []
        events = parser.feed(text)
        if delta.finish_reason is not None:
            events += parser.finish()
        return [_delta_of(one) for one in events]

    def _part(self, index: int, message: dict[str, Any]) -> dict[str, Any]:
        return {"index": index, "delta": message, "logprobs": None, "finish_reason": None}

    def _complete(
        self,
        part: dict[str, Any],
        delta: Delta,
        finish: str | None,
        stop: str | int | None,
        *,
        is_first: bool,
    ) -> None:
        """Add to the last chunk of a delta what the delta has besides its text."""
        part["finish_reason"] = finish
        if finish is not None:
            part["stop_reason"] = stop
        if self._body.logprobs and delta.logprobs is not None:
            part["logprobs"] = self._writer().chat(delta.logprobs)
        if self._body.return_token_ids:
            part["token_ids"] = list(delta.token_ids)
            if is_first:
                part["prompt_token_ids"] = list(self._prompt.ids)
        if self._body.prompt_logprobs is not None and delta.prompt_logprobs is not None:
            part["prompt_logprobs"] = self._writer().prompt(delta.prompt_logprobs)

    def _parser(self, index: int) -> ToolParser | None:
        if self._form is None:
            return None
        if index not in self._parsers:
            most = 1 if self._body.parallel_tool_calls is False else None
            self._parsers[index] = ToolParser(self._form, self._tool_names, most)
        return self._parsers[index]

    def _writer(self) -> LogprobWriter:
        return LogprobWriter(
            self._ctx.token_texts,
            self._body.top_logprobs or 0,
            as_ids=bool(self._body.return_tokens_as_token_ids),
        )


def _calls(events: Sequence[Event]) -> list[dict[str, Any]]:
    """Return whole calls, put together from their pieces."""
    calls: list[dict[str, Any]] = []
    for one in events:
        if not isinstance(one, Called):
            continue
        if one.id is not None:
            function = {"name": one.name, "arguments": ""}
            calls.append({"id": one.id, "type": "function", "function": function})
        calls[one.index]["function"]["arguments"] += one.arguments
    return calls


def _delta_of(one: Event) -> dict[str, Any]:
    if isinstance(one, Said):
        return {"content": one.text}
    call: dict[str, Any] = {"index": one.index, "function": {"arguments": one.arguments}}
    if one.id is not None:
        call = {
            "index": one.index,
            "id": one.id,
            "type": "function",
            "function": {"name": one.name, "arguments": one.arguments},
        }
    return {"tool_calls": [call]}
