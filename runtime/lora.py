"""LoRA adapters read from disk: what psm_engine_load_adapter takes.

Two forms are read: a directory that PEFT's `save_pretrained` wrote (lora_peft.py), and the two arrays of the older
stack, `model.lora_config.npy` and `model.lora_weights.npy` (lora_arrays.py). Weights keep the Hugging Face layout,
which is the engine's too: rows of q and k are not reordered and nothing is folded into the matrices, GGUF included.
"""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ._native import native
from .errors import CheckpointError, ShapeError
from .executor import ModelInfo
from .manifest_entries import ModelEntry

Float32Array = NDArray[np.float32]


class LoraMatrix(enum.IntEnum):
    """The matrix that a module changes: PSM_LORA_... of plansmith.h, the ids of the old lora_config."""

    Q = 1
    K = 2
    V = 3
    O = 4  # noqa: E741 - the name the field uses
    UP = 5
    DOWN = 6
    GATE = 7


@dataclasses.dataclass(frozen=True)
class LoraModule:
    """y += scale * b (a x) for one matrix of one layer.

    a : (rank, in_features) float32, C-contiguous
    b : (out_features, rank) float32, C-contiguous
    """

    layer_idx: int
    matrix: LoraMatrix
    scale: float
    a: Float32Array = dataclasses.field(repr=False)
    b: Float32Array = dataclasses.field(repr=False)

    @property
    def rank(self) -> int:
        """Return the rank."""
        return int(self.a.shape[0])


@dataclasses.dataclass(frozen=True)
class LoraAdapter:
    """One adapter in memory; `path` is where it was read from, for messages."""

    path: Path
    modules: tuple[LoraModule, ...]

    @property
    def max_rank(self) -> int:
        """Return the largest rank of a module."""
        return max(module.rank for module in self.modules)

    @property
    def num_bytes(self) -> int:
        """Return the bytes of the weights as float32."""
        return sum(module.a.nbytes + module.b.nbytes for module in self.modules)

    def to_structs(self) -> tuple[Any, list[Any]]:
        """Return (psm_lora_module[], what to keep alive while it is used); its length is len(modules)."""
        ffi = native().ffi
        structs = ffi.new("psm_lora_module[]", len(self.modules))
        keep: list[Any] = []
        for struct, module in zip(structs, self.modules, strict=True):
            struct.layer_idx, struct.module = module.layer_idx, int(module.matrix)
            struct.rank, struct.scale = module.rank, module.scale
            struct.in_features, struct.out_features = module.a.shape[1], module.b.shape[0]
            keep += [ffi.from_buffer("float[]", module.a), ffi.from_buffer("float[]", module.b)]
            struct.a, struct.b = keep[-2:]
        return structs, keep


@dataclasses.dataclass(frozen=True)
class Widths:
    """The columns that adapters meet in a model; hidden and intermediate are 0 where they are not known.

    Adapters that keep A and B as arrays of their own need only q and kv, to cut fused matrices.
    """

    num_layers: int
    q: int
    kv: int
    hidden: int = 0
    intermediate: int = 0

    @classmethod
    def of(cls, info: ModelInfo, model: ModelEntry | None) -> Widths:
        """Return the widths of an executor's model, with those that only the manifest has."""
        q, kv = info.num_heads * info.head_dim, info.num_kv_heads * info.head_dim
        if model is None:
            return cls(info.num_layers, q, kv)
        return cls(info.num_layers, q, kv, model.hidden_size, model.intermediate_size)

    def features(self, matrix: LoraMatrix) -> tuple[int, int]:
        """Return (in_features, out_features) of a matrix; 0 = not known."""
        hidden, inner = self.hidden, self.intermediate
        return {
            LoraMatrix.Q: (hidden, self.q),
            LoraMatrix.K: (hidden, self.kv),
            LoraMatrix.V: (hidden, self.kv),
            LoraMatrix.O: (self.q, hidden),
            LoraMatrix.UP: (hidden, inner),
            LoraMatrix.GATE: (hidden, inner),
            LoraMatrix.DOWN: (inner, hidden),
        }[matrix]


def load_adapter_dir(path: str | Path, info: ModelInfo, model: ModelEntry | None = None) -> LoraAdapter:
    """Return the adapter in a directory of PEFT or of the older stack, checked against the model.

    info : of the engine's executor
    model : of the engine's manifest; without it the older form is refused, whose arrays do not tell their widths
    raises : CheckpointError (missing, damaged, or of a kind that is not supported: DoRA, biases, embeddings, pickles),
        ShapeError (made for a model of other sizes). Rank and the number of adapters are checked where it is loaded.
    """
    from . import lora_arrays, lora_peft

    path = Path(path)
    if not path.is_dir():
        what = "is a file" if path.exists() else "does not exist"
        raise CheckpointError(
            f"{path}: {what}; give the directory of an adapter, with {lora_peft.CONFIG_NAME} in it"
        )
    widths = Widths.of(info, model)
    if (path / lora_arrays.CONFIG_NAME).exists() and not (path / lora_peft.CONFIG_NAME).exists():
        modules = lora_arrays.read(path, widths)
    else:
        modules = lora_peft.read(path, widths)
    return make_adapter(path, modules, widths)


def make_adapter(path: Path, modules: Iterable[LoraModule], widths: Widths) -> LoraAdapter:
    """Return the adapter of these modules, layer by layer, each checked against the model."""
    ordered = sorted(modules, key=lambda m: (m.layer_idx, m.matrix))
    if not ordered:
        raise CheckpointError(f"{path}: holds no weights of an adapter; save it again")
    for before, module in zip([None, *ordered], ordered, strict=False):
        check_module(path, module, widths)
        if before is not None and (before.layer_idx, before.matrix) == (module.layer_idx, module.matrix):
            raise CheckpointError(f"{path}: changes {describe(module)} twice; save it again")
    return LoraAdapter(path, tuple(ordered))


def check_module(path: Path, module: LoraModule, widths: Widths) -> None:
    """Refuse a module that the model has no place for."""
    if module.layer_idx >= widths.num_layers:
        raise ShapeError(
            f"{path}: changes {describe(module)}, the model has {widths.num_layers} layers; the adapter was made "
            "for another model"
        )
    for got, wanted, side in zip(
        (module.a.shape[1], module.b.shape[0]), widths.features(module.matrix), ("in", "out"), strict=True
    ):
        if wanted and got != wanted:
            raise ShapeError(
                f"{path}: {describe(module)} has {got} {side}_features, the model has {wanted}; the adapter was made "
                "for another model"
            )


def describe(module: LoraModule) -> str:
    """Return "q of layer 3", for messages."""
    return f"{module.matrix.name.lower()} of layer {module.layer_idx}"
