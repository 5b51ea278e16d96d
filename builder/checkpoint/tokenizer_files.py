"""The files of a tokenizer, beside the weights or given on their own, and the token ids that they name."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from ...runtime.errors import CheckpointError
from .json_file import read_optional_json

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
    generation, config = (
        read_optional_json(directory / "generation_config.json"),
        read_optional_json(directory / "config.json"),
    )
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
    names = read_optional_json(directory / "tokenizer_config.json")
    tokenizer = read_optional_json(directory / "tokenizer.json")
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
