"""A conversation in the terminal."""

from __future__ import annotations

import contextlib
import sys
from typing import Any

from ..runtime.engine import Engine
from ..runtime.errors import Error
from ._prompts import PromptMaker
from ._terminal import terminal_text

_HELP = "Ctrl-C stops an answer, Ctrl-D ends; /reset forgets the conversation."


def run_chat(engine: Engine, maker: PromptMaker) -> None:
    """Read lines and stream answers until the end of the input. Each turn sees the whole conversation."""
    interactive = sys.stdin.isatty()
    if interactive:
        with contextlib.suppress(ImportError):
            import readline  # noqa: F401 - gives input() editing and history

        print(_HELP, file=sys.stderr)
    messages: list[dict[str, Any]] = []
    while True:
        try:
            line = input("> " if interactive else "").strip()
        except EOFError:
            return
        except KeyboardInterrupt:
            print(f"\n{_HELP}", file=sys.stderr)
            continue
        if line == "/reset":
            messages.clear()
        elif line:
            _turn(engine, maker, messages, line)


def _turn(engine: Engine, maker: PromptMaker, messages: list[dict[str, Any]], line: str) -> None:
    """Add one question and its answer to the conversation; an error leaves the conversation as it was."""
    messages.append({"role": "user", "content": line})
    try:
        messages.append({"role": "assistant", "content": _answer(engine, maker, messages)})
    except Error as error:
        messages.pop()
        print(f"plansmith: {error}\n(/reset begins a new conversation)", file=sys.stderr)


def _answer(engine: Engine, maker: PromptMaker, messages: list[dict[str, Any]]) -> str:
    prompt = maker.from_messages(messages)
    handle = engine.submit(prompt.ids, prompt.params, new_text=prompt.new_text)
    parts: list[str] = []
    while True:
        try:
            for delta in handle:
                parts.append(delta.text)
                print(terminal_text(delta.text), end="", flush=True)
            break
        except KeyboardInterrupt:
            handle.cancel()  # what is there of the answer stays in the conversation
    print()
    return "".join(parts)
