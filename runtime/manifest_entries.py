"""The parts of manifest.json, one class an object, every field with its type and range. Standard library only."""

# ruff: noqa: RUF009 - these calls make the fields

from __future__ import annotations

import dataclasses

from . import manifest_fields as read
from .manifest_fields import Fields

TOKEN_LAYOUTS = ("packed", "rectangular")
FLOAT_TYPES = ("float32", "float16", "bfloat16")
ROW_ALIGNMENTS = ("none", "right")
KV_TYPES = (*FLOAT_TYPES, "float8_e4m3fn", "int8")
KERNELS_FOLDER = "kernels"  # beside a plan: device kernels, see executors/kernel_bundle.py
WEIGHT_STREAMING = "weight_streaming"  # a flag of TargetEntry
GROUP_SIZE = "group_size"  # likewise, with a number
ACTIVATION_QUANTIZATIONS = ("none", "int8", "fp8", "fp4", "mixed")


@dataclasses.dataclass(frozen=True)
class FileEntry(Fields):
    """A file of the engine: path relative to the directory, size in bytes, sha256 in hex."""

    path: str = read.relative_path()
    size: int = read.integer(0)
    sha256: str = read.sha256()


@dataclasses.dataclass(frozen=True)
class HostEntry(Fields):
    """Where the engine was built. For people; nothing depends on it."""

    os: str = read.text()
    machine: str = read.text()
    cpu: str = read.text()
    cpus: int = read.integer(1)
    memory_bytes: int = read.integer(0)
    python: str = read.text()


@dataclasses.dataclass(frozen=True)
class ModelEntry(Fields):
    """The decoder in numbers: enough to size a KV cache and to check token ids."""

    family: str = read.text()
    architecture: str = read.text()
    vocab_size: int = read.integer(1, 1 << 24)
    hidden_size: int = read.integer(1, 1 << 20)
    intermediate_size: int = read.integer(1, 1 << 22)
    num_layers: int = read.integer(1, 4096)
    num_heads: int = read.integer(1, 4096)
    num_kv_heads: int = read.integer(1, 4096)
    head_dim: int = read.integer(1, 4096)
    max_position_embeddings: int = read.integer(1, 1 << 28)
    windows: tuple[int, ...] = read.integers(0, 1 << 28)  # a layer's sliding window, 0 = none
    num_parameters: int = read.integer(1)
    dtype: str = read.text()  # the checkpoint's own
    bos_token_id: int | None = read.optional_integer(0, 1 << 24)
    eos_token_ids: tuple[int, ...] = read.integers(0, 1 << 24)
    pad_token_id: int | None = read.optional_integer(0, 1 << 24)

    def kv_bytes_per_token(self, kv_dtype: str) -> int:
        """Return the bytes that one position holds over all layers, K and V together."""
        value_bytes = {"float32": 4, "float16": 2, "bfloat16": 2}.get(kv_dtype, 1)
        return 2 * self.num_layers * self.num_kv_heads * self.head_dim * value_bytes


@dataclasses.dataclass(frozen=True)
class LimitsEntry(Fields):
    """The limits the engine was built for, inclusive; the names are trtllm-build's."""

    max_batch_size: int = read.integer(1, 1 << 20)
    max_num_tokens: int = read.integer(1, 1 << 24)
    max_input_len: int = read.integer(1, 1 << 28)
    max_seq_len: int = read.integer(2, 1 << 28)
    max_beam_width: int = read.integer(1, 1024)
    tokens_per_block: int = read.integer(1, 1 << 16)
    kv_cache_type: str = read.one_of("paged")


@dataclasses.dataclass(frozen=True)
class TokenizerEntry(Fields):
    """The tokenizer's files and one hash over all of them."""

    files: tuple[FileEntry, ...] = read.entries(FileEntry)
    sha256: str = read.sha256()


@dataclasses.dataclass(frozen=True)
class GraphContractEntry(Fields):
    """Names of the graph's inputs and outputs; `{layer}` stands for 0..L-1."""

    version: int = read.integer(1, 1 << 16)
    inputs: tuple[str, ...] = read.texts()
    outputs: tuple[str, ...] = read.texts()
    pool_inputs: tuple[str, ...] = read.texts()
    pool_outputs: tuple[str, ...] = read.texts()


@dataclasses.dataclass(frozen=True)
class CheckpointEntry(Fields):
    """What the engine was built from. `path` is where it was then, and need not exist any more."""

    path: str = read.text()
    fingerprint: str = read.text()


