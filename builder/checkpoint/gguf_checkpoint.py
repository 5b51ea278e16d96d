"""A GGUF file as a checkpoint: the Hugging Face names and layout, dequantized tensor by tensor."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Mapping
from pathlib import Path

import numpy as np

from .gguf_config import ROPE_FACTORS, config_from_gguf, hf_name, rope_factors
from .gguf_file import GgufFile
from .gguf_tokenizer import tokenizer_files_from_gguf
from .hf_dir import read_spec
from .tokenizer_check import check_tokenizer_bytes
from .weights import Array, MappedWeights

_PLAIN_DTYPES = {"F32": "float32", "F16": "float16", "BF16": "bfloat16"}


class GgufStore:
    """The tensors of a GGUF file under their Hugging Face names.

    interleaved : module -> heads, of the matrices whose rows lie for rotation by neighbours
    """

    def __init__(self, file: GgufFile, interleaved: Mapping[str, int]) -> None:
        self.where = file.where
        self._file = file
        self._names = {hf_name(name): name for name in file.names() if name != ROPE_FACTORS}
        self._interleaved = interleaved

    def names(self) -> tuple[str, ...]:
        """Return the names of all tensors."""
        return tuple(self._names)

    def shape(self, name: str) -> tuple[int, ...]:
        """Return a tensor's shape."""
        return self._file.shape(self._names[name])

    def dtype(self, name: str) -> str:
        """Return the dtype that `get` gives: the file's own, or float32 where it is quantized."""
        return _PLAIN_DTYPES.get(self._file.type(self._names[name]), "float32")

    def get(self, name: str) -> Array:
        """Return a tensor in the Hugging Face layout, read-only."""
        tensor = self._file.get(self._names[name])
        heads = self._interleaved.get(name.split(".")[-2])
        tensor = tensor if heads is None else undo_interleave(tensor, heads)
        tensor.flags.writeable = False
        return tensor

    def stored(self) -> dict[str, int]:
        """Return the bytes of each type of tensor, the most first."""
        sizes: Counter[str] = Counter()
        for name in self._names.values():
            sizes[self._file.type(name)] += self._file.num_bytes(name)
        return dict(sizes.most_common())


def undo_interleave(tensor: Array, heads: int) -> Array:
    """Return rows (h, d/2, 2) as rows (h, 2, d/2): rotation pairs i and i + d/2 of a head, as Hugging Face has them."""
    half = tensor.shape[0] // heads // 2
    split = tensor.reshape(heads, half, 2, *tensor.shape[1:])
    return np.ascontiguousarray(split.swapaxes(1, 2)).reshape(tensor.shape)


class GgufCheckpoint:
    """A GGUF file, opened: see Checkpoint in checkpoint.py for its members."""

    kind = "gguf"

    def __init__(self, path: Path, max_seq_len: int) -> None:
        self._path = path
        file = GgufFile(path)
        self.config = config_from_gguf(file)
        spec, family = read_spec(self.config, str(path), max_seq_len)
        factors = rope_factors(file, spec.ropes[0].rotary_dim)
        if factors is not None:
            inv_freq = np.array(spec.ropes[0].inv_freq, np.float32) / factors
            rope = dataclasses.replace(spec.ropes[0], inv_freq=tuple(map(float, inv_freq)), kind="llama3")
            spec = dataclasses.replace(spec, ropes=(rope,))
        qk = {"q_proj": spec.num_heads, "k_proj": spec.num_kv_heads}
        store = GgufStore(file, qk if family.gguf is not None and family.gguf.interleaved_qk else {})
        self.weights = MappedWeights(store, spec, family)
        self.spec = dataclasses.replace(spec, dtype=self.weights.dtype("embed.weight"))
        self.stored = store.stored()
        self._files = tokenizer_files_from_gguf(file)
        check_tokenizer_bytes(self._files["tokenizer.json"], spec.vocab_size, f"{path}: its tokenizer")

    def tokenizer_files(self) -> dict[str, Path | bytes]:
        """Return the tokenizer's files, name -> content."""
        return dict(self._files)

    def tokenizer_contents(self) -> dict[str, bytes]:
        """Return the same as bytes."""
        return dict(self._files)

    def hashed_files(self) -> list[Path]:
        """Return the files that the fingerprint covers."""
        return [self._path]
