"""The checkpoints of a fleet: each opened once, and held to its pin; a pinned one may be known from the store alone."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import TYPE_CHECKING

from ..builder.checkpoint import Checkpoint, open_checkpoint
from ..builder.checkpoint.hash_cache import HashCache
from ..runtime.errors import CheckpointError, EngineFileError, Error
from ..runtime.manifest import hash_entries
from .absent_checkpoint import POINTER, absent_checkpoint, missing_weights
from .checkpoint_facts import CheckpointFacts
from .engines import FleetEngine
from .fleet_file import Source
from .settle import Settled, plain, settle
from .small_files import tokenizer_entries

if TYPE_CHECKING:
    from .facts_store import FactsFinder


@dataclasses.dataclass(frozen=True)
class OpenedEngine:
    """What the units of an engine share.

    fingerprint : of the checkpoint
    tokenizer : the hash over its tokenizer's files that a manifest has
    original : of an engine with a gate: the fingerprint of the checkpoint it is compared with; else ""
    missing_weights : what is not here of the checkpoint, which is known from the store then; "" = nothing
    """

    checkpoint: Checkpoint
    fingerprint: str
    tokenizer: str
    original: str
    settled: Settled
    missing_weights: str


@dataclasses.dataclass(frozen=True)
class _Opened:
    """A checkpoint; fields as of OpenedEngine."""

    checkpoint: Checkpoint
    fingerprint: str
    tokenizer: str
    missing_weights: str = ""


class Opener:
    """Opens the checkpoints of one fleet.

    hashes : what remembers their fingerprints
    finder : what knows pinned ones whose weights are not here; None = nothing does
    """

    def __init__(self, hashes: HashCache, finder: FactsFinder | None = None) -> None:
        self._hashes = hashes
        self._finder = finder
        self._opened: dict[tuple[Path, Path | None, int | None], _Opened] = {}

    def open(self, engine: FleetEngine) -> OpenedEngine:
        """Return an engine's checkpoint with what is settled against it.

        raises CheckpointError, InvalidArgumentError naming the line of the file
        """
        found = self._open(engine, engine.source)
        settled = settle(engine, found.checkpoint)
        original = "" if engine.recipe.gate is None else self._original(engine)
        return OpenedEngine(
            found.checkpoint, found.fingerprint, found.tokenizer, original, settled, found.missing_weights
        )

    def _original(self, engine: FleetEngine) -> str:
        """Return the fingerprint of the checkpoint that an engine is compared with, of which nothing else is asked."""
        source = engine.model.source
        if source.revision is not None and missing_weights(source.path):
            return source.revision
        return self._open(engine, source).fingerprint

    def _open(self, engine: FleetEngine, source: Source) -> _Opened:
        """Return one of an engine's checkpoints, opened for its sequences, or what stands in for it."""
        key = (source.path, source.tokenizer, length_of(engine))
        if key not in self._opened:
            try:
                checkpoint = open_checkpoint(source.path, length_of(engine), source.tokenizer)
                found = checkpoint.fingerprint(self._hashes)
                tokenizer = hash_entries(tokenizer_entries(checkpoint))
            except Error as error:
                lack = missing_weights(source.path)
                if not lack:
                    raise type(error)(f"{source.where}: {plain(str(error))}") from error
                self._opened[key] = self._stand_in(engine, source, lack, error)
            else:
                self._opened[key] = _Opened(checkpoint, found, tokenizer)
        opened = self._opened[key]
        if source.revision not in (None, opened.fingerprint):
            raise CheckpointError(
                f"{source.where}: {source.path} has the fingerprint {opened.fingerprint}, its revision is "
                f"{source.revision}; get that checkpoint, or change revision if this one is meant"
            )
        return opened

    def _stand_in(self, engine: FleetEngine, source: Source, lack: str, error: Error) -> _Opened:
        """Return what the store knows of a checkpoint whose weights are not here; error : what opening it raised."""
        if source.revision is None:
            told = f"{source.path}: {lack}; run `git lfs pull`" if POINTER in lack else plain(str(error))
            raise CheckpointError(
                f"{source.where}: {told}; with its revision in the file, what a store "
                "knows of it is enough to plan"
            ) from error
        facts = self._facts(engine, source, source.revision, lack)
        try:
            checkpoint, known = absent_checkpoint(source, facts, lack)
        except OSError as unread:
            raise CheckpointError(
                f"{source.where}: {unread.filename} cannot be read ({unread.strerror}); leave it out, or mend that"
            ) from unread
        return _Opened(checkpoint, source.revision, known.tokenizer_digest, lack)

    def _facts(self, engine: FleetEngine, source: Source, revision: str, lack: str) -> CheckpointFacts:
        absent = (
            f"{source.where}: the weights of {source.path} are not here ({lack}), its revision is {revision}"
        )
        if self._finder is None:
            raise CheckpointError(f"{absent}; fetch the checkpoint")
        try:
            found = self._finder.find(engine.model.name, revision, length_of(engine))
        except EngineFileError as error:
            raise CheckpointError(
                f"{absent}, and what a store knows of it cannot be used: {error}. Or fetch the checkpoint"
            ) from error
        if isinstance(found, str):
            raise CheckpointError(
                f"{absent}, and {found}; fetch the checkpoint, or run `plansmith fleet build` or `plansmith fleet "
                "push` once where it is"
            )
        return found


def length_of(engine: FleetEngine) -> int | None:
    """Return the max_seq_len that an engine's checkpoint is opened for; None = the file says none."""
    given = engine.limits.get("max_seq_len")
    return None if given is None else given.value
