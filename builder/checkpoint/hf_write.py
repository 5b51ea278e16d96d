"""Writes a GGUF checkpoint as a Hugging Face directory, tensor by tensor, so that other tools can read it."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from ...runtime.errors import CheckpointError
from .families import FAMILIES
from .gguf_checkpoint import GgufCheckpoint

_DTYPES = {"float32": "F32", "float16": "F16", "bfloat16": "BF16"}
_BYTES = {"float32": 4, "float16": 2, "bfloat16": 2}

Tensor = tuple[str, tuple[int, ...], str, Callable[[], npt.NDArray[Any]]]


def write_safetensors(path: Path, tensors: Iterable[Tensor]) -> None:
    """Write (name, shape, dtype, get) tensors to a safetensors file; one is in memory at a time.

    dtype : float32, float16 or bfloat16
    """
    tensors = list(tensors)
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    offset = 0
    for name, shape, dtype, _ in tensors:
        size = int(np.prod(shape, dtype=np.int64)) * _BYTES[dtype]
        header[name] = {
            "dtype": _DTYPES[dtype],
            "shape": list(shape),
            "data_offsets": [offset, offset + size],
        }
        offset += size
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)  # so that the data is aligned
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for name, shape, dtype, get in tensors:
            array = np.ascontiguousarray(get())
            assert array.shape == tuple(shape) and array.dtype.name == dtype, name
            file.write(array.view(np.uint8).data)


def write_json(path: Path, value: Any) -> None:
    """Write a JSON file as transformers does: indented, keys sorted, a newline at the end."""
    path.write_text(json.dumps(value, indent=2, sort_keys=True) + "\n", encoding="utf-8")


def gguf_to_directory(gguf: Path, dest: Path) -> None:
    """Write a GGUF checkpoint as a new Hugging Face directory: quantized weights in float32, others as they are.

    raises CheckpointError for a file with Llama 3's rope factors, whose parameters config.json would have to name
    """
    source = GgufCheckpoint(gguf, 0)
    spec, weights = source.spec, source.weights
    if spec.ropes[0].kind == "llama3":
        raise CheckpointError(
            f"{gguf}: holds its rope scaling as numbers, which config.json cannot; use the GGUF file itself"
        )
    parts = FAMILIES[spec.family].parts(spec)

    def tensor(name: str) -> Tensor:
        return parts[name].name, weights.shape(name), weights.dtype(name), lambda: weights.get(name)

    dest.mkdir()
    write_safetensors(dest / "model.safetensors", [tensor(name) for name in weights.names()])
    write_json(dest / "config.json", {**source.config, "torch_dtype": spec.dtype})
    for name, content in source.tokenizer_contents().items():
        (dest / name).write_bytes(content)
