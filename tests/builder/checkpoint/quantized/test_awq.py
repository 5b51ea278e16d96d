"""AWQ: integers packed by the published rule come back, and other variants are refused by name."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from plansmith.builder.checkpoint import open_checkpoint
from plansmith.builder.scheme import Scheme
from plansmith.runtime.errors import CheckpointError
from tiny_packing import AWQ_CONFIG, make_awq
from tiny_quantized import edit_json, rewrite

Q = "model.layers.0.self_attn.q_proj"


def test_codes_scales_and_zeros(tmp_path: Path) -> None:
    path, weights = make_awq(tmp_path / "m")
    checkpoint = open_checkpoint(path)
    quantization = checkpoint.quantization
    assert quantization is not None and (quantization.name, quantization.producer) == ("int4_awq", "awq")
    assert dict(quantization.schemes) == {
        f"layers.0.{name}": Scheme("int4", 32, zero_points=True)
        for name in ("q", "k", "v", "o", "gate", "up", "down")
    }
    for name, module in (("q", "self_attn.q_proj"), ("down", "mlp.down_proj")):
        wanted = weights[f"model.layers.0.{module}"]
        read = checkpoint.weights.quantized(f"layers.0.{name}.weight")  # type: ignore[attr-defined]
        np.testing.assert_array_equal(read.codes, wanted.codes)
        np.testing.assert_array_equal(read.zero, wanted.zeros)
        np.testing.assert_array_equal(read.scale, wanted.scales.astype(np.float32))
        assert (read.codes.dtype, read.zero.dtype, read.scale.dtype) == (np.int8, np.int8, np.float32)
        np.testing.assert_array_equal(checkpoint.weights.get(f"layers.0.{name}.weight"), wanted.plain)


def test_fused_tensors_are_cut(tmp_path: Path) -> None:
    path, weights = make_awq(tmp_path / "m", "phi3")
    get = open_checkpoint(path).weights.get
    qkv = np.concatenate([get(f"layers.0.{name}.weight") for name in "qkv"])
    np.testing.assert_array_equal(qkv, weights["model.layers.0.self_attn.qkv_proj"].plain)
    gate_up = np.concatenate([get(f"layers.0.{name}.weight") for name in ("gate", "up")])
    np.testing.assert_array_equal(gate_up, weights["model.layers.0.mlp.gate_up_proj"].plain)


def test_fused_tensors_are_unpacked_once_for_all_their_weights(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from plansmith.builder.checkpoint.hf_dir import HfStore

    path, _ = make_awq(tmp_path / "m", "phi3")
    quantized = open_checkpoint(path).weights.quantized  # type: ignore[attr-defined]
    read, raw = [], HfStore.raw
    monkeypatch.setattr(HfStore, "raw", lambda store, name: read.append(name) or raw(store, name))
    for name in ("q", "k", "v", "gate", "up"):
        quantized(f"layers.0.{name}.weight")
    assert [name for name in read if name.endswith("qweight")] == [
        "model.layers.0.self_attn.qkv_proj.qweight",
        "model.layers.0.mlp.gate_up_proj.qweight",
    ]
    with pytest.raises(KeyError):
        quantized("embed.weight")


@pytest.mark.parametrize("keep", [True, False])
def test_without_zero_points(keep: bool, tmp_path: Path) -> None:
    path, weights = make_awq(tmp_path / "m", config={**AWQ_CONFIG, "zero_point": False}, zero=8)
    if not keep:
        rewrite(path, lambda tensors: [tensors.pop(name) for name in list(tensors) if "qzeros" in name])
    checkpoint = open_checkpoint(path)
    assert checkpoint.quantization is not None
    assert dict(checkpoint.quantization.schemes)["layers.0.q"] == Scheme("int4", 32)
    np.testing.assert_array_equal(checkpoint.weights.get("layers.0.q.weight"), weights[Q].plain)


def test_zero_points_that_contradict(tmp_path: Path) -> None:
    path, _ = make_awq(tmp_path / "m", config={**AWQ_CONFIG, "zero_point": False})
    with pytest.raises(CheckpointError, match=r"zero points other than 8.*zero_point false"):
        open_checkpoint(path).weights.get("layers.0.q.weight")


def test_whole_rows_become_groups(tmp_path: Path) -> None:
    path, weights = make_awq(tmp_path / "m", config={**AWQ_CONFIG, "group_size": -1})
    checkpoint = open_checkpoint(path)
    assert checkpoint.quantization is not None
    assert dict(checkpoint.quantization.schemes)["layers.0.q"] == Scheme("int4", 64, zero_points=True)
    assert dict(checkpoint.quantization.schemes)["layers.0.down"] == Scheme("int4", 32, zero_points=True)
    np.testing.assert_array_equal(
        checkpoint.weights.get("layers.0.down.weight"), weights["model.layers.0.mlp.down_proj"].plain
    )


def test_layers_that_stay_float(tmp_path: Path) -> None:
    config = {**AWQ_CONFIG, "modules_to_not_convert": ["self_attn"]}
    path, weights = make_awq(tmp_path / "m", config=config)
    with pytest.raises(CheckpointError, match=r"q_proj.*modules_to_not_convert"):
        open_checkpoint(path)

    def plain(tensors: dict[str, Any]) -> None:
        for name, weight in weights.items():
            if "self_attn" in name:
                for leaf in ("qweight", "qzeros", "scales"):
                    del tensors[f"{name}.{leaf}"]
                tensors[f"{name}.weight"] = weight.plain

    rewrite(path, plain)
    checkpoint = open_checkpoint(path)
    assert checkpoint.quantization is not None
    assert {name for name, _ in checkpoint.quantization.schemes} == {
        "layers.0.gate",
        "layers.0.up",
        "layers.0.down",
    }


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"version": "gemv"}, "version is 'gemv'"),
        ({"version": "gemv_fast"}, "version is 'gemv_fast'"),
        ({"version": "marlin"}, "version is 'marlin'"),
        ({"version": "llm-awq"}, "version is 'llm-awq'"),
        ({"backend": "llm-awq"}, "backend is 'llm-awq'"),
        ({"bits": 8}, "bits is 8"),
        ({"bits": "4"}, "'bits' is '4'"),
        ({"group_size": 48}, "groups of 48"),
        ({"group_size": 0}, "groups of 0"),
        ({"desc_act": True}, "desc_act"),
        ({"zero_point": 1}, "zero_point"),
        ({"modules_to_not_convert": "lm_head"}, "list of names"),
        ({"smooth": 0.5}, "does not know.*smooth"),
    ],
)
def test_config_errors(change: dict[str, Any], words: str, tmp_path: Path) -> None:
    path, _ = make_awq(tmp_path / "m")
    edit_json(path / "config.json", lambda data: data["quantization_config"].update(change))
    with pytest.raises(CheckpointError, match=words):
        open_checkpoint(path)


def _change(leaf: str, value: Any) -> Any:
    return lambda tensors: tensors.update({f"{Q}.{leaf}": value(tensors[f"{Q}.{leaf}"])})


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda tensors: tensors.pop(f"{Q}.qzeros"), "no 'qzeros'"),
        (lambda tensors: tensors.pop(f"{Q}.scales"), "no 'scales'"),
        (lambda tensors: tensors.pop(f"{Q}.qweight"), "no 'qweight'"),
        (_change("qweight", lambda one: one.T), r"shape \[16, 64\], wanted \[64, 16\]"),
        (_change("qzeros", lambda one: one[:1]), r"shape \[1, 16\], wanted \[2, 16\]"),
        (_change("scales", lambda one: one.int()), "type I32, wanted float32"),
        (_change("qweight", lambda one: one.long()), "type I64, wanted I32"),
        (lambda tensors: tensors.update({f"{Q}.g_idx": np.zeros(64, np.int32)}), "g_idx.*not known"),
    ],
)
def test_tensor_errors(change: Any, words: str, tmp_path: Path) -> None:
    path, _ = make_awq(tmp_path / "m")
    rewrite(path, change)
    with pytest.raises(CheckpointError, match=words):
        open_checkpoint(path)
