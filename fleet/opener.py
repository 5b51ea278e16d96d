"""The checkpoints of a fleet: each opened once, and held to its pin."""

from __future__ import annotations

import dataclasses
import hashlib
from pathlib import Path

from ..builder.checkpoint import Checkpoint, open_checkpoint
from ..builder.checkpoint.hash_cache import HashCache
from ..runtime.errors import CheckpointError, Error
from ..runtime.manifest import hash_entries
from ..runtime.manifest_entries import FileEntry
from .engines import FleetEngine
from .fleet_file import Source
from .settle import Settled, plain, settle


@dataclasses.dataclass(frozen=True)
class OpenedEngine:
    """What the units of an engine share.

    fingerprint : of the checkpoint
    tokenizer : the hash over its tokenizer's files that a manifest has
    original : of an engine with a gate: the fingerprint of the checkpoint it is compared with; else ""
    """

    checkpoint: Checkpoint
    fingerprint: str
    tokenizer: str
    original: str
    settled: Settled


class Opener:
    """Opens the checkpoints of one fleet. hashes : what remembers their fingerprints."""

    def __init__(self, hashes: HashCache) -> None:
        self._hashes = hashes
        self._opened: dict[tuple[Path, Path | None, int | None], Checkpoint] = {}

    def open(self, engine: FleetEngine) -> OpenedEngine:
        """Return an engine's checkpoint with what is settled against it.

        raises CheckpointError, InvalidArgumentError naming the line of the file
        """
        length = engine.limits["max_seq_len"].value if "max_seq_len" in engine.limits else None
        checkpoint, fingerprint = self._open(engine.source, length)
        settled = settle(engine, checkpoint)
        has_gate = engine.recipe.gate is not None
        original = self._open(engine.model.source, length)[1] if has_gate else ""
        return OpenedEngine(checkpoint, fingerprint, _tokenizer_digest(checkpoint), original, settled)

    def _open(self, source: Source, max_seq_len: int | None) -> tuple[Checkpoint, str]:
        """Return a checkpoint, opened for sequences of that length, and its fingerprint."""
        key = (source.path, source.tokenizer, max_seq_len)
        try:
            if key not in self._opened:
                self._opened[key] = open_checkpoint(source.path, max_seq_len, source.tokenizer)
            found = self._opened[key].fingerprint(self._hashes)
        except Error as error:
            raise type(error)(f"{source.where}: {plain(str(error))}") from error
        if source.revision not in (None, found):
            raise CheckpointError(
                f"{source.where}: {source.path} has the fingerprint {found}, its revision is {source.revision}; get "
                "that checkpoint, or change revision if this one is meant"
            )
        return self._opened[key], found


def _tokenizer_digest(checkpoint: Checkpoint) -> str:
    entries = []
    for name, content in checkpoint.tokenizer_files().items():
        data = content if isinstance(content, bytes) else content.read_bytes()
        entries.append(FileEntry(f"tokenizer/{name}", len(data), hashlib.sha256(data).hexdigest()))
    return hash_entries(entries)
