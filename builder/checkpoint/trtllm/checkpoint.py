"""A TensorRT-LLM checkpoint directory, opened."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ....runtime.errors import CheckpointError
from ...scheme import Quantization
from ...spec import DecoderSpec
from ..hf_dir import read_spec
from ..json_file import read_json
from ..quantized.module import FLOATS
from ..quantized.source import QuantizedWeights
from ..tokenizer_check import check_tokenizer
from ..tokenizer_files import special_ids, tokenizer_directory, tokenizer_files_in
from ..weights import MappedWeights, same_values
from .config import read_config, read_mapping
from .kinds import refuse_engine
from .names import with_trtllm_parts
from .quantization import TrtllmReader, quantization_section
from .ranks import RankStore, check_shares, open_ranks

_TABLE, _HEAD = "transformer.vocab_embedding.weight", "lm_head.weight"


class TrtllmCheckpoint:
    """See Checkpoint in checkpoint.py for its members.

    tokenizer : a directory with tokenizer.json, or that file: such checkpoints hold none
    """

    kind = "tensorrt_llm"

    def __init__(self, directory: Path, max_seq_len: int, tokenizer: Path | None = None) -> None:
        refuse_engine(directory)
        self._directory = directory
        path = directory / "config.json"
        data = read_json(path)
        tp_size, pp_size = read_mapping(data, str(path))
        files = open_ranks(directory, tp_size * pp_size)
        names = {name for file in files for name in file.names()}
        config = read_config(data, str(path), names)
        check_shares(config, str(path), "transformer.layers.0.mlp.gate.weight" not in names)
        store = RankStore(directory, config, files)
        self._files = store.files
        self._tokenizer = self._find_tokenizer(tokenizer)
        self._ids = special_ids(self._tokenizer)
        tied = _is_tied(store)
        config.hf["vocab_size"] = store.trim_vocabulary(padding=_padding(config.quantization))
        spec, family = read_spec(
            {**config.hf, **self._ids, "tie_word_embeddings": tied}, str(path), max_seq_len
        )
        # The norms of Gemma hold 1 + w here, so there is nothing left to add.
        spec = dataclasses.replace(spec, norm_offset=0.0)
        if not spec.eos_token_ids:
            raise CheckpointError(
                f"{self._tokenizer}: does not say which token ends a sequence; give --tokenizer-dir a directory whose "
                "generation_config.json has eos_token_id"
            )
        family = with_trtllm_parts(family, names)
        self.quantization: Quantization | None = None
        section = quantization_section(config, directory)
        self.weights: MappedWeights
        if section is None:
            _check_plain(store)
            self.weights = MappedWeights(store, spec, family)
        else:
            reader = TrtllmReader(config, *section, store)
            quantized = QuantizedWeights(store, spec, family, reader)
            self.weights, self.quantization = quantized, quantized.quantization
        self.stored = store.stored()
        self.spec: DecoderSpec = dataclasses.replace(spec, dtype=self.weights.dtype("embed.weight"))
        check_tokenizer(self._tokenizer / "tokenizer.json", spec.vocab_size)

    def _find_tokenizer(self, given: Path | None) -> Path:
        if given is not None:
            return tokenizer_directory(given)
        if (self._directory / "tokenizer.json").is_file():
            return self._directory
        raise CheckpointError(
            f"{self._directory}: is a TensorRT-LLM checkpoint, which has no tokenizer; give the directory of the "
            "Hugging Face model that it was converted from with --tokenizer-dir (open_checkpoint(..., tokenizer=...))"
        )

    def tokenizer_files(self) -> dict[str, Path | bytes]:
        """Return the tokenizer's files, name -> path, and a generation_config.json where it has none."""
        files: dict[str, Path | bytes] = {**tokenizer_files_in(self._tokenizer)}
        ids = {name: value for name, value in self._ids.items() if value is not None}
        files.setdefault("generation_config.json", (json.dumps(ids, indent=2) + "\n").encode())
        return files

    def hashed_files(self) -> list[Path]:
        """Return the files that the fingerprint covers."""
        small = [self._directory / "config.json", self._directory / "quant_cfg.json"]
        return [path for path in small if path.is_file()] + self._files


def _padding(quantization: Mapping[str, Any]) -> int:
    """Return the number that the vocabulary was padded to a multiple of: ModelOpt does so for AWQ, without a word."""
    algo = quantization.get("quant_algo")
    return 64 if isinstance(algo, str) and "AWQ" in algo else 1


def _is_tied(store: RankStore) -> bool:
    """Return whether the embedding table is the head too: there is no head, or one that repeats the table."""
    if not store.has(_HEAD):
        return True
    if not store.has(_TABLE) or store.dtype(_HEAD) not in FLOATS or store.has("lm_head.bias"):
        return False
    same = store.dtype(_HEAD) == store.dtype(_TABLE) and store.shape(_HEAD) == store.shape(_TABLE)
    if not same or not same_values(store.get(_HEAD), store.get(_TABLE)):
        return False
    store.leave_out(_HEAD)
    return True


def _check_plain(store: RankStore) -> None:
    """Raise CheckpointError for quantized tensors that config.json does not speak of."""
    odd = sorted(name for name in store.names() if store.dtype(name) not in FLOATS)
    if odd:
        raise CheckpointError(
            f"{store.where}: tensor {odd[0]!r} is stored as {store.dtype(odd[0])}, and config.json has no "
            "quantization; it belongs to another checkpoint"
        )
