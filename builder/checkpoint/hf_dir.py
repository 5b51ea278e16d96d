"""A Hugging Face directory: config.json, safetensors with or without an index, and the tokenizer's files."""

from __future__ import annotations

import dataclasses
import hashlib
from collections import Counter
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from ...runtime.errors import CheckpointError
from ...runtime.file_kind import no_file
from ..scheme import Quantization
from ..spec import DecoderSpec
from .config import Config
from .families import FAMILIES, Family
from .json_file import read_json
from .quantized import QUANT_CONFIG, QUANT_FIELDS, QuantizedWeights, find_reader, untie_quantized_head
from .safetensors_file import SafetensorsFile
from .tokenizer_check import check_tokenizer
from .tokenizer_files import tokenizer_directory, tokenizer_files_in
from .trtllm.kinds import refuse_engine, refuse_engine_config
from .weights import Array, MappedWeights

_PICKLES = (".bin", ".pt", ".pth", ".ckpt", ".pkl")
_MOE_FIELDS = (
    "num_local_experts",
    "num_experts",
    "n_routed_experts",
    "num_experts_per_tok",
    "moe_intermediate_size",
    "moe_num_experts",
)
_SINGLE, _INDEX = "model.safetensors", "model.safetensors.index.json"


def find_family(data: Mapping[str, Any], where: str) -> Family:
    """Return the family of a config; CheckpointError names what is not supported: code, experts."""
    kind = data.get("model_type")
    experts = [name for name in _MOE_FIELDS if data.get(name) not in (None, 0)]
    if experts or (isinstance(kind, str) and ("moe" in kind or kind == "mixtral")):
        why = f"{experts[0]} = {data[experts[0]]!r}" if experts else f"model_type {kind!r}"
        raise CheckpointError(
            f"{where}: is a mixture of experts ({why}), only dense models are supported; give a dense one"
        )
    family = FAMILIES.get(kind) if isinstance(kind, str) else None
    code = data.get("auto_map") or {}
    known = family.known_code.items() if family else ()
    if not isinstance(code, dict) or not set(map(str, code.items())) <= set(map(str, known)):
        raise CheckpointError(
            f"{where}: asks for code of its own (auto_map {code!r}); code from a checkpoint is never run, so use one "
            "of a model that transformers has built in"
        )
    if family is None:
        hint = (
            "it has a vision part, use a text-only checkpoint"
            if "text_config" in data
            else "give one of those"
        )
        raise CheckpointError(f"{where}: model_type is {kind!r}, supported are {', '.join(FAMILIES)}; {hint}")
    architectures = data.get("architectures")
    if architectures is not None and architectures != [family.architecture]:
        raise CheckpointError(
            f"{where}: architectures is {architectures!r}, for model_type {kind!r} only [{family.architecture!r}] "
            "is supported; give a checkpoint of a text-generating model"
        )
    return family


def read_spec(
    data: Mapping[str, Any], where: str, max_seq_len: int, dealt_with: Iterable[str] = ()
) -> tuple[DecoderSpec, Family]:
    """Return the spec of a parsed config.json and its family; CheckpointError names the field that is wrong.

    dealt_with : fields that somebody else has read
    """
    family = find_family(data, where)
    config = Config(data, where, family.defaults)
    spec = family.read(config, family, max_seq_len)
    if data.get("auto_map"):
        config.use("auto_map")
    config.use(*dealt_with)
    config.finish()
    return spec, family


class HfStore:
    """The tensors of one or several safetensors files as one."""

    def __init__(self, directory: Path) -> None:
        self.where = str(directory)
        self.files = _weight_files(directory)
        self._tensors: dict[str, SafetensorsFile] = {}
        for path in self.files:
            file = SafetensorsFile(path)
            for name in file.names():
                if name in self._tensors:
                    raise CheckpointError(
                        f"{path}: tensor {name!r} is in {self._tensors[name].where} too; download the files again"
                    )
                self._tensors[name] = file

    def names(self) -> Iterable[str]:
        """Return the names of all tensors."""
        return self._tensors

    def shape(self, name: str) -> tuple[int, ...]:
        """Return a tensor's shape."""
        return self._tensors[name].shape(name)

    def get(self, name: str) -> Array:
        """Return a tensor, a view of its file."""
        return self._tensors[name].get(name)

    def raw(self, name: str) -> Array:
        """Return a tensor as it is stored, quantized or not, a view of its file."""
        return self._tensors[name].raw(name)

    def has(self, name: str) -> bool:
        """Return whether there is such a tensor."""
        return name in self._tensors

    def dtype(self, name: str) -> str:
        """Return how a tensor is stored."""
        return self._tensors[name].dtype(name)

    def stored(self) -> dict[str, int]:
        """Return the bytes of each type of tensor, the most first."""
        sizes: Counter[str] = Counter()
        for name, file in self._tensors.items():
            sizes[file.dtype(name)] += file.num_bytes(name)
        return dict(sizes.most_common())


