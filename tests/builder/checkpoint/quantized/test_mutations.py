"""Damaged quantized checkpoints of every format: read, or refused with a CheckpointError, and nothing else."""

from __future__ import annotations

import copy
import json
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from plansmith.builder.checkpoint import open_checkpoint
from plansmith.builder.checkpoint.quantized import find_reader
from plansmith.runtime.errors import CheckpointError
from tiny_compressed_tensors import make_compressed
from tiny_fp8 import make_blocks
from tiny_packing import make_awq, make_gptq
from tiny_quantized import make_modelopt, rewrite

_JUNK: tuple[Any, ...] = (
    None, True, False, 0, -1, 3, 1 << 70, 2.5, float("inf"), "", "x", "re:(", [], {}, [None], [1, 2], ["a"],
    {"a": 1}, [[]], [{}],
)  # fmt: skip


def _modelopt(recipe: str) -> Callable[[Path], None]:
    return lambda path: void(
        make_modelopt(recipe, path, num_hidden_layers=1, kv="FP8" if recipe == "fp8" else None)
    )


def void(_: object) -> None:
    """Drop a result."""


MAKERS: dict[str, Callable[[Path], None]] = {
    "modelopt_fp8": _modelopt("fp8"),
    "modelopt_w4a8": _modelopt("w4a8_awq"),
    "modelopt_nvfp4": _modelopt("nvfp4"),
    "awq": lambda path: void(make_awq(path)),
    "gptq": lambda path: void(make_gptq(path, zero=8)),
    "fp8_blocks": lambda path: void(make_blocks(path)),
    **{
        f"compressed_{name}": lambda path, name=name: void(make_compressed(name, path))  # type: ignore[misc]
        for name in ("fp8_block", "int8_static", "w4a16_zeros", "nvfp4")
    },
}


@pytest.fixture(scope="session")
def made(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Return format -> directory, made once; do not change the files."""
    paths: dict[str, Path] = {}

    def get(name: str) -> Path:
        if name not in paths:
            paths[name] = tmp_path_factory.mktemp("mutations") / name
            MAKERS[name](paths[name])
        return paths[name]

    return get


def places(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Yield where the values of a JSON object are."""
    yield path
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, one in items:
        yield from places(one, (*path, key))


def replaced(value: Any, path: tuple[Any, ...], junk: Any) -> Any:
    """Return a copy with one value replaced."""
    if not path:
        return junk
    result = copy.deepcopy(value)
    inner = result
    for key in path[:-1]:
        inner = inner[key]
    inner[path[-1]] = junk
    return result


@pytest.mark.parametrize("name", MAKERS)
def test_any_value_in_any_config(name: str, made: Callable[[str], Path], tmp_path: Path) -> None:
    directory = Path(shutil.copytree(made(name), tmp_path / "m"))
    config = json.loads((directory / "config.json").read_text())
    config["quantization_config"].pop("config_groups", None) if "modelopt" in name else None  # not read
    side_file = directory / "hf_quant_config.json"
    side = json.loads(side_file.read_text()) if side_file.is_file() else None
    refused = 0
    opened: set[str] = set()
    for file, original in (("config", config["quantization_config"]), ("side", side)):
        for path in places(original) if original is not None else ():
            for junk in _JUNK:
                changed = replaced(original, path, junk)
                one = {**config, "quantization_config": changed} if file == "config" else config
                other = changed if file == "side" else side
                if file == "side" and not isinstance(changed, dict):
                    continue
                try:
                    reader = find_reader(one, directory, other)
                    # What the config alone may say meets the tensors, once for all configs that say the same.
                    said = "" if reader is None else repr((type(reader), vars(reader)))
                    if said in opened:
                        continue
                    opened.add(said)
                    (directory / "config.json").write_text(json.dumps(one))
                    if other is not None:
                        side_file.write_text(json.dumps(other))
                    open_checkpoint(directory)
                except CheckpointError as e:
                    refused += 1
                    assert str(directory) in str(e)
    assert refused > 50 and len(opened) > 1


def read_all(path: Path) -> None:
    """Open a checkpoint and read everything that it has."""
    checkpoint = open_checkpoint(path)
    weights: Any = checkpoint.weights
    assert checkpoint.quantization is not None
    for name, _ in checkpoint.quantization.schemes:
        weights.get(f"{name}.weight")
        weights.quantized_input(f"{name}.weight")
    if checkpoint.quantization.kv != "float":
        weights.kv_scales(0)


_CHANGES: dict[str, Callable[[Any], Any]] = {
    "gone": lambda _: None,
    "transposed": lambda one: one.permute(tuple(reversed(range(one.ndim)))).clone(),
    "cut": lambda one: one[: one.shape[0] // 2].clone() if one.ndim else one.reshape(1, 1),
    "empty": lambda one: one.reshape(-1)[:0].clone(),
    "flat": lambda one: one.reshape(-1).clone(),
    "wider": lambda one: one[None].clone(),
    "float64": lambda one: one.double(),
    "int16": lambda one: one.float().short(),
    "bool": lambda one: one.float().bool(),
    "all_ones": lambda one: _filled(one, 0xFF),
    "all_zeros": lambda one: _filled(one, 0x00),
}


def _filled(one: Any, byte: int) -> Any:
    import torch

    raw = np.full(one.numel() * one.element_size(), byte, np.uint8)
    return torch.from_numpy(raw).view(one.dtype).reshape(one.shape)


@pytest.mark.parametrize("name", MAKERS)
def test_any_damage_to_any_tensor(name: str, made: Callable[[str], Path], tmp_path: Path) -> None:
    from safetensors.torch import load_file

    read_all(made(name))
    path = Path(shutil.copytree(made(name), tmp_path / "m"))
    kept = (path / "model.safetensors").read_bytes()
    names = [one for one in load_file(path / "model.safetensors") if "layers.0." in one and "norm" not in one]
    names = [one for one in names if "o_proj" in one or one.endswith((".k_scale", ".v_scale"))]
    outcomes = {"read": 0, "refused": 0}
    for tensor in names:
        for damage in _CHANGES.values():
            (path / "model.safetensors").write_bytes(kept)

            def change(tensors: dict[str, Any], tensor: str = tensor, damage: Any = damage) -> None:
                changed = damage(tensors.pop(tensor))
                if changed is not None:
                    tensors[tensor] = changed

            rewrite(path, change)
            try:
                read_all(path)
                outcomes["read"] += 1
            except CheckpointError as e:
                outcomes["refused"] += 1
                assert str(path) in str(e)
    assert outcomes["refused"] > 3 * len(names), outcomes


@pytest.mark.parametrize("name", ["modelopt_fp8", "gptq"])
def test_truncated_and_half_written_files(name: str, made: Callable[[str], Path], tmp_path: Path) -> None:
    path = Path(shutil.copytree(made(name), tmp_path / "m"))
    for file in sorted(path.iterdir()):
        if file.name not in ("model.safetensors", "config.json", "hf_quant_config.json"):
            continue
        kept = file.read_bytes()
        for part in (0, 1, 7, len(kept) // 3, len(kept) - 1):
            file.write_bytes(kept[:part])
            with pytest.raises(CheckpointError, match=file.name):
                read_all(path)
        file.write_bytes(b"\xff" + kept[1:])
        with pytest.raises(CheckpointError, match=file.name):
            read_all(path)
        file.write_bytes(kept)
    read_all(path)
