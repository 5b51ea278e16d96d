"""open_checkpoint: one reader for every kind of checkpoint, giving a spec and weights on demand."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any, Protocol

from ...runtime.errors import CheckpointError
from ..scheme import Quantization
from ..spec import DecoderSpec
from .gguf_checkpoint import GgufCheckpoint
from .hash_cache import HashCache
from .hf_dir import HfCheckpoint, hash_files
from .trtllm.checkpoint import TrtllmCheckpoint
from .trtllm.kinds import is_trtllm_checkpoint, refuse_engine
from .weights import WeightSource


class _Source(Protocol):
    kind: str
    spec: DecoderSpec
    stored: dict[str, int]

    @property
    def weights(self) -> WeightSource:
        """The weights."""

    def tokenizer_files(self) -> dict[str, Path | bytes]:
        """Return the tokenizer's files."""

    def hashed_files(self) -> list[Path]:
        """Return the files that the fingerprint covers."""


class Checkpoint:
    """An opened checkpoint; it maps the files, so they must stay unchanged while it lives.

    spec : the decoder it describes
    weights : its weights under canonical names, read when asked for
    quantization : how they are quantized, and weights is then a QuantizedSource as well; None = they are not
    """

    def __init__(self, path: Path, source: _Source) -> None:
        self.path = path
        self.spec: DecoderSpec = source.spec
        self.weights: WeightSource = source.weights
        self.quantization: Quantization | None = getattr(source, "quantization", None)
        self._source = source
        self._fingerprint: str | None = None
        beyond = [one for one in self.spec.eos_token_ids if one >= self.spec.vocab_size]
        if beyond:
            raise CheckpointError(
                f"{path}: eos_token_id is {beyond[0]}, the model's vocabulary has {self.spec.vocab_size}; "
                "correct it in generation_config.json or config.json"
            )

    def tokenizer_files(self) -> dict[str, Path | bytes]:
        """Return the tokenizer's files, name -> path or content.

        tokenizer.json always; tokenizer_config.json, chat_template.jinja, generation_config.json and
        special_tokens_map.json where the checkpoint has them.
        """
        return self._source.tokenizer_files()

    def fingerprint(self, cache: HashCache | None = None) -> str:
        """Return the sha256 (hex) over configs and weights, not the tokenizer; reads them once.

        cache : what remembers it beyond this process; files that are as they were are not read then
        """
        if self._fingerprint is None:
            try:
                files = self._source.hashed_files()
                self._fingerprint = hash_files(files) if cache is None else cache.fingerprint(files)
            except OSError as e:
                raise CheckpointError(f"{self.path}: cannot be read ({e.strerror}); was it moved?") from e
        return self._fingerprint

    def check_unchanged(self, cache: HashCache) -> None:
        """Raise CheckpointError if the files are no more those of the fingerprint; what has the same times is."""
        try:
            found = cache.fingerprint(self._source.hashed_files())
        except OSError as e:
            raise CheckpointError(f"{self.path}: cannot be read ({e.strerror}); was it moved?") from e
        if found != self._fingerprint:
            raise CheckpointError(
                f"{self.path}: changed while it was compiled, so what came of it is thrown away; run it again once "
                "nobody writes there"
            )

    def describe(self) -> dict[str, Any]:
        """Return what a manifest says of the checkpoint: kind, family, architecture, dtype, parameters.

        stored_bytes : format of the tensors in the file -> bytes, e.g. {"Q4_1": 66355200}
        """
        return {
            "kind": self._source.kind,
            "family": self.spec.family,
            "architecture": self.spec.architecture,
            "dtype": self.spec.dtype,
            "stored_bytes": dict(self._source.stored),
            "num_parameters": sum(math.prod(self.weights.shape(name)) for name in self.weights.names()),
        }


def open_checkpoint(
    path: str | Path, max_seq_len: int | None = None, tokenizer: str | Path | None = None
) -> Checkpoint:
    """Return the checkpoint at `path`, with everything but values checked.

    path : a Hugging Face directory, a TensorRT-LLM checkpoint directory, or a GGUF file
    max_seq_len : positions of the engine to be built. Only LongRoPE looks at it: beyond the original
        training length the long factors are taken, at or below it, or with None, the short ones; these are good
        for that length only, and spec.max_position_embeddings says so.
    tokenizer : a directory with tokenizer.json, or that file, where the checkpoint has none: TensorRT-LLM's never do
    raises      : CheckpointError naming the file, what it has, what was wanted and what to do
    """
    path = Path(path)
    tokenizer = None if tokenizer is None else Path(tokenizer)
    if path.is_dir():
        opener = TrtllmCheckpoint if is_trtllm_checkpoint(path) else HfCheckpoint
        return Checkpoint(path, opener(path, max_seq_len or 0, tokenizer))
    if not path.exists():
        raise CheckpointError(f"{path}: does not exist; give a Hugging Face directory or a .gguf file")
    refuse_engine(path)
    if path.suffix in (".bin", ".pt", ".pth", ".ckpt", ".pkl"):
        raise CheckpointError(
            f"{path}: is a pickle, which can run code and is never read; convert it to safetensors with "
            "transformers' save_pretrained()"
        )
    if path.suffix == ".safetensors":
        raise CheckpointError(
            f"{path}: holds weights only; give the directory that has config.json beside it"
        )
    if tokenizer is not None:
        raise CheckpointError(f"{path}: a GGUF file has its own tokenizer; leave --tokenizer-dir out")
    return Checkpoint(path, GgufCheckpoint(path, max_seq_len or 0))
