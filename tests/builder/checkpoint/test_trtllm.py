"""TensorRT-LLM's directories are told from incomplete or unknown Hugging Face ones."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from plansmith.builder.checkpoint import open_checkpoint
from plansmith.runtime.errors import CheckpointError

CONVERTED: dict[str, Any] = {
    "architecture": "LlamaForCausalLM",
    "dtype": "float16",
    "mapping": {"world_size": 1, "tp_size": 1, "pp_size": 1},
    "quantization": {"quant_algo": None},
}
BUILT = {"version": "0.17.0", "pretrained_config": CONVERTED, "build_config": {"max_batch_size": 8}}


@pytest.mark.parametrize(
    ("config", "files", "kind"),
    [
        (CONVERTED, ["rank0.safetensors"], "checkpoint"),
        (CONVERTED, [], "checkpoint"),
        ({"architecture": "GPTForCausalLM", "dtype": "float16"}, ["rank0.safetensors"], "checkpoint"),
        (BUILT, ["rank0.engine"], "engine"),
        (BUILT, [], "engine"),
        (None, ["rank0.engine", "rank1.engine"], "engine"),
    ],
)
def test_directory(tmp_path: Path, config: Any, files: list[str], kind: str) -> None:
    if config is not None:
        (tmp_path / "config.json").write_text(json.dumps(config))
    for name in files:
        (tmp_path / name).write_bytes(b"")
    with pytest.raises(CheckpointError, match=f"is a TensorRT-LLM {kind}, .* it was converted from"):
        open_checkpoint(tmp_path)


def test_engine_file(tmp_path: Path) -> None:
    file = tmp_path / "rank0.engine"
    file.write_bytes(b"ftrt")
    with pytest.raises(CheckpointError, match="is a TensorRT-LLM engine"):
        open_checkpoint(file)


def test_other_unknown_config_is_not_blamed_on_it(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "bert", "architecture": "x"}))
    with pytest.raises(CheckpointError, match="model_type is 'bert'"):
        open_checkpoint(tmp_path)
