"""plansmith generate: text from an engine, for one prompt, a conversation, or a file of prompts."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from ..runtime.engine import Engine, SamplingParams
from ..runtime.errors import InvalidArgumentError
from . import _options as options
from ._chat import run_chat
from ._files import check_output
from ._guided import guided_params, load_adapters
from ._lines import completion_fields, run_lines
from ._output import print_json
from ._prompts import DEFAULT_MAX_TOKENS, PromptMaker
from ._terminal import terminal_text


def generate(
    engine_dir: options.EngineDir,
    prompt: Annotated[
        str | None,
        typer.Argument(metavar="[PROMPT]", help="The prompt; - or nothing reads it from standard input."),
    ] = None,
    chat: Annotated[bool, typer.Option("--chat", help="Talk: one line a turn, Ctrl-D ends.")] = False,
    input_file: Annotated[
        Path | None,
        typer.Option(
            "--input",
            help='A JSON-lines file: {"prompt": ..}, {"messages": ..} or {"prompt_ids": ..} a line.',
        ),
    ] = None,
    output_file: Annotated[
        Path | None, typer.Option("--output", help="Where the answers of --input go; else standard output.")
    ] = None,
    keep_going: Annotated[
        bool, typer.Option("--keep-going", help="Write an error for a bad line of --input and go on.")
    ] = False,
    raw: Annotated[
        bool, typer.Option("--raw", help="Continue the prompt's text as it is, without the chat template.")
    ] = False,
    system: Annotated[str | None, typer.Option("--system", help="The system message of the chat.")] = None,
    template_var: Annotated[
        list[str] | None,
        typer.Option("--template-var", metavar="NAME=JSON", help="A variable of the chat template."),
    ] = None,
    max_tokens: Annotated[
        int | None,
        typer.Option("--max-tokens", min=1, help=f"Most tokens to generate. [default: {DEFAULT_MAX_TOKENS}]"),
    ] = None,
    min_tokens: Annotated[int, typer.Option("--min-tokens", min=0, help="No end before this many.")] = 0,
    temperature: Annotated[
        float, typer.Option("--temperature", min=0.0, help="0 = always the likeliest token.")
    ] = 0.0,
    top_k: Annotated[int, typer.Option("--top-k", min=0, help="Only the k likeliest; 0 = all.")] = 0,
    top_p: Annotated[float, typer.Option("--top-p", help="Only the likeliest up to this probability.")] = 1.0,
    min_p: Annotated[float, typer.Option("--min-p", help="Least probability relative to the best.")] = 0.0,
    repetition_penalty: Annotated[float, typer.Option("--repetition-penalty", help="1 = none.")] = 1.0,
    presence_penalty: Annotated[float, typer.Option("--presence-penalty", help="0 = none.")] = 0.0,
    frequency_penalty: Annotated[float, typer.Option("--frequency-penalty", help="0 = none.")] = 0.0,
    seed: options.Seed = None,
    stop: Annotated[
        list[str] | None, typer.Option("--stop", help="End before this text. May be repeated.")
    ] = None,
    stop_token_id: Annotated[
        list[int] | None, typer.Option("--stop-token-id", help="End at this token. May be repeated.")
    ] = None,
    bad_word: Annotated[
        list[str] | None, typer.Option("--bad-word", help="Never generate this text. May be repeated.")
    ] = None,
    n: Annotated[int, typer.Option("-n", min=1, max=1024, help="So many answers, each drawn by itself.")] = 1,
    best_of: Annotated[
        int | None, typer.Option("--best-of", min=1, max=1024, help="Draw so many, show the likeliest -n.")
    ] = None,
    beam_width: Annotated[
        int, typer.Option("--beam-width", min=1, help="Beam search when above 1; shows all beams.")
    ] = 1,
    length_penalty: Annotated[
        float, typer.Option("--length-penalty", help="Of beams: above 1 favours long ones.")
    ] = 1.0,
    json_schema: Annotated[
        str | None, typer.Option("--json-schema", metavar="FILE|TEXT", help="JSON of this schema.")
    ] = None,
    regex: Annotated[str | None, typer.Option("--regex", help="Text that matches this expression.")] = None,
    ebnf: Annotated[
        str | None, typer.Option("--ebnf", metavar="FILE|TEXT", help="Text of this grammar.")
    ] = None,
    choice: Annotated[
        list[str] | None, typer.Option("--choice", help="One of these texts. Repeated.")
    ] = None,
    json_object: Annotated[bool, typer.Option("--json-object", help="Any JSON object or array.")] = False,
    logprobs: Annotated[
        int | None,
        typer.Option("--logprobs", min=0, max=20, help="With --json or --input: of the n likeliest."),
    ] = None,
    prompt_logprobs: Annotated[
        int | None,
        typer.Option("--prompt-logprobs", min=0, max=20, help="Likewise of the prompt's tokens."),
    ] = None,
    lora: Annotated[
        list[str] | None, typer.Option("--lora", metavar="NAME=DIR", help="Load a LoRA adapter. Repeated.")
    ] = None,
    adapter: Annotated[str | None, typer.Option("--adapter", help="Answer with this adapter.")] = None,
    cache_salt: Annotated[
        str | None, typer.Option("--cache-salt", help="Share cached prefixes under this name only.")
    ] = None,
    timeout_ms: Annotated[int | None, typer.Option("--timeout-ms", min=1, help="End after so long.")] = None,
    ignore_eos: Annotated[bool, typer.Option("--ignore-eos", help="Go on behind the end token.")] = False,
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
    verify_hashes: Annotated[
        bool, typer.Option("--verify-hashes", help="Compare the plan's sha256 with the manifest first.")
    ] = False,
    as_json: options.Json = False,
) -> None:
    """Generate text with an engine.

    The answer streams to the terminal. A model with a chat template gets PROMPT as a user's message; --raw continues it
    as plain text. With --input all prompts of the file run together in one in-flight batch.
    """
    _check_modes(prompt, chat, input_file, output_file, as_json)
    _check_chat(chat, n, beam_width)
    params = SamplingParams(
        max_tokens=max_tokens,
        min_tokens=min_tokens,
        temperature=temperature,
        top_k=top_k,
        top_p=top_p,
        min_p=min_p,
        repetition_penalty=repetition_penalty,
        presence_penalty=presence_penalty,
        frequency_penalty=frequency_penalty,
        seed=seed,
        stop=tuple(stop or ()),
        stop_token_ids=tuple(stop_token_id or ()),
        bad_words=tuple(bad_word or ()),
        logprobs=logprobs,
        timeout_ms=timeout_ms,
        ignore_eos=ignore_eos,
        n=n,
        best_of=best_of,
        beam_width=beam_width,
        length_penalty=length_penalty,
        prompt_logprobs=prompt_logprobs,
        guided=guided_params(json_schema, regex, ebnf, choice or (), json_object),
        adapter=adapter,
        cache_salt=cache_salt,
    )
    variables = _template_variables(template_var or [])
    text = "" if chat or input_file is not None else _read_prompt(prompt)
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
        "draft": draft,
        "speculation": speculation,
        "max_draft_len": max_draft_len,
        "weights": weights,
        "verify_hashes": verify_hashes,
    }
    with options.open_engine(engine_dir, target, threads, **opening) as engine:
        load_adapters(engine, lora or ())
        maker = PromptMaker(engine, params, raw=raw, system=system, template_variables=variables)
        if chat:
            run_chat(engine, maker)
        elif input_file is not None:
            sys.exit(run_lines(engine, maker, input_file, output_file, keep_going=keep_going))
        else:
            _run_one(engine, maker, text, as_json=as_json)


def _check_modes(
    prompt: str | None, chat: bool, input_file: Path | None, output_file: Path | None, as_json: bool
) -> None:
    given = [name for name, on in (("PROMPT", prompt), ("--chat", chat), ("--input", input_file)) if on]
    if len(given) > 1:
        raise InvalidArgumentError(
            f"{' and '.join(given)} are different ways to give prompts; use one of them"
        )
    if output_file is not None and str(output_file) != "-":
        check_output("--output", output_file)
    if output_file is not None and input_file is None:
        raise InvalidArgumentError(
            "--output holds the answers of --input; give --input, or redirect the output"
        )
    if as_json and chat:
        raise InvalidArgumentError("--chat is for people; leave --json out, or use --input with messages")


def _check_chat(chat: bool, n: int, beam_width: int) -> None:
    if chat and (n > 1 or beam_width > 1):
        raise InvalidArgumentError("--chat goes on from one answer; leave -n and --beam-width out")


def _template_variables(assignments: list[str]) -> dict[str, Any]:
    variables: dict[str, Any] = {}
    for assignment in assignments:
        name, separator, value = assignment.partition("=")
        if not separator or not name.isidentifier() or name in ("self", "messages"):
            raise InvalidArgumentError(
                f"--template-var is {assignment!r}, it must be NAME=JSON, e.g. thinking=false, and not set the messages"
            )
        try:
            variables[name] = json.loads(value)
        except (ValueError, RecursionError):
            variables[name] = value  # a bare word is a text
    return variables


def _read_prompt(prompt: str | None) -> str:
    if prompt is not None and prompt != "-":
        return prompt
    if prompt is None and sys.stdin.isatty():
        raise InvalidArgumentError("there is no prompt; give PROMPT, --chat or --input, or pipe a text in")
    text = sys.stdin.read()
    if not text:
        raise InvalidArgumentError("standard input holds no prompt; pipe a text in, or give PROMPT")
    return text


def _run_one(engine: Engine, maker: PromptMaker, text: str, *, as_json: bool) -> None:
    prompt = maker.from_text(text)
    handle = engine.submit(prompt.ids, prompt.params, new_text=prompt.new_text)
    with handle:
        if as_json:
            print_json(completion_fields(handle.result()) | {"target": engine.target}, indent=None)
            return
        if prompt.params.num_outputs > 1:
            for output in handle.result().outputs:
                print(f"[{output.index}] {terminal_text(output.text)}", flush=True)
            return
        for delta in handle:
            print(terminal_text(delta.text), end="", flush=True)
        print()
