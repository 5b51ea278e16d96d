"""Files of TensorRT-LLM, which are often beside or instead of the checkpoint that is wanted: each its own error."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ...runtime.errors import CheckpointError

_REMEDY = "which this version does not read; give the Hugging Face directory it was converted from"


def refuse_engine(path: Path) -> None:
    """Raise CheckpointError if `path` is an engine of TensorRT-LLM: a directory with rank*.engine, or such a file."""
    if path.suffix == ".engine" or any(path.glob("rank*.engine")):
        raise CheckpointError(f"{path}: is a TensorRT-LLM engine, {_REMEDY}")


def refuse_config(data: Mapping[str, Any], path: Path) -> None:
    """Raise CheckpointError if config.json of the directory `path` is TensorRT-LLM's: an engine's or a checkpoint's.

    An engine's has build_config and pretrained_config. A checkpoint's is what pretrained_config holds: it names one
    `architecture`, where Hugging Face has model_type and a list `architectures`.
    """
    if "pretrained_config" in data or "build_config" in data:
        raise CheckpointError(f"{path}: is a TensorRT-LLM engine, {_REMEDY}")
    if "model_type" not in data and isinstance(data.get("architecture"), str):
        raise CheckpointError(f"{path}: is a TensorRT-LLM checkpoint, {_REMEDY}")
