"""Directories of LoRA adapters: what is read from PEFT's files and from arrays, and what is refused."""

from __future__ import annotations

import dataclasses
import functools
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tiny_adapters as tiny
import torch
from plansmith.runtime import errors
from plansmith.runtime.lora import LoraAdapter, LoraMatrix, Widths, load_adapter_dir
from plansmith.runtime.lora_arrays import adapter_from_arrays

GetPath = Callable[..., Path]


@pytest.fixture(scope="module")
def model(tiny_checkpoint: GetPath) -> Callable[[str], Any]:
    return functools.cache(lambda family: tiny.load_model(tiny_checkpoint(family)))


def test_fused_arrays_are_cut_apart() -> None:
    widths = Widths(num_layers=2, q=6, kv=2, hidden=4, intermediate=5)
    rng = np.random.default_rng(0)
    a, b = rng.normal(size=(3, 4)).astype(np.float16), rng.normal(size=(10, 3)).astype(np.float16)
    config = np.array([[[0, 1, 3]]], np.int32)
    weights = np.concatenate([a.ravel(), b.ravel(), np.zeros(7, np.float16)])[None]
    adapter = adapter_from_arrays(config, weights, widths)
    assert [m.matrix for m in adapter.modules] == [LoraMatrix.Q, LoraMatrix.K, LoraMatrix.V]
    for module, rows in zip(adapter.modules, (b[:6], b[6:8], b[8:]), strict=True):
        assert (module.layer_idx, module.scale, module.rank) == (1, 1.0, 3)
        np.testing.assert_array_equal(module.a, a.astype(np.float32))
        np.testing.assert_array_equal(module.b, rows.astype(np.float32))


WIDTHS = Widths(num_layers=2, q=8, kv=4, hidden=6, intermediate=10)


@pytest.mark.parametrize(
    ("config", "weights", "error", "text"),
    [
        ([[8, 0, 1]], np.zeros((1, 40)), errors.CheckpointError, "module id 8"),
        ([[1, 0, 0]], np.zeros((1, 40)), errors.CheckpointError, "rank 0"),
        ([[1, -1, 1]], np.zeros((1, 40)), errors.CheckpointError, "layer -1"),
        ([[1, 2, 1]], np.zeros((1, 14)), errors.ShapeError, "q of layer 2, the model has 2 layers"),
        ([[1, 0, 4]], np.zeros((1, 40)), errors.ShapeError, "needs 56 weights for 6 inputs and 8 outputs"),
        ([[1, 0, 1]], np.ones((1, 15)), errors.ShapeError, "weights behind the 14"),
        ([[1, 0, 1, 1]], np.zeros((1, 40)), errors.CheckpointError, "DoRA"),
        ([[1, 0, 1]], np.zeros((2, 40)), errors.CheckpointError, "with the config's 1 rows"),
        ([[1, 0, 1]], np.zeros((1, 40), np.int32), errors.CheckpointError, "int32"),
        ([[1.0, 0.0, 1.0]], np.zeros((1, 40)), errors.CheckpointError, "wanted integers"),
        ([1, 0, 1], np.zeros((1, 40)), errors.CheckpointError, "two dimensions"),
        ([[1, 0, 1]] * 2, np.zeros((2, 40)), errors.CheckpointError, "q of layer 0 twice"),
        (np.zeros((0, 3), np.int32), np.zeros((0, 40)), errors.CheckpointError, "no weights"),
    ],
)
def test_bad_arrays_are_refused(config: Any, weights: Any, error: type[Exception], text: str) -> None:
    with pytest.raises(error, match=text):
        adapter_from_arrays(np.asarray(config), weights, WIDTHS)


def test_arrays_need_the_widths_of_the_model() -> None:
    widths = Widths(num_layers=2, q=8, kv=4)
    with pytest.raises(errors.CheckpointError, match="open the engine from its directory"):
        adapter_from_arrays(np.array([[1, 0, 1]]), np.zeros((1, 40)), widths)


def test_files_of_arrays_that_are_damaged_are_refused(tmp_path: Path) -> None:
    config, weights = tmp_path / "model.lora_config.npy", tmp_path / "model.lora_weights.npy"
    np.save(config, np.array([[1, 0, 1]], np.int32))
    with pytest.raises(errors.CheckpointError, match=r"lora_weights\.npy: is missing"):
        load(tmp_path)
    weights.write_bytes(b"\x93NUMPY")
    with pytest.raises(errors.CheckpointError, match=r"no \.npy file"):
        load(tmp_path)
    np.save(weights, np.array([{"a": 1}], object), allow_pickle=True)
    with pytest.raises(errors.CheckpointError, match=r"no \.npy file"):
        load(tmp_path)
    with weights.open("wb") as file:
        np.savez(file, a=np.zeros(3))
    with pytest.raises(errors.CheckpointError, match="archive"):
        load(tmp_path)


@dataclasses.dataclass
class Info:
    """The fields of a ModelInfo that an adapter is read with."""

    num_layers: int = 2
    num_heads: int = 4
    num_kv_heads: int = 2
    head_dim: int = 32


