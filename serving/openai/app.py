"""The FastAPI application: which path is answered by what."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncGenerator, Awaitable, Callable
from typing import Any

from fastapi import FastAPI, Request
from starlette.exceptions import HTTPException
from starlette.responses import JSONResponse, Response

from ... import __version__
from ..metrics.prometheus import CONTENT_TYPE, exposition, registry_of
from .access_log import AccessLog
from .chat import chat
from .completions import complete
from .context import Context
from .error_response import ErrorResponse, answering
from .errors import ApiError
from .gate import Application, Gate
from .identity import identity_of
from .limits import check_json, read_body
from .models import all_models, one_model
from .protocol import ChatBody, CompletionBody, DetokenizeBody, TokenizeBody, parse
from .token_routes import detokenize, tokenize

Answerer = Callable[[Any, Request], Awaitable[Response]]


def make_app(ctx: Context) -> Application:
    """Return the ASGI application of one engine."""

    @contextlib.asynccontextmanager
    async def lifespan(_app: Any) -> AsyncGenerator[None, None]:
        yield
        if log is not None:
            log.close()

    log = AccessLog() if ctx.settings.access_log else None
    app = FastAPI(title="plansmith", version=__version__, lifespan=lifespan, docs_url=None, redoc_url=None)
    app.add_exception_handler(HTTPException, _http_error)
    _add_bodies(app, ctx)
    _add_gets(app, ctx)
    return Gate(app, ctx, log)


def _add_bodies(app: Any, ctx: Context) -> None:
    async def completions(body: CompletionBody, request: Request) -> Response:
        return await complete(ctx, body, identity_of(request.scope), request.receive)

    async def chat_completions(body: ChatBody, request: Request) -> Response:
        return await chat(ctx, body, identity_of(request.scope), request.receive)

    async def to_tokens(body: TokenizeBody, request: Request) -> Response:
        return await tokenize(ctx, body, identity_of(request.scope))

    async def to_text(body: DetokenizeBody, _request: Request) -> Response:
        return await detokenize(ctx, body)

    _add_post(app, ctx, "/v1/completions", CompletionBody, completions)
    _add_post(app, ctx, "/v1/chat/completions", ChatBody, chat_completions)
    _add_post(app, ctx, "/tokenize", TokenizeBody, to_tokens)
    _add_post(app, ctx, "/detokenize", DetokenizeBody, to_text)


def _add_post(app: Any, ctx: Context, path: str, cls: Any, answer: Answerer) -> None:
    """Add a path whose body is read within limits, before anything is made of it."""

    async def endpoint(request: Request) -> Response:
        check_json(request.scope)
        data = await read_body(request.scope, request.receive, ctx.settings)
        return await answer(parse(cls, data), request)

    endpoint.__annotations__ = {"request": Request, "return": Response}  # FastAPI reads them, not their names
    schema = {"content": {"application/json": {"schema": cls.model_json_schema()}}, "required": True}
    app.add_api_route(
        path,
        answering(endpoint),
        methods=["POST"],
        response_model=None,
        openapi_extra={"requestBody": schema},
    )


def _add_gets(app: Any, ctx: Context) -> None:
    registry = registry_of(ctx.metrics, ctx.settings.model_names[0])

    async def models() -> Any:
        return JSONResponse(all_models(ctx))

    async def model(name: str) -> Any:
        return JSONResponse(one_model(ctx, name))

    async def live() -> Any:
        trouble = ctx.lifecycle.trouble()
        return JSONResponse(
            {"status": "ok" if trouble is None else trouble}, status_code=200 if trouble is None else 503
        )

    async def ready() -> Any:
        trouble = "draining" if ctx.lifecycle.draining else ctx.lifecycle.trouble()
        return JSONResponse(
            {"status": "ok" if trouble is None else trouble}, status_code=200 if trouble is None else 503
        )

    async def version() -> Any:
        return JSONResponse({"version": __version__})

    async def metrics_text() -> Any:
        return Response(exposition(registry), media_type=CONTENT_TYPE)

    routes: dict[str, Callable[..., Awaitable[Any]]] = {
        "/v1/models": models,
        "/v1/models/{name:path}": model,
        "/health": ready,
        "/health/live": live,
        "/health/ready": ready,
        "/ping": live,
        "/version": version,
        "/metrics": metrics_text,
    }
    for path, endpoint in routes.items():
        app.add_api_route(path, answering(endpoint), methods=["GET"], response_model=None)


async def _http_error(_request: Any, error: Any) -> Response:
    known = {
        404: "there is no such path: the server generates text, and has no embeddings, images, audio or files",
        405: "the path does not take this method",
    }
    what = known.get(error.status_code, str(error.detail))
    return ErrorResponse(
        ApiError(error.status_code, f"{what}; see docs/openai.md", code="unknown_url", headers=error.headers)
    )
