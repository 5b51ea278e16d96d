"""The small files of a checkpoint and its tokenizer: what each is, told by its hash, or Git LFS's."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Collection
from pathlib import Path

from ..builder.checkpoint import Checkpoint
from ..builder.checkpoint.quantized import QUANT_CONFIG
from ..builder.checkpoint.tokenizer_files import TOKENIZER_FILES
from ..runtime.manifest_entries import FileEntry
from .fleet_file import Source

TRTLLM = "tensorrt_llm"
GGUF = "gguf"
_GENERATION = "generation_config.json"
# What Git LFS leaves where it did not fetch a file: its format asks for less than 1024 bytes.
_MAX_POINTER = 1023
_POINTER = re.compile(
    rb"version https://git-lfs\.github\.com/spec/v1\n(?:[^\n]+\n)*oid sha256:([0-9a-f]{64})\n(?:[^\n]+\n)*"
    rb"size ([0-9]{1,18})\n(?:[^\n]+\n)*"
)


def pointer(path: Path) -> tuple[str, int] | None:
    """Return the sha256 and size of the file that a pointer of Git LFS stands for; None for anything else."""
    if path.stat().st_size > _MAX_POINTER:
        return None
    found = _POINTER.fullmatch(path.read_bytes())
    return None if found is None else (found[1].decode(), int(found[2]))


def entry_of(name: str, path: Path) -> FileEntry | None:
    """Return what a file holds, under a name of ours; None where there is none. raises OSError as reading it does."""
    if not path.is_file():
        return None
    if (lfs := pointer(path)) is not None:
        return FileEntry(name, lfs[1], lfs[0])
    data = path.read_bytes()
    return FileEntry(name, len(data), hashlib.sha256(data).hexdigest())


def tokenizer_entries(checkpoint: Checkpoint) -> tuple[FileEntry, ...]:
    """Return the files of a checkpoint's tokenizer as a manifest names them."""
    entries = []
    for name, content in checkpoint.tokenizer_files().items():
        data = content if isinstance(content, bytes) else content.read_bytes()
        entries.append(FileEntry(f"tokenizer/{name}", len(data), hashlib.sha256(data).hexdigest()))
    return tuple(entries)


def read_files(source: Source, kind: str) -> dict[str, Path]:
    """Return the small files that a spec is read from, name -> where each is if it is; none of GGUF, which is one file.

    Those of the checkpoint are covered by its fingerprint. Of TensorRT-LLM's the ids of special tokens are the
    tokenizer's, and so may be in a config.json beside it.
    """
    if kind == GGUF:
        return {}
    names = (
        ("config.json", "quant_cfg.json") if kind == TRTLLM else ("config.json", _GENERATION, QUANT_CONFIG)
    )
    files = {f"checkpoint/{name}": source.path / name for name in names}
    if kind == TRTLLM and source.tokenizer is not None:
        files["tokenizer/config.json"] = tokenizer_folder(source) / "config.json"
    return files


def tokenizer_paths(source: Source, kind: str, read: Collection[str]) -> dict[str, Path]:
    """Return where a tokenizer's files are if they are, by the names of tokenizer_entries; none of GGUF.

    read : the names of read_files that the checkpoint has
    """
    if kind == GGUF:
        return {}
    files = {f"tokenizer/{name}": tokenizer_folder(source) / name for name in TOKENIZER_FILES}
    if f"checkpoint/{_GENERATION}" in read:
        files[f"tokenizer/{_GENERATION}"] = (
            source.path / _GENERATION
        )  # the model's goes before the tokenizer's
    return files


def tokenizer_folder(source: Source) -> Path:
    """Return the directory of a checkpoint's tokenizer, given as one or as its tokenizer.json."""
    if source.tokenizer is None:
        return source.path
    return source.tokenizer.parent if source.tokenizer.name == "tokenizer.json" else source.tokenizer
