"""What TensorRT-LLM writes, told apart: checkpoints, which are read, and engines, which cannot be."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ....runtime.errors import CheckpointError
from ....runtime.file_kind import no_file

_REMEDY = (
    "compiled for one GPU and one version and of no use to others; give the checkpoint it was built from (the "
    "directory with rank0.safetensors), or the Hugging Face directory"
)


def refuse_engine(path: Path) -> None:
    """Raise CheckpointError if `path` is an engine of TensorRT-LLM: a directory with rank*.engine, or such a file."""
    if path.suffix == ".engine" or any(path.glob("rank*.engine")):
        raise CheckpointError(f"{path}: is a TensorRT-LLM engine, {_REMEDY}")


def refuse_engine_config(data: Mapping[str, Any], path: Path) -> None:
    """Raise CheckpointError if config.json of the directory `path` is that of an engine."""
    if "pretrained_config" in data or "build_config" in data:
        raise CheckpointError(f"{path}: is a TensorRT-LLM engine, {_REMEDY}")


def is_trtllm_checkpoint(directory: Path) -> bool:
    """Return whether a directory holds a TensorRT-LLM checkpoint; a config.json that cannot be read holds none.

    Its config.json names one `architecture`, where Hugging Face has model_type and a list `architectures`.
    """
    try:
        if no_file(directory / "config.json") is not None:  # a pipe would never end
            return False
        data = json.loads((directory / "config.json").read_bytes().decode("utf-8"))
    except (OSError, ValueError, RecursionError):
        return False
    return (
        isinstance(data, dict)
        and "model_type" not in data
        and "pretrained_config" not in data
        and isinstance(data.get("architecture"), str)
    )
