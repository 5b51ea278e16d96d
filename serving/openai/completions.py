"""POST /v1/completions: text that continues a prompt."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncGenerator, Sequence
from typing import Any

from starlette.responses import JSONResponse, Response

from ...runtime.completion import Completion, Delta, SequenceOutput, TokenLogprobs
from .answer import Head, Usage, headers_of, make_head, usage_of
from .context import Context
from .errors import bad_request
from .finish import finish_of, stop_text
from .identity import Identity
from .logprobs import LogprobWriter
from .params import completion_params, outputs_wanted
from .prompts import Prompt, completion_prompts
from .protocol import CompletionBody
from .request_params import server_params
from .run import Run
from .stream import PING, EventStream, Receive, event, unless_gone
from .structured import guided_of, naming_field


async def complete(ctx: Context, body: CompletionBody, identity: Identity, receive: Receive) -> Response:
    """Return the answer, whole or as a stream; raises ApiError and ClientGone."""
    adapter = ctx.adapter_of(body.model)
    more = server_params(ctx, body, identity, adapter)
    params = completion_params(body, guided_of(body), **more)
    _check_echo(body)
    prompts = await completion_prompts(ctx, body)
    streaming = bool(body.stream)
    Run.check(ctx, prompts, params, streaming=streaming)
    identity.num_prompt_tokens = sum(len(prompt.ids) for prompt in prompts)
    head = make_head("cmpl", "text_completion", body.model or ctx.settings.model_names[0])
    headers = headers_of(ctx, body, prompts[0], adapter, more["cache_salt"])
    writer = _Choices(ctx, body, prompts)
    with naming_field(body):
        run = await Run.start(ctx, prompts, params, new_text=False)
    if streaming:
        return EventStream(ctx, run, _chunks(run, head, writer, body, identity), headers)
    with run:
        completions = await unless_gone(receive, run.results())
    answer = writer.whole(head, completions)
    identity.num_output_tokens = answer["usage"]["completion_tokens"]
    return JSONResponse(answer, headers=headers)


def _check_echo(body: CompletionBody) -> None:
    if body.max_tokens == 0 and body.stream:
        raise bad_request(
            "max_tokens 0 has nothing to stream; leave stream out", "max_tokens", "invalid_value"
        )


async def _chunks(
    run: Run, head: Head, writer: _Choices, body: CompletionBody, identity: Identity
) -> AsyncGenerator[bytes, None]:
    options = body.stream_options
    usage = writer.usage
    with run:
        async with contextlib.aclosing(run.batches()) as batches:
            async for batch in batches:
                parts = [choice for i, delta in batch for choice in writer.parts(i, delta)]
                identity.num_output_tokens = usage.completion_tokens
                if not parts:
                    yield PING
                    continue
                more: dict[str, Any] = {}
                if options is not None and options.include_usage:
                    more["usage"] = usage.as_dict() if options.continuous_usage_stats else None
                yield b"".join(event(head.chunk([part], **more)) for part in parts)
        if options is not None and options.include_usage:
            yield event(head.chunk([], usage=usage.as_dict()))


class _Choices:
    """Makes the choices of one answer."""

    def __init__(self, ctx: Context, body: CompletionBody, prompts: Sequence[Prompt]) -> None:
        self._ctx = ctx
        self._body = body
        self._prompts = prompts
        self._num_outputs = outputs_wanted(body)
        self._writers: dict[int, LogprobWriter] = {}
        self._counts: dict[int, int] = {}
        self._of_prompts: dict[int, Sequence[TokenLogprobs | None]] = {}
        self.usage = Usage()
        for prompt in prompts:
            self.usage.add_prompt(len(prompt.ids), 0)

    def whole(self, head: Head, completions: Sequence[Completion]) -> dict[str, Any]:
        """Return the whole answer."""
        choices = [
            self._choice(i, completion, output)
            for i, completion in enumerate(completions)
            for output in completion.outputs[: self._num_outputs]
        ]
        shown = sum(
            len(output.token_ids)
            for completion in completions
            for output in completion.outputs[: self._num_outputs]
        )
        return head.chunk(choices, usage=usage_of(completions, 0 if self._body.max_tokens == 0 else shown))

    def _choice(self, i: int, completion: Completion, output: SequenceOutput) -> dict[str, Any]:
        body = self._body
        prompt_only = body.max_tokens == 0
        finish, stop = finish_of(output.finish_reason, output.stop_reason, len(output.token_ids))
        token_ids = () if prompt_only else output.token_ids
        logprobs = () if prompt_only else output.logprobs or ()
        text = "" if prompt_only else output.text + stop_text(body, stop)
        choice = {
            "index": self._index(i, output.index),
            "text": self._echo(i) + text,
            "logprobs": self._logprobs(i, output.index, token_ids, logprobs, completion.prompt_logprobs),
            "finish_reason": "length" if prompt_only else finish,
            "stop_reason": None if prompt_only else stop,
        }
        if body.prompt_logprobs is not None and completion.prompt_logprobs is not None:
            choice["prompt_logprobs"] = self._writer(i, output.index).prompt(completion.prompt_logprobs)
        if body.return_token_ids:
            choice["token_ids"] = list(token_ids)
            choice["prompt_token_ids"] = list(completion.prompt_ids)
        return choice

    def parts(self, i: int, delta: Delta) -> list[dict[str, Any]]:
        """Return the choices of the chunks that a delta makes, none for an output that is not asked for."""
        if delta.index >= self._num_outputs:
            return []
        index = self._index(i, delta.index)
        is_first = index not in self._counts
        count = self._counts[index] = self._counts.get(index, 0) + len(delta.token_ids)
        self.usage.add(delta)
        finish, stop = finish_of(delta.finish_reason, delta.stop_reason, count)
        if delta.prompt_logprobs is not None:
            self._of_prompts[i] = delta.prompt_logprobs  # they come once, with the first output
        prompt_logprobs = self._of_prompts.get(i) if is_first else None
        part: dict[str, Any] = {
            "index": index,
            "text": (self._echo(i) if is_first else "") + delta.text + stop_text(self._body, stop),
            "logprobs": self._logprobs(
                i, delta.index, delta.token_ids, delta.logprobs or (), prompt_logprobs, is_first=is_first
            ),
            "finish_reason": finish,
            "stop_reason": stop,
        }
        if is_first and self._body.prompt_logprobs is not None and prompt_logprobs is not None:
            part["prompt_logprobs"] = self._writer(i, delta.index).prompt(prompt_logprobs)
        if self._body.return_token_ids:
            part["token_ids"] = list(delta.token_ids)
            if is_first:
                part["prompt_token_ids"] = list(self._prompts[i].ids)
        return [part]

    def _index(self, i: int, output: int) -> int:
        return i * self._num_outputs + output

    def _echo(self, i: int) -> str:
        """Return what the text begins with: the prompt, where it is asked for."""
        if not self._body.echo:
            return ""
        prompt = self._prompts[i]
        if prompt.text is not None:
            return prompt.text
        return self._ctx.tokenizer.decode(prompt.ids, skip_special_tokens=False)

    def _writer(self, i: int, output: int) -> LogprobWriter:
        index = self._index(i, output)
        if index not in self._writers:
            self._writers[index] = LogprobWriter(
                self._ctx.token_texts,
                self._body.logprobs or 0,
                as_ids=bool(self._body.return_tokens_as_token_ids),
            )
        return self._writers[index]

    def _logprobs(
        self,
        i: int,
        output: int,
        token_ids: Sequence[int],
        logprobs: Sequence[TokenLogprobs],
        of_prompt: Sequence[TokenLogprobs | None] | None,
        *,
        is_first: bool = True,
    ) -> dict[str, Any] | None:
        if self._body.logprobs is None:
            return None
        entries: list[TokenLogprobs | None] = list(logprobs)
        ids = list(token_ids)
        if self._body.echo and is_first and of_prompt is not None:
            entries = [*of_prompt, *entries]
            ids = [*self._prompts[i].ids, *ids]
        return self._writer(i, output).completion(entries, ids)
