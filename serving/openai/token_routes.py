"""POST /tokenize and /detokenize: text to ids and back."""

from __future__ import annotations

import functools

from starlette.responses import JSONResponse, Response

from ...runtime.errors import Error
from .answer import PREFIX_HEADER
from .context import Context
from .errors import bad_request, of_error
from .identity import Identity, cache_salt
from .prompts import chat_prompt, encode
from .protocol import DetokenizeBody, TokenizeBody


async def tokenize(ctx: Context, body: TokenizeBody, identity: Identity) -> Response:
    """Return a prompt's ids, and its prefix hashes as a completion would have them: a gateway asks where to send it."""
    adapter = ctx.adapter_of(body.model)
    if (body.prompt is None) == (body.messages is None):
        raise bad_request("give exactly one of prompt and messages", "prompt")
    if body.messages is not None:
        ids = (await chat_prompt(ctx, body)).ids
    else:
        assert body.prompt is not None
        ids = await encode(ctx, body.prompt, add_special_tokens=body.add_special_tokens is not False)
    salt = cache_salt(identity, body.cache_salt, by_key=ctx.settings.salt_by_key)
    answer = {"count": len(ids), "max_model_len": ctx.engine.model_info.max_seq_len, "tokens": ids}
    if body.return_token_strs:
        assert ctx.token_texts is not None
        answer["token_strs"] = [ctx.token_texts.text(token_id) for token_id in ids]
    value = ctx.prefixes.header(ids, adapter, salt)
    return JSONResponse(answer, headers={PREFIX_HEADER: value} if value else None)


async def detokenize(ctx: Context, body: DetokenizeBody) -> Response:
    """Return the text of ids."""
    ctx.adapter_of(body.model)
    vocab_size = ctx.engine.model_info.vocab_size
    wrong = next((token for token in body.tokens if not 0 <= token < vocab_size), None)
    if wrong is not None:
        raise bad_request(f"tokens has {wrong}, the model's ids go from 0 to {vocab_size - 1}", "tokens")
    skip = bool(body.skip_special_tokens)
    work = functools.partial(ctx.tokenizer.decode, body.tokens, skip_special_tokens=skip)
    try:
        return JSONResponse({"prompt": await ctx.beside(4 * len(body.tokens), work)})
    except Error as error:
        raise of_error(error) from error
