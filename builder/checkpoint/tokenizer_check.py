"""Checks that a tokenizer belongs to a model: no token id may lie outside the embedding table."""

from __future__ import annotations

import contextlib
import ctypes
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ...runtime.errors import CheckpointError, EngineFileError
from ...runtime.file_kind import no_file
from ...runtime.tokenizer import Tokenizer


def check_tokenizer(path: Path, vocab_size: int) -> None:
    """Check a tokenizer.json; CheckpointError when it is missing, damaged, or has ids of vocab_size and above.

    A table larger than the tokenizer is usual padding.
    """
    try:
        if (wrong := no_file(path)) is not None:
            raise CheckpointError(
                f"{path}: {wrong}; save the tokenizer with transformers (AutoTokenizer.from_pretrained(dir)"
                ".save_pretrained(dir)), which writes it"
            )
        content = path.read_bytes()
    except OSError as e:
        raise CheckpointError(f"{path}: cannot be read ({e.strerror}); check its rights") from e
    check_tokenizer_bytes(content, vocab_size, str(path))


def check_tokenizer_opens(files: Mapping[str, Path | bytes], where: str) -> None:
    """Check that the runtime can open these files, chat template included; CheckpointError says why not.

    files : name -> path or content, as Checkpoint.tokenizer_files gives them
    where : the checkpoint, for the error
    """
    try:
        contents = {name: one if isinstance(one, bytes) else one.read_bytes() for name, one in files.items()}
        Tokenizer.from_files(contents, where)
    except OSError as e:
        raise CheckpointError(f"{e.filename}: cannot be read ({e.strerror}); check its rights") from e
    except EngineFileError as e:
        raise CheckpointError(f"{e}; correct it, or download the checkpoint again") from e
    _return_memory()


def _return_memory() -> None:
    """Give freed memory back to the system: a tokenizer takes 30 MB and more, which glibc would keep all build long."""
    with contextlib.suppress(AttributeError, OSError):
        ctypes.CDLL(None).malloc_trim(0)


def check_tokenizer_bytes(content: bytes, vocab_size: int, where: str) -> None:
    """Check the bytes of a tokenizer.json, see check_tokenizer."""
    try:
        ids = _ids(json.loads(content.decode("utf-8")))
    except (ValueError, RecursionError, TypeError, KeyError, AttributeError) as e:
        raise CheckpointError(f"{where}: is no tokenizer.json ({e!r}); download or save it again") from e
    top = max(ids, default=-1)
    if top < 0:
        raise CheckpointError(f"{where}: has no tokens; download or save it again")
    if top >= vocab_size:
        raise CheckpointError(
            f"{where}: has token ids up to {top}, the model's vocabulary has {vocab_size}; the tokenizer belongs to "
            "another model"
        )


def _ids(tokenizer: Any) -> list[int]:
    vocab = tokenizer["model"]["vocab"]
    ids = list(vocab.values()) if isinstance(vocab, dict) else list(range(len(vocab)))
    ids += [token["id"] for token in tokenizer.get("added_tokens") or ()]
    if not all(isinstance(token_id, int) for token_id in ids):
        raise ValueError("a token id is not an integer")
    return ids
