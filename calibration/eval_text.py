"""The text that engines are evaluated on: the one that comes with plansmith, or the user's, cut into windows."""

from __future__ import annotations

import dataclasses
import pathlib
from collections.abc import Sequence

from ..builder.checkpoint import Checkpoint
from ..runtime.errors import InvalidArgumentError
from ..runtime.tokenizer import Tokenizer
from .text_files import json_lines, leading_ids, read_utf8, text_of

DATA = pathlib.Path(__file__).parent / "data"
OWN_TEXT = DATA / "eval.txt"

MIN_CONTEXT = 4  # below, a window's second half is hardly a context

_CHARS_PER_TOKEN = 16  # a tokenizer that makes longer tokens than this of a text is not known


@dataclasses.dataclass(frozen=True)
class EvalText:
    """A text and what reports call it."""

    name: str
    text: str

    def encode(self, tokenizer: Tokenizer, length: int) -> tuple[list[int], list[int]]:
        """Return the ids that every window begins with (a BOS, or none), and at most `length` ids of the text."""
        ids = tokenizer.encode(self.text[: length * _CHARS_PER_TOKEN], add_special_tokens=False)
        return leading_ids(tokenizer), ids[:length]


def tokenizer_of(checkpoint: Checkpoint) -> Tokenizer:
    """Return a checkpoint's tokenizer."""
    files = {
        name: one if isinstance(one, bytes) else one.read_bytes()
        for name, one in checkpoint.tokenizer_files().items()
    }
    return Tokenizer.from_files(files, str(checkpoint.path))


def read_text(path: pathlib.Path | None) -> EvalText:
    """Return a .txt file's text, or the "text" of a .jsonl file's lines with blank lines between; None = our own.

    raises InvalidArgumentError for another kind of file, text that is not UTF-8, damaged lines and an empty text
    """
    if path is None:
        return EvalText("plansmith's evaluation text", OWN_TEXT.read_text(encoding="utf-8"))
    if path.suffix not in (".txt", ".jsonl", ".md"):
        raise InvalidArgumentError(
            f"--text {path} ends in {path.suffix or 'nothing'}, it must be a .txt file, or .jsonl with an object with "
            '"text" a line'
        )
    if not path.is_file():
        raise InvalidArgumentError(f"--text {path} is not a file; give a .txt or .jsonl file that exists")
    text = _join_lines(path) if path.suffix == ".jsonl" else read_utf8(path)
    if not text.strip():
        raise InvalidArgumentError(f"--text {path} is empty; give a text of some thousand tokens")
    return EvalText(path.name, text)


def _join_lines(path: pathlib.Path) -> str:
    texts = []
    for where, value in json_lines(path):
        text = text_of(value, where)
        if text is None:
            raise InvalidArgumentError(f'{where}: has no "text"; a line holds an object with "text"')
        texts.append(text)
    return "\n\n".join(texts)


def windows(prefix: Sequence[int], ids: Sequence[int], length: int, name: str) -> list[tuple[int, ...]]:
    """Return the text as rows of `length` tokens, the prefix counted, none twice; what is left over is dropped.

    raises InvalidArgumentError when the text is shorter than one row, or the length too small to be a context
    """
    step = length - len(prefix)
    if length < MIN_CONTEXT or step < 2:
        raise InvalidArgumentError(
            f"a context of {length} tokens is too short to score half of it; give --contexts of {MIN_CONTEXT} and more"
        )
    if len(ids) < step:
        raise InvalidArgumentError(
            f"{name} has {len(ids)} tokens (--length is the most that are taken), a context needs {length}; give a "
            "longer text, more --length, or shorter --contexts"
        )
    return [tuple(prefix) + tuple(ids[at : at + step]) for at in range(0, len(ids) - step + 1, step)]
