"""A LoRA adapter as PEFT's save_pretrained writes it: adapter_config.json and adapter_model.safetensors.

What an adapter may hold besides A and B (biases, magnitudes of DoRA, embeddings, whole layers) would change the model
in ways that are not applied here, so each is refused rather than left out.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .errors import CheckpointError, ShapeError
from .lora import Float32Array, LoraMatrix, LoraModule, Widths
from .lora_peft_config import PeftConfig, read_config

CONFIG_NAME = "adapter_config.json"
WEIGHTS_NAME = "adapter_model.safetensors"
PICKLE_NAME = "adapter_model.bin"

# Module of a transformers layer -> the matrices that it is, in the order of its rows.
_MATRICES = {
    "self_attn.q_proj": (LoraMatrix.Q,),
    "self_attn.k_proj": (LoraMatrix.K,),
    "self_attn.v_proj": (LoraMatrix.V,),
    "self_attn.o_proj": (LoraMatrix.O,),
    "self_attn.qkv_proj": (LoraMatrix.Q, LoraMatrix.K, LoraMatrix.V),
    "mlp.up_proj": (LoraMatrix.UP,),
    "mlp.down_proj": (LoraMatrix.DOWN,),
    "mlp.gate_proj": (LoraMatrix.GATE,),
    "mlp.gate_up_proj": (LoraMatrix.GATE, LoraMatrix.UP),
}
# "base_model.model." + the module's name + ".lora_A" [+ the adapter's name in memory] + ".weight"
_NAME = re.compile(r"(?:base_model\.model\.)?(?P<module>.+)\.lora_(?P<side>[AB])(?:\.[\w-]+)?\.weight")
_LAYER = re.compile(r"model\.layers\.(\d+)\.(\w+\.\w+)")
_NOT_APPLIED = {
    "lora_magnitude_vector": "is of DoRA",
    "lora_embedding_": "changes an embedding",
    "modules_to_save": "is a whole layer that was trained",
    "embed_tokens": "is of the embedding",
    "lm_head": "is of the output layer",
    "lora_bias": "is a bias",
    ".bias": "is a bias",
    "token_adapter": "changes the embeddings of tokens",
    "lora_variant": "is of a variant of LoRA",
}
_MERGE = "merge it into the model with peft's merge_and_unload() and build an engine of the result"


def read(directory: Path, widths: Widths) -> Iterator[LoraModule]:
    """Yield the modules of an adapter; A and B as float32, matrices that the family keeps fused cut apart.

    raises : CheckpointError, or ShapeError where the sizes do not fit each other or the model
    """
    config = read_config(directory / CONFIG_NAME)
    for name, sides in _pairs(directory).items():
        layer = _LAYER.fullmatch(name)
        matrices = _MATRICES.get(layer[2]) if layer else None
        if layer is None or matrices is None:
            known = ", ".join(sorted(module.rpartition(".")[2] for module in _MATRICES))
            raise CheckpointError(
                f"{directory}: changes {name!r}; adapters are applied to {known} of model.layers.N; {_MERGE}"
            )
        a, b = _check_pair(directory, name, sides, config)
        scale = config.scale(name, a.shape[0])
        rows = _rows(directory, name, matrices, b.shape[0], widths)
        for matrix, (first, last) in zip(matrices, rows, strict=True):
            yield LoraModule(int(layer[1]), matrix, scale, a, np.ascontiguousarray(b[first:last]))


def _pairs(directory: Path) -> dict[str, dict[str, Float32Array]]:
    """Return module -> {"A": ..., "B": ...} of all tensors in the file."""
    # The reader of checkpoints; imported here because an engine without adapters needs none of it.
    from ..builder.checkpoint.safetensors_file import SafetensorsFile

    path = directory / WEIGHTS_NAME
    if not path.is_file():
        raise _no_weights(directory)
    file = SafetensorsFile(path)
    pairs: dict[str, dict[str, Float32Array]] = {}
    for name in file.names():
        for part, what in _NOT_APPLIED.items():
            if part in name:
                raise CheckpointError(f"{path}: tensor {name!r} {what}, which is not applied; {_MERGE}")
        found = _NAME.fullmatch(name)
        if found is None:
            raise CheckpointError(
                f"{path}: tensor {name!r} is not known; a LoRA adapter has MODULE.lora_A.weight and "
                "MODULE.lora_B.weight"
            )
        sides = pairs.setdefault(found["module"], {})
        if found["side"] in sides:
            raise CheckpointError(
                f"{path}: holds more than one adapter ({name!r}); save one with save_pretrained()"
            )
        sides[found["side"]] = _float32(file.get(name))
    return pairs


def _no_weights(directory: Path) -> CheckpointError:
    if (directory / PICKLE_NAME).is_file():
        return CheckpointError(
            f"{directory / PICKLE_NAME}: is a pickle, which can run code and is never read; convert it where you trust "
            f'it: python -c "import torch, safetensors.torch as s; s.save_file({{k: v.contiguous() for k, v in '
            f"torch.load('{PICKLE_NAME}', weights_only=True).items()}}, '{WEIGHTS_NAME}')\""
        )
    return CheckpointError(
        f"{directory}: has no {WEIGHTS_NAME}; save the adapter with peft's save_pretrained()"
    )


def _float32(array: NDArray[Any]) -> Float32Array:
    return np.ascontiguousarray(array, dtype=np.float32)


def _check_pair(
    directory: Path, name: str, sides: Mapping[str, Float32Array], config: PeftConfig
) -> tuple[Float32Array, Float32Array]:
    """Return A (rank, in) and B (out, rank), of one rank, which is the one the config gives the module."""
    missing = {"A", "B"} - sides.keys()
    if missing:
        raise CheckpointError(f"{directory}: {name!r} has no lora_{missing.pop()}; save the adapter again")
    a, b = sides["A"], sides["B"]
    if a.ndim != 2 or b.ndim != 2 or a.shape[0] != b.shape[1] or 0 in (*a.shape, *b.shape):
        raise ShapeError(
            f"{directory}: {name!r} has lora_A {list(a.shape)} and lora_B {list(b.shape)}, wanted [rank, in] and "
            "[out, rank]; save the adapter again"
        )
    if a.shape[0] != config.rank(name):
        raise ShapeError(
            f"{directory}: {name!r} has rank {a.shape[0]}, {CONFIG_NAME} says {config.rank(name)} (r, rank_pattern); "
            "the two do not belong together: save the adapter again"
        )
    return a, b


def _rows(
    directory: Path, name: str, matrices: tuple[LoraMatrix, ...], total: int, widths: Widths
) -> list[tuple[int, int]]:
    """Return the rows of B of each matrix."""
    if len(matrices) == 1:
        return [(0, total)]
    is_qkv = matrices[0] is LoraMatrix.Q
    sizes = [widths.q, widths.kv, widths.kv] if is_qkv else [widths.intermediate or total // 2] * 2
    if sum(sizes) != total:
        raise ShapeError(
            f"{directory}: {name!r} has {total} out_features, the model's {'|'.join(m.name.lower() for m in matrices)} "
            f"have {'+'.join(map(str, sizes))}; the adapter was made for another model"
        )
    return list(itertools.pairwise(itertools.accumulate(sizes, initial=0)))
