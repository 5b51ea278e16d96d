"""The files of a tokenizer, beside the weights or given on their own, and the token ids that they name."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ...runtime.errors import CheckpointError

TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "chat_template.jinja",
    "generation_config.json",
    "special_tokens_map.json",
)
_ID_FIELDS = ("bos_token_id", "eos_token_id", "pad_token_id")


def tokenizer_files_in(directory: Path) -> dict[str, Path]:
    """Return the tokenizer's files that a directory has, name -> path."""
    paths = {name: directory / name for name in TOKENIZER_FILES}
    return {name: path for name, path in paths.items() if path.is_file()}


def tokenizer_directory(path: Path) -> Path:
    """Return the directory of a tokenizer that was given as one, or as its tokenizer.json.

    raises CheckpointError when there is no tokenizer.json.
    """
    directory = path.parent if path.name == "tokenizer.json" else path
    if not (directory / "tokenizer.json").is_file():
        what = "has no tokenizer.json" if directory.is_dir() else "is no directory and no tokenizer.json"
        raise CheckpointError(
            f"{path}: {what}; give --tokenizer-dir a directory that has one (transformers writes it: "
            "AutoTokenizer.from_pretrained(dir).save_pretrained(dir))"
        )
    return directory


def special_ids(directory: Path) -> dict[str, Any]:
    """Return bos_token_id, eos_token_id and pad_token_id (None where nothing says it) as a config.json has them.

    The end-of-sequence ids of generation_config.json go first, then config.json, then the names in
    tokenizer_config.json. raises CheckpointError for a file that is damaged.
    """
    generation, config = _json(directory / "generation_config.json"), _json(directory / "config.json")
    if "model_type" not in config:
        config = {}
    named = _named_ids(directory)
    ids: dict[str, Any] = {}
    for field in _ID_FIELDS:
        order = (generation, config) if field == "eos_token_id" else (config, generation)
        ids[field] = next((one[field] for one in (*order, named) if one.get(field) is not None), None)
    return ids


def _named_ids(directory: Path) -> dict[str, int]:
    """Return the ids of the tokens that tokenizer_config.json calls bos_token, eos_token and pad_token."""
    names = _json(directory / "tokenizer_config.json")
    tokenizer = _json(directory / "tokenizer.json")
    model = tokenizer.get("model")
    vocab = model.get("vocab") if isinstance(model, dict) else None
    known: dict[Any, Any] = dict(vocab) if isinstance(vocab, dict) else {}
    for token in tokenizer.get("added_tokens") or ():
        if isinstance(token, dict):
            known[token.get("content")] = token.get("id")
    found = {}
    for field in _ID_FIELDS:
        token = names.get(field.removesuffix("_id"))
        text = token.get("content") if isinstance(token, dict) else token
        if isinstance(text, str) and isinstance(known.get(text), int):
            found[field] = known[text]
    return found


def _json(path: Path) -> Mapping[str, Any]:
    """Return a file's object, {} where there is none."""
    try:
        value = json.loads(path.read_bytes().decode("utf-8"))
    except FileNotFoundError:
        return {}
    except OSError as e:
        raise CheckpointError(f"{path}: cannot be read ({e.strerror}); check its rights") from e
    except (ValueError, RecursionError) as e:
        raise CheckpointError(f"{path}: is not valid JSON ({e}); download or save it again") from e
    if not isinstance(value, dict):
        raise CheckpointError(f"{path}: holds a {type(value).__name__}, wanted a JSON object; save it again")
    return value
