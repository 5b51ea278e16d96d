"""A file of prompts, run in one in-flight batch."""

from __future__ import annotations

import contextlib
import dataclasses
import io
import os
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TextIO

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from ..runtime.engine import Completion, Engine, RequestHandle, SequenceOutput
from ..runtime.errors import Error, InvalidArgumentError
from ..runtime.stats import EngineStats
from ._files import is_special, naming, open_special
from ._output import json_text
from ._prompts import Line, PromptMaker


def run_lines(
    engine: Engine, maker: PromptMaker, input_file: Path, output_file: Path | None, *, keep_going: bool
) -> int:
    """Run all prompts of a file and write one line for each, in the file's order; returns the exit status.

    Every line is checked before the first is run. Without keep_going the first bad one is raised as the error.
    """
    lines = list(maker.lines(input_file))
    for line in lines:
        if line.error is not None and not keep_going:
            raise line.error
    if not lines:
        raise InvalidArgumentError(f"--input {input_file} has no lines; give one JSON object a line")
    begin, before = time.monotonic(), engine.stats()
    with _output(input_file, output_file) as out, _progress(len(lines)) as advance:
        handles = [_submit(engine, line, advance) for line in lines]
        num_failed = num_tokens = 0
        for line, handle in zip(lines, handles, strict=True):
            answer = _wait(line, handle)
            if isinstance(answer, Error) and not keep_going:
                raise type(answer)(f"line {line.number}: {answer}")
            num_failed += isinstance(answer, Error)
            num_tokens += 0 if isinstance(answer, Error) else answer.usage["completion_tokens"]
            out.write(json_text(_fields(line, answer), out.encoding) + "\n")
            out.flush()
    seconds = time.monotonic() - begin
    print(
        f"{len(lines) - num_failed} of {len(lines)} prompts answered, {num_tokens} tokens in {seconds:.1f} s "
        f"({num_tokens / seconds:.1f} tokens/s){_speculation(before, engine.stats())}",
        file=sys.stderr,
    )
    return 1 if num_failed else 0


def _speculation(before: EngineStats, after: EngineStats) -> str:
    """Return how drafting went, or nothing where there was none."""
    drafted = after.num_draft_tokens - before.num_draft_tokens
    if not drafted:
        return ""
    accepted = after.num_accepted_draft_tokens - before.num_accepted_draft_tokens
    return f", {accepted} of {drafted} draft tokens accepted ({100 * accepted / drafted:.0f} %)"


def _submit(engine: Engine, line: Line, advance: Callable[[], None]) -> RequestHandle | Error:
    if line.prompt is None:
        assert line.error is not None
        advance()
        return line.error

    def on_delta(item: Any) -> None:
        if isinstance(item, Error) or item.is_final:
            advance()

    prompt = line.prompt
    try:
        return engine.submit_when_room(prompt.ids, prompt.params, new_text=prompt.new_text, on_delta=on_delta)
    except Error as error:
        advance()
        return error


def _wait(line: Line, handle: RequestHandle | Error) -> Completion | Error:
    if isinstance(handle, Error):
        return handle
    try:
        return handle.result()
    except Error as error:
        return error


def _fields(line: Line, answer: Completion | Error) -> dict[str, Any]:
    fields: dict[str, Any] = {"line": line.number} | ({} if line.tag is None else {"id": line.tag})
    if isinstance(answer, Error):
        return fields | {"error": {"kind": type(answer).__name__, "message": str(answer)}}
    return fields | completion_fields(answer)


def completion_fields(completion: Completion) -> dict[str, Any]:
    """Return what --json and the lines of --output hold for one completion."""
    fields = _output_fields(completion.outputs[0]) | {"usage": completion.usage}
    if len(completion.outputs) > 1:
        fields["outputs"] = [{"index": one.index} | _output_fields(one) for one in completion.outputs]
    if completion.prompt_logprobs is not None:
        fields["prompt_logprobs"] = [
            None if entry is None else dataclasses.asdict(entry) for entry in completion.prompt_logprobs
        ]
    return fields


def _output_fields(output: SequenceOutput) -> dict[str, Any]:
    fields: dict[str, Any] = {
        "text": output.text,
        "token_ids": list(output.token_ids),
        "finish_reason": output.finish_reason,
        "stop_reason": output.stop_reason,
    }
    if output.logprobs is not None:
        fields["logprobs"] = [dataclasses.asdict(entry) for entry in output.logprobs]
    if output.cumulative_logprob is not None:
        fields["cumulative_logprob"] = output.cumulative_logprob
    return fields


@contextlib.contextmanager
def _output(input_file: Path, output_file: Path | None) -> Iterator[TextIO]:
    """Give the file to write to. It is called .partial until all is written; a device or a pipe is written as it is."""
    if output_file is None or str(output_file) == "-":
        yield sys.stdout
        return
    path = Path(os.path.realpath(output_file))  # a link stays one
    if path.is_dir():
        raise InvalidArgumentError(f"--output {output_file} is a directory; give a file's name")
    if path.exists() and path.samefile(input_file):
        raise InvalidArgumentError(f"--output {output_file} is the --input file; give another name")
    # The id of a line may hold half a UTF-16 pair, which JSON writes as it does.
    text: Any = {"encoding": "utf-8", "errors": "backslashreplace"}
    with naming(output_file):
        if is_special(output_file):
            with io.TextIOWrapper(open_special(output_file), **text) as out:
                yield out
            return
        partial = path.with_name(path.name + ".partial")
        try:
            with partial.open("w", **text) as out:
                yield out
        except BaseException:
            if partial.is_file() and partial.stat().st_size == 0:
                partial.unlink()  # else it holds answers that were paid for
            raise
        partial.replace(path)


@contextlib.contextmanager
def _progress(total: int) -> Iterator[Callable[[], None]]:
    """Give a function to call for each finished prompt; a bar on a terminal, nothing elsewhere."""
    console = Console(stderr=True)
    columns = (TextColumn("prompts"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console, disable=not console.is_terminal, transient=True) as progress:
        task = progress.add_task("prompts", total=total)
        yield lambda: progress.advance(task)
