"""LoRA adapters of the older stack: two arrays that tell little of themselves.

    config   (n, 3) integers: module id, layer, rank; the ids are LoraMatrix, and 0 = q, k and v fused
    weights  (n, at least rank * (in + out)): A (rank, in) row-major, then B (out, rank), then padding; what the
             converter made of alpha is in B already

Both may have a leading dimension of 1, as they have in files and in requests.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .errors import CheckpointError, ShapeError
from .file_kind import no_file
from .lora import LoraAdapter, LoraMatrix, LoraModule, Widths, make_adapter

CONFIG_NAME = "model.lora_config.npy"
WEIGHTS_NAME = "model.lora_weights.npy"
_FUSED_QKV = 0
_QKV = (LoraMatrix.Q, LoraMatrix.K, LoraMatrix.V)


def read(directory: Path, widths: Widths) -> Iterator[LoraModule]:
    """Yield the modules of a directory with both files; raises as modules_of does."""
    return modules_of(
        _load(directory / CONFIG_NAME), _load(directory / WEIGHTS_NAME), widths, where=str(directory)
    )


def adapter_from_arrays(
    config: NDArray[Any],
    weights: NDArray[Any],
    widths: Widths,
    *,
    where: str = "lora_config and lora_weights",
) -> LoraAdapter:
    """Return the adapter of the two arrays of a request; raises as modules_of does."""
    return make_adapter(Path(where), modules_of(config, weights, widths, where=where), widths)


def modules_of(
    config: NDArray[Any], weights: NDArray[Any], widths: Widths, *, where: str
) -> Iterator[LoraModule]:
    """Yield the modules of the two arrays.

    raises : CheckpointError (types, shapes and ids that these arrays never have; a model of unknown widths),
        ShapeError (more weights than a row holds)
    """
    if not widths.hidden or not widths.intermediate:
        raise CheckpointError(
            f"{where}: these arrays do not tell the sizes of the model; open the engine from its directory, whose "
            "manifest does, or use the adapter's PEFT form"
        )
    config, weights = _rows_of(config, "config", where), _rows_of(weights, "weights", where)
    if not np.issubdtype(config.dtype, np.integer) or config.shape[1] not in (3, 4):
        raise CheckpointError(
            f"{where}: the config is {config.dtype} {list(config.shape)}, wanted integers [n, 3]: module id, layer, "
            "rank"
        )
    if not np.issubdtype(weights.dtype, np.floating) or len(weights) != len(config):
        raise CheckpointError(
            f"{where}: the weights are {weights.dtype} {list(weights.shape)}, wanted float32 or float16 with the "
            f"config's {len(config)} rows"
        )
    for row, values in zip(config.tolist(), weights, strict=True):
        yield from _modules_of_row(row, values, widths, where)


def _modules_of_row(row: list[int], values: NDArray[Any], widths: Widths, where: str) -> Iterator[LoraModule]:
    module_id, layer, rank = row[:3]
    if len(row) == 4 and row[3]:
        raise CheckpointError(f"{where}: row {row} is of DoRA, which is not applied; convert a plain LoRA")
    if module_id != _FUSED_QKV and module_id not in LoraMatrix._value2member_map_:
        known = ", ".join(f"{m.value} {m.name.lower()}" for m in LoraMatrix)
        raise CheckpointError(f"{where}: row {row} has module id {module_id}, applied are 0 qkv, {known}")
    if rank < 1 or layer < 0:
        raise CheckpointError(
            f"{where}: row {row} has layer {layer} and rank {rank}, wanted at least 0 and 1"
        )
    matrices = _QKV if module_id == _FUSED_QKV else (LoraMatrix(module_id),)
    inputs = widths.features(matrices[0])[0]
    outputs = [widths.features(matrix)[1] for matrix in matrices]
    needed = rank * (inputs + sum(outputs))
    if needed > len(values):
        raise ShapeError(
            f"{where}: row {row} needs {needed} weights for {inputs} inputs and {sum(outputs)} outputs, it has "
            f"{len(values)}; the adapter was made for another model"
        )
    if np.any(values[needed:]):
        raise ShapeError(
            f"{where}: row {row} has weights behind the {needed} of {inputs} inputs and {sum(outputs)} outputs; the "
            "adapter was made for another model"
        )
    used = np.ascontiguousarray(values[:needed], np.float32)
    a, b = used[: rank * inputs].reshape(rank, inputs), used[rank * inputs :].reshape(-1, rank)
    first = 0
    for matrix, size in zip(matrices, outputs, strict=True):
        yield LoraModule(layer, matrix, 1.0, a, b[first : first + size])
        first += size


def _load(path: Path) -> NDArray[Any]:
    try:
        if (wrong := no_file(path)) is not None:  # a pipe would never end
            raise CheckpointError(f"{path}: {wrong}; an adapter has {CONFIG_NAME} and {WEIGHTS_NAME}")
        array = np.load(path, allow_pickle=False)
    except (OSError, ValueError, EOFError) as error:
        raise CheckpointError(
            f"{path}: is no .npy file of numbers ({error}); convert the adapter again"
        ) from error
    if not isinstance(array, np.ndarray):
        raise CheckpointError(f"{path}: is an archive of arrays, wanted one array; convert the adapter again")
    return array


def _rows_of(array: NDArray[Any], what: str, where: str) -> NDArray[Any]:
    if array.ndim == 3 and array.shape[0] == 1:
        array = array[0]
    if array.ndim != 2:
        raise CheckpointError(f"{where}: the {what} have shape {list(array.shape)}, wanted two dimensions")
    return array
