"""What `plansmith size` is asked about: a checkpoint, or its config.json alone, or an engine directory."""

from __future__ import annotations

import dataclasses
import math
from pathlib import Path
from typing import Any

from ..builder.checkpoint import WeightSource, open_checkpoint
from ..builder.checkpoint.hf_dir import read_spec
from ..builder.checkpoint.json_file import read_json, read_optional_json
from ..builder.checkpoint.quantized import QUANT_CONFIG, QUANT_FIELDS
from ..builder.checkpoint.trtllm.kinds import is_trtllm_checkpoint
from ..builder.scheme import Quantization
from ..builder.spec import DecoderSpec, weight_shapes
from ..runtime.errors import CheckpointError, InvalidArgumentError
from ..runtime.manifest import MANIFEST_NAME, Manifest, load_manifest

_CONFIG = "config.json"


@dataclasses.dataclass(frozen=True)
class Checkpoint:
    """A model that has not been built.

    weights, quantization : of a checkpoint that is quantized already; None = of any other, whose shapes are enough
    note : what is assumed of it, which may be several sentences; "" = nothing
    """

    path: Path
    spec: DecoderSpec
    weights: WeightSource | None = None
    quantization: Quantization | None = None
    note: str = ""

    @property
    def num_parameters(self) -> int:
        """Weights of the model."""
        return sum(math.prod(shape) for shape in weight_shapes(self.spec).values())


def open_model(path: Path, context: int | None) -> Checkpoint | Manifest:
    """Return what lies at a path; no weight is read.

    path : a checkpoint directory, a directory with config.json alone or that file, a GGUF file, an engine directory
    context : tokens of a sequence, which some models' positions depend on; None = the model's own limit
    raises CheckpointError, EngineFileError
    """
    if path.is_dir() and (path / MANIFEST_NAME).exists():
        return load_manifest(path)
    if path.is_dir() and is_trtllm_checkpoint(path):
        return _opened(path, context)
    config = path / _CONFIG if path.is_dir() else path
    if config.suffix != ".json":
        return _opened(path, context)
    if path.is_dir() and not config.exists():
        raise CheckpointError(
            f"{path}: has no {_CONFIG}, so nothing tells the model's shape; give a checkpoint directory, its {_CONFIG} "
            "alone, a .gguf file or an engine directory"
        )
    data, side = read_json(config), read_optional_json(config.parent / QUANT_CONFIG)
    is_quantized = bool(side) or any(data.get(field) is not None for field in QUANT_FIELDS)
    if is_quantized and any(config.parent.glob("*.safetensors")):
        return _opened(config.parent, context)
    spec, _ = read_spec(data, str(config), context or 0, QUANT_FIELDS)
    note = (
        f"{config} says that the weights are quantized, and they are not here: sizes are those of recipes made of the "
        "unquantized model"
    )
    notes = [*_assumed(data, str(config), spec), *([note] if is_quantized else [])]
    return Checkpoint(path, dataclasses.replace(spec, dtype=_dtype(data)), note="; ".join(notes))


def _assumed(config: dict[str, Any], name: str, spec: DecoderSpec) -> list[str]:
    """Return a note on the numbers that config.json leaves to the family's defaults, where there are any."""
    nested = config.get("text_config")
    told = {**config, **nested} if isinstance(nested, dict) else config
    numbers = {
        "num_hidden_layers": spec.num_layers,
        "hidden_size": spec.hidden_size,
        "intermediate_size": spec.intermediate_size,
        "num_attention_heads": spec.num_heads,
        "vocab_size": spec.vocab_size,
    }
    absent = [f"{field} {value}" for field, value in numbers.items() if told.get(field) is None]
    if not absent:
        return []
    return [
        f"{name} does not say all of the shape: {', '.join(absent)} of {spec.family}'s defaults is assumed"
    ]


def _opened(path: Path, context: int | None) -> Checkpoint:
    found = open_checkpoint(path, context)
    weights = None if found.quantization is None else found.weights
    return Checkpoint(path, found.spec, weights, found.quantization)


def _dtype(config: dict[str, Any]) -> str:
    """Return the type that config.json says the weights have; most are published as bfloat16."""
    found = str(config.get("dtype") or config.get("torch_dtype") or "bfloat16").removeprefix("torch.")
    return found if found in ("float32", "float16", "bfloat16") else "bfloat16"


def most_positions(model: Checkpoint | Manifest) -> int:
    """Return the longest sequence of a model, or that an engine was built for."""
    if isinstance(model, Manifest):
        return model.limits.max_seq_len
    return model.spec.max_position_embeddings


def check_context(model: Checkpoint | Manifest, context: int) -> None:
    """Raise InvalidArgumentError for sequences that are longer than the model's positions."""
    most = most_positions(model)
    if context > most:
        whose = "the engine was built for" if isinstance(model, Manifest) else "the model has positions for"
        raise InvalidArgumentError(f"--context is {context}, {whose} {most} tokens; give at most that")
