"""A GGUF file."""

from __future__ import annotations

from pathlib import Path

from ...runtime.errors import CheckpointError
from ..spec import DecoderSpec
from .weights import WeightSource


class GgufCheckpoint:
    kind = "gguf"
    spec: DecoderSpec
    weights: WeightSource

    def __init__(self, path: Path, max_seq_len: int) -> None:
        raise CheckpointError(f"{path}: GGUF files cannot be read yet")

    def tokenizer_files(self) -> dict[str, Path | bytes]:
        return {}

    def hashed_files(self) -> list[Path]:
        return []
