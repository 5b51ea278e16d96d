"""POST /v1/chat/completions: the answer to a conversation."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncGenerator
from typing import Any

from starlette.responses import JSONResponse, Response

from .answer import Head, headers_of, make_head, usage_of
from .chat_choices import ChatChoices
from .context import Context
from .identity import Identity
from .params import chat_params
from .prompts import chat_prompt
from .protocol import ChatBody
from .request_params import server_params
from .run import Run
from .stream import PING, EventStream, Receive, event, unless_gone
from .structured import guided_of, naming_field
from .tools import active_tools, guide_calls


async def chat(ctx: Context, body: ChatBody, identity: Identity, receive: Receive) -> Response:
    """Return the answer, whole or as a stream; raises ApiError and ClientGone."""
    adapter = ctx.adapter_of(body.model)
    functions = active_tools(body)
    guided = guided_of(body)
    form = ctx.tool_format if functions else None
    more = server_params(ctx, body, identity, adapter)
    if form is not None:
        guided = guide_calls(body, form, functions, guided)
        if form.marker_id is not None:
            body.skip_special_tokens = False  # or the text would not show where the calls begin
    params = chat_params(body, guided, **more)
    prompt = await chat_prompt(ctx, body)
    streaming = bool(body.stream)
    Run.check(ctx, [prompt], params, streaming=streaming)
    identity.num_prompt_tokens = len(prompt.ids)
    choices = ChatChoices(ctx, body, prompt, form, [function.name for function in functions])
    head = make_head(
        "chatcmpl",
        "chat.completion.chunk" if streaming else "chat.completion",
        body.model or ctx.settings.model_names[0],
    )
    headers = headers_of(ctx, body, prompt, adapter, more["cache_salt"])
    with naming_field(body):
        run = await Run.start(ctx, [prompt], params, new_text=True)
    if streaming:
        return EventStream(ctx, run, _chunks(run, head, choices, body, identity), headers)
    with run:
        completion = (await unless_gone(receive, run.results()))[0]
    identity.num_output_tokens = completion.usage["completion_tokens"]
    answer = head.chunk(choices.whole(completion), usage=usage_of([completion]))
    return JSONResponse(answer, headers=headers)


async def _chunks(
    run: Run, head: Head, choices: ChatChoices, body: ChatBody, identity: Identity
) -> AsyncGenerator[bytes, None]:
    options = body.stream_options
    with_usage = options is not None and options.include_usage
    with run:
        async with contextlib.aclosing(run.batches()) as batches:
            async for batch in batches:
                parts = [part for _, delta in batch for part in choices.parts(delta)]
                identity.num_output_tokens = choices.usage.completion_tokens
                if not parts:
                    if not batch:
                        yield PING
                    continue
                more: dict[str, Any] = {}
                if options is not None and with_usage:
                    more["usage"] = choices.usage.as_dict() if options.continuous_usage_stats else None
                yield b"".join(event(head.chunk([part], **more)) for part in parts)
        if with_usage:
            yield event(head.chunk([], usage=choices.usage.as_dict()))