def load(path: Path) -> LoraAdapter:
    return load_adapter_dir(path, Info())  # type: ignore[arg-type]


@pytest.fixture
def peft(model: Callable[[str], Any], tmp_path: Path) -> Iterator[tuple[Path, dict[str, torch.Tensor]]]:
    """Return a good directory and its tensors, to be changed and saved again."""
    adapter = tiny.make_adapter(model("llama"), tiny.ALL)
    tiny.write_adapter(tmp_path, adapter)
    assert len(load(tmp_path).modules) == 14
    yield tmp_path, adapter.tensors()


def resave(path: Path, tensors: dict[str, torch.Tensor]) -> None:
    from safetensors.torch import save_file

    save_file(tensors, path / "adapter_model.safetensors")


@pytest.mark.parametrize(
    ("fields", "text"),
    [
        ({"peft_type": "LOHA"}, "peft_type is 'LOHA'"),
        ({"use_dora": True}, "is DoRA"),
        ({"bias": "lora_only"}, "bias is 'lora_only'"),
        ({"lora_bias": True}, "trained biases"),
        ({"modules_to_save": ["lm_head"]}, "whole layers"),
        ({"trainable_token_indices": [1]}, "embeddings of tokens"),
        ({"layer_replication": [[0, 2]]}, "repeats layers"),
        ({"target_parameters": ["mlp.experts"]}, "experts"),
        ({"alora_invocation_tokens": [5]}, "activated LoRA"),
        ({"use_qalora": True}, "QA-LoRA"),
        ({"init_lora_weights": "pissa_niter_4"}, "replaces the base model's weights"),
        ({"use_something_new": True}, "use_something_new = True, which this plansmith does not know"),
        ({"r": 0}, "r is 0"),
        ({"r": "8"}, "r is '8'"),
        ({"r": True}, "r is True"),
        ({"lora_alpha": None}, "lora_alpha is None"),
        ({"lora_alpha": float("nan")}, "lora_alpha is nan"),
        ({"use_rslora": 1.5}, "use_rslora is 1.5"),
        ({"rank_pattern": [8]}, r"rank_pattern is \[8\]"),
        ({"rank_pattern": {"q_proj": 2.5}}, "wanted ranks"),
        ({"alpha_pattern": {"(": 2}}, "no regular expression"),
        ({"alpha_pattern": {"q_proj": "x"}}, r"alpha_pattern\['q_proj'\] is 'x'"),
    ],
)
def test_configs_that_are_not_applied_are_refused(
    fields: dict[str, Any], text: str, peft: tuple[Path, dict[str, torch.Tensor]]
) -> None:
    tiny.write_config(peft[0], **fields)
    with pytest.raises(errors.CheckpointError, match=text):
        load(peft[0])


@pytest.mark.parametrize(
    "fields",
    [
        {"use_something_new": None, "another": False, "third": {}},
        {"init_lora_weights": "gaussian"},
        {"fan_in_fan_out": True},
        {"modules_to_save": []},
    ],
)
def test_fields_that_are_off_or_change_nothing_are_fine(
    fields: dict[str, Any], peft: tuple[Path, dict[str, torch.Tensor]]
) -> None:
    tiny.write_config(peft[0], **fields)
    assert {m.scale for m in load(peft[0]).modules} == {2.0}


LAYER = "base_model.model.model.layers.0."


@pytest.mark.parametrize(
    ("name", "shape", "error", "text"),
    [
        (LAYER + "self_attn.q_proj.lora_magnitude_vector", (8,), errors.CheckpointError, "is of DoRA"),
        (LAYER + "self_attn.q_proj.lora_B.bias", (8,), errors.CheckpointError, "is a bias"),
        ("base_model.model.model.embed_tokens.lora_embedding_A", (8, 320), errors.CheckpointError, "embedding"),
        ("base_model.model.lm_head.modules_to_save.weight", (8, 8), errors.CheckpointError, "whole layer"),
        ("base_model.model.model.embed_tokens.weight", (320, 64), errors.CheckpointError, "the embedding"),
        ("base_model.model.lm_head.base_layer.weight", (320, 64), errors.CheckpointError, "the output layer"),
        (LAYER + "self_attn.q_proj.weight", (8, 8), errors.CheckpointError, "is not known"),
        (LAYER + "self_attn.q_proj.lora_A.other.weight", (8, 64), errors.CheckpointError, "more than one"),
        (LAYER + "self_attn.r_proj.lora_A.weight", (8, 64), errors.CheckpointError, "r_proj"),
        ("base_model.model.lm_head.lora_A.weight", (8, 64), errors.CheckpointError, "lm_head"),
        (LAYER + "self_attn.q_proj.lora_A.weight", (7, 64), errors.ShapeError, r"lora_A \[7, 64\]"),
        (LAYER + "self_attn.q_proj.lora_A.weight", (64,), errors.ShapeError, "wanted"),
        (LAYER + "self_attn.q_proj.lora_A.weight", (8, 0), errors.ShapeError, "wanted"),
        (LAYER + "self_attn.k_proj.lora_B.weight", (128, 8), errors.ShapeError, "128 out_features"),
    ],
)  # fmt: skip
def test_tensors_that_are_not_applied_are_refused(
    name: str,
    shape: tuple[int, ...],
    error: type[Exception],
    text: str,
    peft: tuple[Path, dict[str, torch.Tensor]],
) -> None:
    path, tensors = peft
    resave(path, {**tensors, name: torch.zeros(shape)})
    with pytest.raises(error, match=text):
        load(path)


