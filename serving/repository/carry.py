"""Taking over what an older repository says: carried, changed, or not carried, and why."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable
from pathlib import Path

from ...runtime.errors import InvalidArgumentError
from ...runtime.manifest import Manifest, load_manifest
from .carry_fields import (
    INSTANCE_COUNTS,
    carry_batching,
    carry_instances,
    note_rest,
    note_steps,
    note_tensors,
)
from .carry_parameters import carry_engine_parameter, carry_text_parameter
from .carry_rows import Carried, Row
from .model_config import ModelConfig
from .old_repository import OldRepository
from .plan import Overrides
from .template import MODELS
from .write import MARKER

__all__ = ["Carried", "carry_over"]

_PATH_KEYS = ("tokenizer_dir", "draft_engine_dir", "lora_prefetch_dir")


def carry_over(
    old: OldRepository, engine_dir: Path, own: Overrides, *, keep_tokenizer: bool = True
) -> Carried:
    """Return what a repository for `engine_dir` takes from an older one.

    own : what the command line says, which counts more
    keep_tokenizer : take over tokenizer_dir where it can be used
    raises InvalidArgumentError naming file, line and key: a parameter that tensorrt_llm never had, a value it refuses
    """
    manifest = load_manifest(engine_dir)
    carried = Carried()
    for model, config in old.configs.items():
        _carry_name(carried, model, config)
    carry_batching(carried, old)
    for model in MODELS:
        if model in old.configs:
            config = old.configs[model]
            carry_instances(carried, model, config)
            _carry_parameters(carried, model, old, manifest, keep_tokenizer)
            note_tensors(carried, model, config)
            note_rest(carried, model, config)
    note_steps(carried, old)
    for config in old.others:
        why = "not one of the five models; copy it beside them, or give a draft engine with --set draft_engine_dir=DIR"
        carried.add(config.name, "the model itself", "", "", "not carried", why)
    carried.rows = [_override(row, own) for row in carried.rows]
    return carried


def _carry_name(carried: Carried, model: str, config: ModelConfig) -> None:
    said = config.message.name
    if said and said != config.name and "${" not in said:
        raise InvalidArgumentError(
            f"{config.path} says name {said!r} and its directory is {config.name!r}, which Triton refuses; make "
            "them equal"
        )
    if config.name == model:
        return
    if model in ("preprocessing", "postprocessing"):
        carried.add(model, "name", config.name, model, "changed", "tensorrt_llm_bls calls it by this name")
        return
    carried.overrides.names[model] = config.name
    carried.add(model, "name", config.name, config.name, "carried")


def _carry_parameters(
    carried: Carried, model: str, old: OldRepository, manifest: Manifest, keep_tokenizer: bool
) -> None:
    config = old.configs[model]
    replace = _path_of_engine(old, manifest)
    for key, text in config.parameters().items():
        if "${" in text:
            carried.unfilled.append(f"{model}.{key}")
            continue
        moved = replace(key, text)
        try:
            if model == "tensorrt_llm":
                row, new = carry_engine_parameter(key, text, moved, manifest)
            else:
                row, new = carry_text_parameter(
                    model, key, text, moved, manifest, carried.overrides.names, keep_tokenizer
                )
        except InvalidArgumentError as error:
            raise InvalidArgumentError(f"{config.where(key)}: {error}") from None
        if row is not None:
            carried.rows.append(row)
        for name, value in new.items():
            before = carried.overrides.parameters.setdefault((model, name), value)
            if before != value:
                raise InvalidArgumentError(
                    f"{config.where(key)}: {key} is {text!r}, and another parameter of the file says {before!r} for "
                    f"{name}, the same setting; remove one of them"
                )


def _path_of_engine(old: OldRepository, manifest: Manifest) -> Callable[[str, str], str]:
    """Return what replaces, in (key, text), the old engine's directory at the beginning by the new one's.

    Relative paths of a repository that was made here start there, and are made absolute.
    """
    before = old.configs["tensorrt_llm"].parameters().get("gpt_model_path", "").rstrip("/")
    after = os.path.abspath(manifest.root)  # noqa: PTH100
    is_ours = (old.path / MARKER).is_file()

    def replace(key: str, text: str) -> str:
        if before and "${" not in before and (text.rstrip("/") == before or text.startswith(before + "/")):
            return after + text.rstrip("/")[len(before) :]
        if is_ours and key in _PATH_KEYS and text:
            return os.path.abspath(old.path / text)  # noqa: PTH100
        return text

    return replace


def _override(row: Row, own: Overrides) -> Row:
    """Return a row with what the command line made of it."""
    variable = {"max_batch_size": "triton_max_batch_size", "decoupled": "decoupled_mode"}.get(
        row.key, row.key
    )
    if row.key == "instance_group count":
        variable = INSTANCE_COUNTS.get(row.model, "")
    said = own.parameters.get((row.model, row.key), own.variables.get(variable))
    if said is None or said == row.new:
        return row
    return dataclasses.replace(row, new=said, state="changed", why="the command line says so")