@dataclasses.dataclass(frozen=True)
class TensorEntry(Fields):
    """An input of a plan: its name, its type, its dimensions (numbers, or names where they are free)."""

    name: str = read.text()
    dtype: str = read.one_of("int32", *FLOAT_TYPES)
    dims: tuple[str, ...] = read.texts()


@dataclasses.dataclass(frozen=True)
class ProvenanceEntry(Fields):
    """Where a plan comes from. For people and for the rules of sizing/portability.py; no plan depends on it.

    created : when it was compiled
    platform : the system and the processor it was compiled on, e.g. "linux-x86_64"
    gpus : the GPU whose timings decided its kernels; () where none did
    tools : what took part and its version, e.g. "numpy 2.4.6"
    inputs : what its key was made of, by name; {} where that was not kept
    """

    created: str = read.time()
    plansmith_version: str = read.text()
    host: HostEntry = read.entry(HostEntry)
    platform: str = read.text()
    gpus: tuple[str, ...] = read.texts()
    tools: tuple[str, ...] = read.texts()
    inputs: dict[str, str] = read.texts_by_name()

    def tool_version(self, name: str) -> str | None:
        """Return the version of a tool that took part; None for one that did not."""
        found = (tool.rpartition(" ") for tool in self.tools)
        return next((version for tool, _, version in found if tool == name), None)


@dataclasses.dataclass(frozen=True)
class TargetEntry(Fields):
    """One compiled plan.

    sm : compute capabilities the plan runs on, e.g. ("sm89",); () = no GPU
    token_layout : "packed" steps are [T]; "rectangular" ones are [B, S], padded on the side away from row_alignment
    inputs : what the plan takes besides the pools, which the graph contract names
    profiles : the plan's optimization profiles in the order of their index, () where it has none
    activation_quantization : what the inputs of products with quantized weights are rounded to
    key : hash of everything that went into the plan; equal keys = the same plan
    provenance : of this plan alone: targets of one directory may come from different machines; None = built before
        this was noted
    seconds : time of the compilation
    files : the plan first; device kernels lie in a folder of their own beside it
    """

    compiler: str = read.text()
    compiler_version: str = read.text()
    sm: tuple[str, ...] = read.texts()
    token_layout: str = read.one_of(*TOKEN_LAYOUTS)
    compute_dtype: str = read.one_of(*FLOAT_TYPES)
    kv_dtype: str = read.one_of(*KV_TYPES)
    activation_quantization: str = read.one_of(*ACTIVATION_QUANTIZATIONS)
    row_alignment: str = read.one_of(*ROW_ALIGNMENTS)
    inputs: tuple[TensorEntry, ...] = read.entries(TensorEntry)
    profiles: tuple[str, ...] = read.texts()
    files: tuple[FileEntry, ...] = read.entries(FileEntry)
    flags: tuple[str, ...] = read.texts()  # what the compiler was told, e.g. "compute_capability=sm89"
    key: str = read.sha256()
    seconds: float = read.number(0)
    provenance: ProvenanceEntry | None = read.optional_entry(ProvenanceEntry)

    @property
    def streams_weights(self) -> bool:
        """Whether the plan's weights may stay in host memory and come over in every step."""
        return WEIGHT_STREAMING in self.flags

    @property
    def group_size(self) -> int | None:
        """Return the columns to a scale that the build was asked for; None where the target chose itself."""
        found = (flag.partition("=") for flag in self.flags)
        return next(
            (int(number) for name, _, number in found if name == GROUP_SIZE and number.isdecimal()), None
        )

    def kernel_files(self) -> tuple[FileEntry, ...]:
        """Return the files of the plan's device kernels; () where it has none."""
        folder = f"{self.files[0].path.rpartition('/')[0]}/{KERNELS_FOLDER}/"
        return tuple(file for file in self.files if file.path.startswith(folder))

    def plan_files(self) -> tuple[FileEntry, ...]:
        """Return the files that the compiler of the plan gave."""
        kernels = self.kernel_files()
        return tuple(file for file in self.files if file not in kernels)


@dataclasses.dataclass(frozen=True)
class DraftEntry(Fields):
    """The same model compiled at another precision, which drafts for the targets of the same names.

    Its plans have the engine's limits; a target may be without one.
    """

    precision: str = read.text()
    targets: dict[str, TargetEntry] = read.entry_map(TargetEntry)