def test_what_is_missing_or_contradicts_is_named(
    peft: tuple[Path, dict[str, torch.Tensor]], model: Callable[[str], Any], tmp_path: Path
) -> None:
    path, tensors = peft
    name = LAYER + "mlp.up_proj.lora_B.weight"
    resave(path, {k: v for k, v in tensors.items() if k != name})
    with pytest.raises(errors.CheckpointError, match=r"layers\.0\.mlp\.up_proj' has no lora_B"):
        load(path)
    resave(path, tensors)
    tiny.write_config(path, r=16)
    with pytest.raises(errors.ShapeError, match=r"has rank 8, adapter_config\.json says 16"):
        load(path)
    tiny.write_config(path)
    resave(path, {k.replace("layers.0.", "layers.2."): v for k, v in tensors.items()})
    with pytest.raises(errors.ShapeError, match="layer 2, the model has 2 layers"):
        load(path)
    resave(path, {k.replace(".weight", ".default.weight"): v for k, v in tensors.items()})
    assert len(load(path).modules) == 14  # as a state_dict names them


def test_files_that_are_damaged_or_of_another_kind_are_refused(
    peft: tuple[Path, dict[str, torch.Tensor]],
) -> None:
    path, _ = peft
    weights, config = path / "adapter_model.safetensors", path / "adapter_config.json"
    data = weights.read_bytes()
    for damaged in (data[:-5], data[:100], b"", data + b"x", b"\xff" * 8 + data):
        weights.write_bytes(damaged)
        with pytest.raises(errors.CheckpointError, match=r"adapter_model\.safetensors: "):
            load(path)
    weights.rename(path / "adapter_model.bin")
    with pytest.raises(errors.CheckpointError, match=r"is a pickle.*save_file"):
        load(path)
    (path / "adapter_model.bin").unlink()
    with pytest.raises(errors.CheckpointError, match=r"has no adapter_model\.safetensors"):
        load(path)
    for text in ("[]", "{", '{"r": '):
        config.write_text(text)
        with pytest.raises(errors.CheckpointError, match=r"adapter_config\.json"):
            load(path)
    config.unlink()
    with pytest.raises(errors.CheckpointError, match="is missing"):
        load(path)
    with pytest.raises(errors.CheckpointError, match="does not exist"):
        load(path / "none")
    with pytest.raises(errors.CheckpointError, match="is a file"):
        load(Path(__file__))


def test_a_pickle_is_converted_by_the_command_in_its_error(
    peft: tuple[Path, dict[str, torch.Tensor]],
) -> None:
    import shlex
    import subprocess
    import sys

    path, tensors = peft
    (path / "adapter_model.safetensors").unlink()
    torch.save(tensors, path / "adapter_model.bin")
    with pytest.raises(errors.CheckpointError) as caught:
        load(path)
    command = shlex.split(str(caught.value).partition("trust it: ")[2])
    subprocess.run([sys.executable, *command[1:]], cwd=path, check=True)
    assert len(load(path).modules) == 14


def test_mutated_files_are_read_or_refused(peft: tuple[Path, dict[str, torch.Tensor]]) -> None:
    path, _ = peft
    rng = np.random.default_rng(11)
    refused = 0
    for name in ("adapter_model.safetensors", "adapter_config.json"):
        good = (path / name).read_bytes()
        end = 8 + int.from_bytes(good[:8], "little") if name.endswith("safetensors") else len(good)
        for _ in range(400):
            data = bytearray(good)
            for _ in range(rng.integers(1, 4)):
                data[rng.integers(0, end)] = rng.integers(0, 256)
            (path / name).write_bytes(data)
            try:
                load(path)
            except errors.Error:
                refused += 1
        (path / name).write_bytes(good)
    assert refused > 600


def test_the_config_may_be_written_by_an_older_peft(peft: tuple[Path, dict[str, torch.Tensor]]) -> None:
    fields = {"peft_type": "LORA", "r": 8, "lora_alpha": 16, "bias": "none", "target_modules": ["q_proj"],
              "task_type": "CAUSAL_LM", "modules_to_save": None, "fan_in_fan_out": False, "lora_dropout": 0.1,
              "base_model_name_or_path": "tiny", "inference_mode": True}  # fmt: skip
    (peft[0] / "adapter_config.json").write_text(json.dumps(fields))
    adapter = load(peft[0])
    assert adapter.max_rank == 8 and {m.scale for m in adapter.modules} == {2.0}
    assert adapter.num_bytes == sum(4 * t.numel() for t in peft[1].values())
