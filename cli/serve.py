"""plansmith serve: an engine behind OpenAI's API."""

from __future__ import annotations

import asyncio
import dataclasses
import os
import resource
import socket
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from ..runtime.async_engine import AsyncEngine
from ..runtime.chat import ChatTemplate
from ..runtime.errors import InvalidArgumentError
from . import _options as options
from ._guided import load_adapters

_OTHER_FILES = 64  # the engine's, the log's, the event loop's
_LEAST_BODY_BYTES = 1 << 20
_BODY_BYTES_PER_TOKEN = 32  # of the longest prompt: text has 4 or so, ids in JSON 8


def serve(
    engine_dir: options.EngineDir,
    host: Annotated[
        str, typer.Option("--host", help="Address to listen on; 0.0.0.0 = all of the machine's.")
    ] = "127.0.0.1",
    port: Annotated[int, typer.Option("--port", min=0, max=65535, help="0 = any free one.")] = 8000,
    uds: Annotated[
        Path | None, typer.Option("--uds", help="Listen at this Unix socket instead of a port.")
    ] = None,
    served_model_name: Annotated[
        list[str] | None,
        typer.Option(
            "--served-model-name", help="The model's name for clients; default: the directory's. Repeated."
        ),
    ] = None,
    api_key: Annotated[
        list[str] | None,
        typer.Option(
            "--api-key", help="A key that requests must have. Repeated. Or PLANSMITH_API_KEY=k1,k2."
        ),
    ] = None,
    api_key_file: Annotated[Path | None, typer.Option("--api-key-file", help="Keys, one a line.")] = None,
    salt_by_key: Annotated[
        bool, typer.Option("--salt-by-key", help="Requests of different keys share no cached prefixes.")
    ] = False,
    max_queue_size: Annotated[
        int, typer.Option("--max-queue-size", min=0, help="Waiting requests; one more gets 429. 0 = 1024.")
    ] = 0,
    max_body_bytes: Annotated[
        int, typer.Option("--max-body-bytes", min=0, help="Longest body; 0 = by the engine's longest prompt.")
    ] = 0,
    max_prompts: Annotated[
        int, typer.Option("--max-prompts", min=1, help="Most prompts of one request.")
    ] = 256,
    max_outputs: Annotated[
        int, typer.Option("--max-outputs", min=1, help="Most outputs of one request: prompts times n.")
    ] = 256,
    max_connections: Annotated[
        int, typer.Option("--max-connections", min=1, help="Open at a time; one more is closed.")
    ] = 8192,
    request_timeout: Annotated[
        float, typer.Option("--request-timeout", min=0.0, help="Seconds, then a request ends; 0 = never.")
    ] = 0.0,
    header_timeout: Annotated[
        float, typer.Option("--header-timeout", min=0.1, help="Seconds for the head of a request.")
    ] = 10.0,
    body_timeout: Annotated[
        float, typer.Option("--body-timeout", min=0.1, help="Seconds for the body of a request.")
    ] = 60.0,
    write_timeout: Annotated[
        float, typer.Option("--write-timeout", min=0.1, help="Seconds without a byte taken by a client.")
    ] = 60.0,
    drain_seconds: Annotated[
        float, typer.Option("--drain-seconds", min=0.0, help="For running requests, on SIGTERM.")
    ] = 30.0,
    stall_seconds: Annotated[
        float, typer.Option("--stall-seconds", min=1.0, help="Without a step, then /health/live fails.")
    ] = 120.0,
    stream_interval_ms: Annotated[
        float | None,
        typer.Option("--stream-interval-ms", min=0.0, help="Between chunks; default: by what sending costs."),
    ] = None,
    prefix_hash_key: Annotated[
        str | None,
        typer.Option("--prefix-hash-key", help="The same on all replicas; default: the model's name."),
    ] = None,
    chat_template: Annotated[
        Path | None, typer.Option("--chat-template", help="A Jinja file in place of the engine's template.")
    ] = None,
    tool_format: Annotated[
        str, typer.Option("--tool-format", help="auto, hermes, llama3, mistral or none.")
    ] = "auto",
    access_log: Annotated[
        bool, typer.Option("--access-log", help="A JSON line a request on standard error.")
    ] = False,
    lora: Annotated[
        list[str] | None,
        typer.Option("--lora", metavar="NAME=DIR", help="Load a LoRA adapter, a model of its own. Repeated."),
    ] = None,
    warm_up: Annotated[
        int | None,
        typer.Option(
            "--warm-up",
            min=0,
            metavar="N",
            help="First run requests of its own, up to N at a time; 0 = as many as the engine takes. Default: none.",
        ),
    ] = None,
    target: options.Target = "cpu",
    device: options.Device = None,
    cuda_graphs: options.CudaGraphs = "auto",
    threads: options.Threads = 0,
    weights: options.Weights = "auto",
    max_batch_size: options.MaxBatchSize = 0,
    max_num_tokens: options.MaxNumTokens = 0,
    kv_cache_bytes: options.KvCacheBytes = 0,
    kv_cache_free_gpu_mem_fraction: options.KvCacheFraction = options.DEFAULT_FRACTION,
    scheduler_policy: options.SchedulerPolicy = "guaranteed_no_evict",
    queue_order: options.QueueOrder = "arrival",
    host_cache_bytes: options.HostCacheBytes = 0,
    draft: options.Draft = None,
    speculation: options.Speculation = "auto",
    max_draft_len: options.MaxDraftLen = 0,
) -> None:
    """Serve an engine over the OpenAI API: completions, chat, tools, structured output, log-probabilities.

    It listens on this machine alone unless --host says otherwise. SIGTERM lets running requests finish.
    """
    from ..serving.openai.auth import ENVIRONMENT, read_keys
    from ..serving.openai.server import listen, listen_unix, serve
    from ..serving.openai.settings import Settings

    names = tuple(served_model_name or (engine_dir.resolve().name,))
    settings = Settings(
        model_names=names,
        api_keys=read_keys(api_key or (), os.environ.get(ENVIRONMENT), api_key_file),
        max_body_bytes=max_body_bytes,
        max_prompts=max_prompts,
        max_outputs=max_outputs,
        max_connections=_room_for(max_connections),
        request_timeout_s=request_timeout or None,
        header_timeout_s=header_timeout,
        body_timeout_s=body_timeout,
        write_timeout_s=write_timeout,
        drain_s=drain_seconds,
        stall_s=stall_seconds,
        stream_interval_s=None if stream_interval_ms is None else stream_interval_ms / 1000,
        prefix_hash_key=names[0] if prefix_hash_key is None else prefix_hash_key,
        tool_format=tool_format,
        salt_by_key=salt_by_key,
        access_log=access_log,
    )
    options.check_device(engine_dir, target, device, cuda_graphs)
    # Before the engine is read: an address that is taken is told at once.
    sockets = listen_unix(uds) if uds is not None else listen(host, port)
    opening = {
        "max_batch_size": max_batch_size,
        "max_num_tokens": max_num_tokens,
        "kv_cache_bytes": kv_cache_bytes,
        "kv_cache_free_gpu_mem_fraction": kv_cache_free_gpu_mem_fraction,
        "device": device,
        "cuda_graphs": cuda_graphs,
        "scheduler_policy": scheduler_policy,
        "queue_order": queue_order,
        "host_cache_bytes": host_cache_bytes,
        "max_queue_size": max_queue_size,
        "draft": draft,
        "speculation": speculation,
        "max_draft_len": max_draft_len,
        "weights": weights,
    }
    engine = _open(engine_dir, target, threads, opening, chat_template, lora or ())
    if not max_body_bytes:
        most = _BODY_BYTES_PER_TOKEN * engine.model_info.max_input_len
        settings = dataclasses.replace(settings, max_body_bytes=max(_LEAST_BODY_BYTES, most))
    where = _where(sockets[0], uds)

    async def main() -> None:
        if warm_up is not None:
            await _warm(engine, warm_up)
        await serve(engine, settings, sockets, lambda _end: _tell_ready(names[0], where))

    _run(main())


