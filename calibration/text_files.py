"""Text that users give to calibrate or evaluate with, read in one way, and what a tokenizer puts before a text."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from ..runtime.errors import InvalidArgumentError
from ..runtime.tokenizer import Tokenizer


def read_utf8(path: Path) -> str:
    """Return a file's text, without a byte order mark; InvalidArgumentError when it cannot be read or is not UTF-8."""
    try:
        return path.read_bytes().decode("utf-8-sig")
    except OSError as error:
        raise InvalidArgumentError(f"{path}: cannot be read ({error.strerror}); check its rights") from error
    except UnicodeDecodeError as error:
        raise InvalidArgumentError(f"{path}: is not UTF-8 ({error}); save it as UTF-8") from error


def json_lines(path: Path) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Yield ("file:line number", object) of a .jsonl file's lines that are not empty.

    raises InvalidArgumentError for a line that is no JSON object. Newlines alone end lines: strings may hold U+2028.
    """
    for number, line in enumerate(read_utf8(path).split("\n"), 1):
        if line.strip():
            where = f"{path}:{number}"
            yield where, _object(line, where)


def _object(line: str, where: str) -> Mapping[str, Any]:
    try:
        value = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise InvalidArgumentError(
            f'{where}: is not JSON ({error}); every line is an object, e.g. {{"text": "..."}}'
        ) from None
    if not isinstance(value, Mapping):
        raise InvalidArgumentError(f'{where}: is a {type(value).__name__}, it must be an object with "text"')
    try:
        json.dumps(value, ensure_ascii=False).encode()
    except UnicodeEncodeError:
        raise InvalidArgumentError(
            f"{where}: has half of a character in UTF-16 (\\ud800 to \\udfff); write the character whole"
        ) from None
    return value


def text_of(value: Mapping[str, Any], where: str) -> str | None:
    """Return a line's "text", None where it has none; InvalidArgumentError when it is no string."""
    text = value.get("text")
    if "text" in value and not isinstance(text, str):
        raise InvalidArgumentError(f'{where}: "text" is a {type(text).__name__}, it must be a string')
    return text


def leading_ids(tokenizer: Tokenizer) -> list[int]:
    """Return what the tokenizer puts before every text: a BOS, or nothing. What it puts behind is not among it."""
    plain, marked = tokenizer.encode("a", add_special_tokens=False), tokenizer.encode("a")
    starts = (at for at in range(len(marked)) if marked[at : at + len(plain)] == plain)
    return marked[: next(starts, 0)]
