"""A checkpoint whose weights are not on this machine: what of it is, and what stands in for it in a plan."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any, NoReturn

from ..builder.checkpoint import Checkpoint, WeightSource
from ..builder.checkpoint.trtllm.config import read_mapping
from ..builder.checkpoint.trtllm.kinds import is_trtllm_checkpoint
from ..builder.scheme import Array
from ..runtime.errors import CheckpointError
from ..runtime.file_kind import MISSING, no_file
from .checkpoint_facts import CheckpointFacts
from .fleet_file import Source
from .small_files import TRTLLM, entry_of, pointer, read_files, tokenizer_paths

_SINGLE, _INDEX = "model.safetensors", "model.safetensors.index.json"
POINTER = "is a pointer of Git LFS"


def missing_weights(path: Path) -> str:
    """Return what a checkpoint lacks of its weights, in words; "" where all is there, or nobody can tell.

    Files are looked at, not read; what is wrong with them is for the reader to say.
    """
    try:
        if not path.is_dir():
            return _lack(path, "it")
        names = _weight_names(path)
        if not names:
            return "it has no weights"
        lacks = [lack for name in names if (lack := _lack(path / name, name))]
    except (OSError, ValueError, RecursionError, CheckpointError):
        return ""
    more = f", and {len(lacks) - 1} more" if len(lacks) > 1 else ""
    return f"{lacks[0]}{more}" if lacks else ""


def require_weights(source: Source) -> None:
    """Raise CheckpointError for a pinned checkpoint whose weights are not here: it has to be fetched first."""
    if source.revision is not None and (lack := missing_weights(source.path)):
        raise to_fetch(source, lack)


def to_fetch(source: Source, lack: str) -> CheckpointError:
    """Return the error of what needs a checkpoint's weights; lack : as missing_weights says."""
    return CheckpointError(
        f"{source.where}: the weights of {source.path} are needed and not here ({lack}); fetch the checkpoint of "
        f"revision {source.revision} first"
    )


def absent_checkpoint(
    source: Source, facts: CheckpointFacts, lack: str
) -> tuple[Checkpoint, CheckpointFacts]:
    """Return what stands in for a pinned checkpoint, and what is known of it with the tokenizer's files that are here.

    raises CheckpointError where files that are here are not those of the revision
    """
    for file, path in _others(source, facts):
        if file.startswith("tokenizer/"):
            raise _other_ids(source, path)
        raise CheckpointError(
            f"{source.where}: {path} is not that of revision {source.revision}; change revision if another checkpoint "
            "is meant, else get that one's file, or leave it out"
        )
    tokenizer = {file.path: file for file in facts.tokenizer}
    read = {file.path for file in facts.read}
    for name, path in tokenizer_paths(source, facts.kind, read).items():
        if (found := entry_of(name, path)) is not None:
            if facts.kind == TRTLLM and tokenizer.get(name) != found:
                raise _other_ids(source, path)
            tokenizer[name] = found
    known = dataclasses.replace(facts, tokenizer=tuple(tokenizer.values()))
    return Checkpoint(source.path, _AbsentSource(source, known, lack)), known


def _others(source: Source, facts: CheckpointFacts) -> list[tuple[str, Path]]:
    """Return the files that are here and are not what the facts were read from, by the facts' names."""
    told = {file.path: file for file in facts.read}
    found = {name: (path, entry_of(name, path)) for name, path in read_files(source, facts.kind).items()}
    return [
        (name, path) for name, (path, entry) in found.items() if entry is not None and told.get(name) != entry
    ]


def _other_ids(source: Source, path: Path) -> CheckpointError:
    return CheckpointError(
        f"{source.where}: {path} is not what it was when {source.path} was read, and a TensorRT-LLM checkpoint has "
        f"the ids of its special tokens from there; fetch the checkpoint of revision {source.revision}"
    )


def _weight_names(directory: Path) -> list[str]:
    """Return the names of the weight files that a directory ought to have."""
    if no_file(directory / _SINGLE) != MISSING:
        return [_SINGLE]
    index = directory / _INDEX
    if no_file(index) is None:
        if pointer(index) is not None:
            return [_INDEX]
        return _indexed(json.loads(index.read_bytes()))
    if is_trtllm_checkpoint(directory):
        config = directory / "config.json"
        tp_size, pp_size = read_mapping(json.loads(config.read_bytes()), str(config))
        return [f"rank{rank}.safetensors" for rank in range(tp_size * pp_size)]
    return []


def _indexed(index: Any) -> list[str]:
    """Return the files that an index names; ValueError for one that is damaged."""
    named = index.get("weight_map") if isinstance(index, dict) else None
    names = set(named.values()) if isinstance(named, dict) else set()
    if not names or not all(isinstance(name, str) and Path(name).name == name for name in names):
        raise ValueError("it is no index")
    return sorted(names)


def _lack(path: Path, name: str) -> str:
    if (wrong := no_file(path)) is not None:
        return f"{name} {wrong}" if wrong != MISSING or name != "it" else "it does not exist"
    return f"{name} {POINTER}" if pointer(path) is not None else ""


class _AbsentSource:
    """The source of a checkpoint that is not here."""

    stored: dict[str, int] = {}  # noqa: RUF012, it stays empty

    def __init__(self, source: Source, facts: CheckpointFacts, lack: str) -> None:
        self.kind = facts.kind
        self.spec = facts.spec
        self.quantization = facts.quantization
        self._source = source
        self._lack = lack

    @property
    def weights(self) -> WeightSource:
        return _AbsentWeights(self._source, self._lack)

    def tokenizer_files(self) -> dict[str, Path | bytes]:
        raise to_fetch(self._source, self._lack)

    def hashed_files(self) -> list[Path]:
        raise to_fetch(self._source, self._lack)


class _AbsentWeights:
    """Weights of which all that can be said is that they have to be fetched."""

    def __init__(self, source: Source, lack: str) -> None:
        self._source = source
        self._lack = lack

    def names(self) -> tuple[str, ...]:
        self._raise()

    def shape(self, name: str) -> tuple[int, ...]:
        self._raise()

    def get(self, name: str) -> Array:
        self._raise()

    def _raise(self) -> NoReturn:
        raise to_fetch(self._source, self._lack)
