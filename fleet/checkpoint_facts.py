"""What a fleet asks of a checkpoint besides its fingerprint, as a record that stands in for weights elsewhere.

A pinned checkpoint is known by its revision. What else goes into a unit's key is read of it by whoever has its files,
and kept in the store under that fingerprint: what the reader made of config and weights, and hashes of small files.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..builder import spec as spec_module
from ..builder.build_key import inputs_key
from ..builder.checkpoint import Checkpoint
from ..builder.scheme import Quantization
from ..builder.spec import DecoderSpec
from ..runtime.errors import EngineFileError
from ..runtime.manifest import hash_entries
from ..runtime.manifest_entries import FileEntry
from .fleet_file import Source
from .small_files import entry_of, read_files, tokenizer_entries
from .strict_json import read_as

if TYPE_CHECKING:
    from .compare import RecordLike

KIND = "checkpoint"
# What decides about what is read of a checkpoint's files, below the builder's folder.
_READER = ("checkpoint", "spec.py", "scheme.py")
_SIZES = (
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_layers",
    "num_heads",
    "num_kv_heads",
    "head_dim",
    "max_position_embeddings",
)


@dataclasses.dataclass(frozen=True)
class CheckpointFacts:
    """What is known of a checkpoint.

    kind : huggingface, tensorrt_llm or gguf
    quantization : None = it is not quantized
    tokenizer : the files that go into an engine, "tokenizer/tokenizer.json", ...
    read : other small files that spec and quantization were read from, "checkpoint/config.json", ...
    """

    kind: str
    spec: DecoderSpec
    quantization: Quantization | None
    tokenizer: tuple[FileEntry, ...]
    read: tuple[FileEntry, ...]

    @property
    def depends_on_length(self) -> bool:
        """Whether the spec is that of one max_seq_len: LongRoPE's factors are chosen by it."""
        return any(rope.kind == "longrope" for rope in self.spec.ropes)

    @property
    def tokenizer_digest(self) -> str:
        """The hash over its tokenizer's files that a manifest has."""
        return hash_entries(self.tokenizer)

    def content(self) -> dict[str, Any]:
        """Return the facts as JSON values."""
        return dataclasses.asdict(self)

    def inputs(self, fingerprint: str) -> dict[str, str]:
        """Return what the key of their record is made of."""
        content = _digest(self.content())
        return {"kind": KIND, "checkpoint": fingerprint, "reader": reader_digest(), "content": content}


def facts_of_checkpoint(checkpoint: Checkpoint, source: Source) -> CheckpointFacts:
    """Return what is known of an opened checkpoint; raises OSError where its small files cannot be read."""
    kind = str(checkpoint.describe()["kind"])
    files = read_files(source, kind)
    return CheckpointFacts(
        kind,
        checkpoint.spec,
        checkpoint.quantization,
        tokenizer_entries(checkpoint),
        tuple(one for name, path in files.items() if (one := entry_of(name, path)) is not None),
    )


def read_facts(record: RecordLike, fingerprint: str) -> CheckpointFacts:
    """Return the facts of a record; raises EngineFileError for one that is of something else, or not as it was made."""
    where = f"the record {record.key}"
    inputs = dict(record.inputs)
    if inputs_key(inputs) != record.key or inputs.get("kind") != KIND:
        raise EngineFileError(f"{where} is none of a checkpoint")
    for name, wanted in (("checkpoint", fingerprint), ("reader", reader_digest())):
        if inputs.get(name) != wanted:
            raise EngineFileError(f"{where} is of the {name} {inputs.get(name)!r}, wanted is {wanted!r}")
    if inputs.get("content") != _digest(record.content):
        raise EngineFileError(f"{where} has another content than its key says")
    facts = read_as(CheckpointFacts, dict(record.content), where)
    _check(facts, where)
    return facts


@functools.cache
def reader_digest() -> str:
    """Return a hash over the sources that read checkpoints: equal ones read the same of the same files."""
    builder = Path(spec_module.__file__).parent
    digest = hashlib.sha256()
    for name in _READER:
        root = builder / name
        for path in sorted(root.rglob("*.py")) if root.is_dir() else [root]:
            digest.update(f"{path.relative_to(builder).as_posix()}\0".encode())
            digest.update(hashlib.sha256(path.read_bytes()).digest())
    return digest.hexdigest()


def _digest(content: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(dict(content), sort_keys=True).encode()).hexdigest()


def _check(facts: CheckpointFacts, where: str) -> None:
    """Refuse what no reader says, and what would not end."""
    spec = facts.spec
    for name in _SIZES:
        if getattr(spec, name) < 1:
            raise EngineFileError(f"{where}.spec.{name} is {getattr(spec, name)}, wanted is at least 1")
    if len(spec.layers) != spec.num_layers:
        raise EngineFileError(f"{where}.spec has {len(spec.layers)} layers, num_layers is {spec.num_layers}")
    for layer in spec.layers:
        if not -1 <= layer.rope_idx < len(spec.ropes):
            raise EngineFileError(
                f"{where}.spec has a layer with rope_idx {layer.rope_idx} and {len(spec.ropes)} ropes"
            )
    for rope in spec.ropes:
        if 2 * len(rope.inv_freq) != rope.rotary_dim:
            raise EngineFileError(
                f"{where}.spec has a rope of {len(rope.inv_freq)} frequencies for rotary_dim {rope.rotary_dim}"
            )
    for file in (*facts.tokenizer, *facts.read):
        if not re.fullmatch(r"[0-9a-f]{64}", file.sha256):
            raise EngineFileError(
                f"{where} has {file.sha256[:80]!r} for {file.path[:80]!r}, wanted is a sha256"
            )
