"""Calibration samples: windows of token ids out of texts and chats, none of them padded.

Documents are shuffled by the seed, tokenized, and packed end to end; the stream is cut into windows of one length and
what is left over is dropped. So every position of every window is real text, and no padding can reach a statistic. A
tokenizer that begins texts with a token (BOS) begins every window with it, as it would a prompt.
"""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from ..runtime.errors import EngineFileError, InvalidArgumentError
from ..runtime.tokenizer import Tokenizer
from .text_files import json_lines, leading_ids, read_utf8, text_of

SHIPPED = "shipped"
SHIPPED_FILES = ("calib.jsonl", "calib_code.jsonl")
MIN_TOKENS = 512  # fewer say little about any channel

_CHARS_PER_TOKEN = 64  # at most, of a text as a whole

# What quantize.py of TensorRT-LLM and its kin take from the network.
_REMOTE = (
    "cnn_dailymail",
    "pileval",
    "pile",
    "wikitext",
    "c4",
    "ptb",
    "magpie",
    "nemotron",
    "lambada",
    "alpaca",
)

Document = str | list[dict[str, Any]]
"""A text, or the messages of a chat."""


@dataclasses.dataclass(frozen=True)
class Samples:
    """Windows of token ids.

    ids : (N, L) int64, to calibrate with
    held_out : (M, L) int64, of the same documents and in none of `ids`; may be empty
    source : "shipped" or the file
    num_documents : how many documents were packed
    wanted : how many windows were asked for; N may be less
    """

    ids: npt.NDArray[np.int64]
    held_out: npt.NDArray[np.int64]
    source: str
    num_documents: int
    wanted: int


def resolve_source(name: str | None) -> Path | None:
    """Return the file of --calib-data or --calib_dataset, None for the shipped set.

    raises InvalidArgumentError for a data set that would come from the network, and for a file that is not there
    """
    if name is None or name == SHIPPED:
        return None
    path = Path(name)
    if path.is_file():
        if path.suffix not in (".txt", ".jsonl", ".json"):
            raise InvalidArgumentError(
                f"--calib-data {name}: is no .txt or .jsonl file; save the texts as one"
            )
        return path
    if path.exists():
        raise InvalidArgumentError(f"--calib-data {name}: is no file; give a .txt or .jsonl file")
    offline = (
        "nothing is fetched here: leave it out for the shipped set, or save the texts as a .txt or .jsonl file "
        '({"text": ...} or {"messages": [...]} a line) and give that'
    )
    if path.suffix in (".txt", ".jsonl", ".json"):
        raise InvalidArgumentError(f"--calib-data {name}: does not exist; give a .txt or .jsonl file")
    known = any(one in name.lower() for one in _REMOTE)
    raise InvalidArgumentError(
        f"--calib-data {name!r} " + ("is a data set of the network; " if known else "is no file; ") + offline
    )


def load_documents(source: Path | None) -> list[Document]:
    """Return the documents of a file, or of the shipped set; every line is checked.

    source : .txt, documents between blank lines; .jsonl, an object a line with "text" or "messages"
    raises InvalidArgumentError with the line number
    """
    if source is None:
        folder = Path(__file__).parent / "data"
        return [one for name in SHIPPED_FILES for one in _read_jsonl(folder / name)]
    documents = _read_txt(source) if source.suffix == ".txt" else list(_read_jsonl(source))
    if not documents:
        raise InvalidArgumentError(f"{source}: is empty; give texts like those the model will see")
    return documents


def _read_txt(path: Path) -> list[Document]:
    blocks: list[list[str]] = [[]]
    for line in read_utf8(path).splitlines():
        if line.strip():
            blocks[-1].append(line)
        elif blocks[-1]:
            blocks.append([])
    return ["\n".join(block) for block in blocks if block]


def _read_jsonl(path: Path) -> Iterator[Document]:
    for where, value in json_lines(path):
        yield _document(value, where)


def _document(value: Mapping[str, Any], where: str) -> Document:
    text = text_of(value, where)
    if text is not None:
        return text
    messages = value.get("messages")
    if messages is None:
        raise InvalidArgumentError(
            f'{where}: has neither "text" nor "messages", it has {", ".join(map(repr, value)) or "nothing"}'
        )
    good = isinstance(messages, list) and all(
        isinstance(one, Mapping) and isinstance(one.get("role"), str) for one in messages
    )
    if not good or not messages:
        raise InvalidArgumentError(f'{where}: "messages" must be a list of objects with "role" and "content"')
    return [dict(one) for one in messages]


def make_samples(
    documents: Sequence[Document],
    tokenizer: Tokenizer,
    *,
    size: int,
    length: int,
    seed: int,
    source: str,
    vocab_size: int,
    held_out: int = 0,
) -> Samples:
    """Return up to `size` windows of `length` tokens and up to `held_out` more; the same seed gives the same ones.

    raises InvalidArgumentError when there is not even one window, or a token is beyond the model's vocabulary
    """
    order = list(documents)
    random.Random(seed).shuffle(order)
    bos = leading_ids(tokenizer)
    body = length - len(bos)
    if body < 1:
        raise InvalidArgumentError(f"--calib-length is {length}, it must be 2 or more")
    stream: list[int] = []
    used = 0
    for document in order:
        missing = (size + held_out) * body - len(stream)
        if isinstance(document, str):
            document = document[: missing * _CHARS_PER_TOKEN]  # one file can be one document of gigabytes
        ids = _encode(document, tokenizer, source, bool(bos))
        stream += ids[len(bos) :] if ids[: len(bos)] == bos else ids
        used += 1
        if len(stream) >= (size + held_out) * body:
            break
    count = len(stream) // body
    if not count or len(stream) < min(MIN_TOKENS, size * body):
        raise InvalidArgumentError(
            f"{source}: has {len(stream)} tokens, too few to calibrate with: a sample takes {body} and "
            f"{min(MIN_TOKENS, size * body)} are the least; give more text, or leave --calib-data out for the "
            "shipped set"
        )
    _check_ids(stream, vocab_size, source)
    table = np.array(stream[: count * body], np.int64).reshape(count, body)
    table = np.concatenate([np.full((count, len(bos)), bos or 0, np.int64), table], axis=1)
    windows = min(size, max(1, count - held_out) if count > size else count)
    return Samples(table[:windows], table[windows : windows + held_out], source, used, size)


def _encode(document: Document, tokenizer: Tokenizer, source: str, adds_special: bool) -> list[int]:
    if isinstance(document, str):
        return tokenizer.encode(document, add_special_tokens=adds_special)
    if tokenizer.chat_template is None:
        if source != SHIPPED:
            raise InvalidArgumentError(
                f'{source}: has "messages", and the checkpoint has no chat template to write them out; give "text"'
            )
        return tokenizer.encode(_transcript(document), add_special_tokens=adds_special)
    try:
        text = tokenizer.chat_template.render(document, add_generation_prompt=False)
    except (InvalidArgumentError, EngineFileError):
        if source != SHIPPED:
            raise
        text = _transcript(document)  # e.g. a template that knows no system role
    return tokenizer.encode(text, add_special_tokens=False)


def _transcript(messages: Sequence[Mapping[str, Any]]) -> str:
    return "\n\n".join(f"{one['role']}: {one.get('content', '')}" for one in messages)


def _check_ids(ids: Sequence[int], vocab_size: int, source: str) -> None:
    top = max(ids)
    if top >= vocab_size:
        raise InvalidArgumentError(
            f"{source}: became token id {top}, the model's vocabulary has {vocab_size}; the tokenizer belongs to "
            "another model"
        )