def _weight_files(directory: Path) -> list[Path]:
    index = directory / _INDEX
    if (directory / _SINGLE).is_file():
        return [directory / _SINGLE]
    if index.is_file():
        return _indexed_files(directory, index)
    pickles = sorted(p.name for p in directory.iterdir() if p.suffix in _PICKLES)
    if pickles:
        raise CheckpointError(
            f"{directory}: holds pickled weights ({pickles[0]}), which can run code and are never read; convert them "
            "to safetensors with transformers' save_pretrained()"
        )
    raise CheckpointError(
        f"{directory}: has neither {_SINGLE} nor {_INDEX}; give a complete checkpoint directory"
    )


def _indexed_files(directory: Path, index: Path) -> list[Path]:
    weight_map = read_json(index).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise CheckpointError(f"{index}: has no weight_map; download it again")
    names = sorted({str(name) for name in weight_map.values()})
    for name in names:
        if Path(name).name != name or not name.endswith(".safetensors"):
            raise CheckpointError(
                f"{index}: names {name!r}, wanted a .safetensors file of the same directory; download it again"
            )
        if (wrong := no_file(directory / name)) is not None:
            raise CheckpointError(f"{directory / name}: {wrong}, {index.name} names it; download it again")
    return [directory / name for name in names]


class HfCheckpoint:
    """A checkpoint directory, opened: see Checkpoint in checkpoint.py for its members.

    tokenizer : where the tokenizer is, if not beside the weights
    """

    kind = "huggingface"

    def __init__(self, directory: Path, max_seq_len: int, tokenizer: Path | None = None) -> None:
        refuse_engine(directory)
        config_path = directory / "config.json"
        if not config_path.is_file() and (directory / "adapter_config.json").is_file():
            raise CheckpointError(
                f"{directory}: is an adapter (LoRA) without its base model; merge them with peft's merge_and_unload() "
                "and save the result"
            )
        if not config_path.exists():  # what is no regular file, read_json refuses
            raise CheckpointError(
                f"{directory}: is no checkpoint (it has no config.json); give a Hugging Face directory or a .gguf file"
            )
        self._directory = directory
        self._tokenizer = directory if tokenizer is None else tokenizer_directory(tokenizer)
        config = read_json(config_path)
        refuse_engine_config(config, directory)
        side = directory / QUANT_CONFIG
        reader = find_reader(config, directory, read_json(side) if side.is_file() else None)
        fields = QUANT_FIELDS if reader is not None else ()
        spec, family = read_spec(config, str(config_path), max_seq_len, fields)
        store = HfStore(directory)
        self._files = store.files
        self.quantization: Quantization | None = None
        if reader is None:
            self.weights = MappedWeights(store, spec, family)
        else:
            spec = untie_quantized_head(spec, store)
            self.weights = quantized = QuantizedWeights(store, spec, family, reader)
            self.quantization = quantized.quantization
        self.stored = store.stored()
        self.spec = dataclasses.replace(
            spec, dtype=self.weights.dtype("embed.weight"), **_generation_ids(directory)
        )
        check_tokenizer(self._tokenizer / "tokenizer.json", spec.vocab_size)

    def tokenizer_files(self) -> dict[str, Path | bytes]:
        """Return the tokenizer's files that are there, name -> path."""
        files: dict[str, Path | bytes] = {**tokenizer_files_in(self._tokenizer)}
        generation = self._directory / "generation_config.json"
        if generation.is_file():
            files[generation.name] = generation
        return files

    def hashed_files(self) -> list[Path]:
        """Return the files that the fingerprint covers."""
        names = ("config.json", "generation_config.json", QUANT_CONFIG)
        small = [self._directory / name for name in names]
        return [path for path in small if path.is_file()] + self._files


def _generation_ids(directory: Path) -> dict[str, Any]:
    """Return the end-of-sequence ids of generation_config.json, which go before those of config.json."""
    path = directory / "generation_config.json"
    if not path.is_file():
        return {}
    ids = Config(read_json(path), str(path), {}).ids("eos_token_id")
    return {"eos_token_ids": ids} if ids else {}


def hash_files(paths: Iterable[Path], chunk_bytes: int = 1 << 22) -> str:
    """Return the sha256 over the names, sizes and contents of the files, read in chunks."""
    digest = hashlib.sha256()
    buffer = memoryview(bytearray(chunk_bytes))
    for path in paths:
        digest.update(f"{path.name}\0{path.stat().st_size}\0".encode())
        with path.open("rb", buffering=0) as file:
            while count := file.readinto(buffer):
                digest.update(buffer[:count])
    return digest.hexdigest()