def _room_for(num_connections: int) -> int:
    """Let the process open so many sockets, as far as the system allows, and return how many that is."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = num_connections + _OTHER_FILES
    if soft != resource.RLIM_INFINITY and soft < wanted:
        soft = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    return (
        num_connections
        if soft == resource.RLIM_INFINITY
        else max(1, min(num_connections, soft - _OTHER_FILES))
    )


def _open(
    engine_dir: Path,
    target: str,
    threads: int,
    opening: dict[str, Any],
    chat_template: Path | None,
    adapters: Sequence[str],
) -> AsyncEngine:
    engine = AsyncEngine.open(engine_dir, target, num_threads=threads, **opening)
    options.tell_target(engine, target)
    if chat_template is not None:
        if engine.tokenizer is None:
            raise InvalidArgumentError(
                "--chat-template needs a tokenizer, and the engine has none; leave it out"
            )
        source = chat_template.read_text(encoding="utf-8")
        engine.tokenizer.chat_template = ChatTemplate(source, engine.tokenizer.special_tokens)
    load_adapters(engine, adapters)
    return engine


async def _warm(engine: AsyncEngine, max_batch_size: int) -> None:
    """Bring the engine to its speed; whoever connects meanwhile waits."""
    from ..runtime.warm_up import warm_up_async

    took = await warm_up_async(engine, max_batch_size)
    print(
        f"plansmith: warm after {took.num_requests} requests in {took.seconds:.1f} s",
        file=sys.stderr,
        flush=True,
    )


def _run(main: Any) -> None:
    """Run a coroutine on uvloop where it is installed."""
    try:
        import uvloop
    except ImportError:
        asyncio.run(main)
        return
    uvloop.run(main)


def _where(sock: socket.socket, uds: Path | None) -> str:
    if uds is not None:
        return f"unix:{uds}"
    host, port = sock.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def _tell_ready(name: str, where: str) -> None:
    print(f"plansmith: ready, {name} at {where}", file=sys.stderr, flush=True)
