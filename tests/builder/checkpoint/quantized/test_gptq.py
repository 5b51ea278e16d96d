"""GPTQ: integers packed by the published rule come back, both versions, and what cannot be read is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from plansmith.builder.checkpoint import open_checkpoint
from plansmith.builder.scheme import ROW, Scheme
from plansmith.runtime.errors import CheckpointError
from tiny_packing import make_gptq
from tiny_quantized import edit_json, rewrite


def void(_: object) -> None:
    """Drop a result."""


Q = "model.layers.0.self_attn.q_proj"


@pytest.mark.parametrize(
    ("change", "options", "scheme", "name"),
    [
        ({}, {"zero": 8}, Scheme("int4", 32), "int4_gptq"),
        ({"desc_act": True}, {"zero": 8}, Scheme("int4", 32), "int4_gptq"),
        ({"group_size": -1}, {"zero": 8}, Scheme("int4", 64), "int4_gptq"),
        ({"sym": False}, {"low_zero": 1}, Scheme("int4", 32, zero_points=True), "int4_gptq"),
        (
            {"sym": False, "checkpoint_format": "gptq_v2", "group_size": -1},
            {},
            Scheme("int4", 64, zero_points=True),
            "int4_gptq",
        ),
        ({"bits": 8}, {"zero": 128}, Scheme("int8", 32), "int8_gptq"),
        (
            {"bits": 8, "group_size": -1, "checkpoint_format": "gptq_v2"},
            {"zero": 128},
            Scheme("int8", ROW),
            "int8_gptq",
        ),
    ],
)
def test_weights(
    change: dict[str, Any], options: dict[str, int], scheme: Scheme, name: str, tmp_path: Path
) -> None:
    path, weights = make_gptq(tmp_path / "m", change=change, **options)
    checkpoint = open_checkpoint(path)
    quantization = checkpoint.quantization
    assert quantization is not None
    assert (quantization.name, quantization.producer) == (name, "gptqmodel 4.2.0")
    assert dict(quantization.schemes)["layers.0.q"] == scheme
    for short, module in (("q", "self_attn.q_proj"), ("o", "self_attn.o_proj"), ("down", "mlp.down_proj")):
        wanted = weights[f"model.layers.0.{module}"]
        read = checkpoint.weights.quantized(f"layers.0.{short}.weight")  # type: ignore[attr-defined]
        middle = 0 if scheme.zero_points else 1 << (scheme.weight_bits - 1)
        np.testing.assert_array_equal(read.codes.astype(int) + middle, wanted.codes)
        np.testing.assert_array_equal(checkpoint.weights.get(f"layers.0.{short}.weight"), wanted.plain)


def test_fused_tensors_are_cut(tmp_path: Path) -> None:
    path, weights = make_gptq(tmp_path / "m", "phi3", {"sym": False}, low_zero=1)
    get = open_checkpoint(path).weights.get
    qkv = np.concatenate([get(f"layers.0.{name}.weight") for name in "qkv"])
    np.testing.assert_array_equal(qkv, weights["model.layers.0.self_attn.qkv_proj"].plain)


def test_a_bias_of_zeros_is_left_out(tmp_path: Path) -> None:
    path, _ = make_gptq(tmp_path / "m", "qwen3", zero=8)
    name = f"{Q}.bias"
    rewrite(path, lambda tensors: tensors.update({name: np.zeros(128, np.float16)}))
    assert "layers.0.q.bias" not in open_checkpoint(path).weights.names()
    rewrite(path, lambda tensors: tensors.update({name: np.ones(128, np.float16)}))
    with pytest.raises(CheckpointError, match=r"q_proj.*'bias'.*no bias"):
        open_checkpoint(path)


def test_an_order_of_its_own_is_refused(tmp_path: Path) -> None:
    path, _ = make_gptq(tmp_path / "m", change={"desc_act": True}, zero=8)
    order = np.random.default_rng(0).permutation(np.arange(64) // 32).astype(np.int32)
    rewrite(path, lambda tensors: tensors.update({f"{Q}.g_idx": order}))
    with pytest.raises(CheckpointError, match=r"q_proj.*g_idx.*desc_act false"):
        open_checkpoint(path)


@pytest.mark.parametrize("change", [{}, {"bits": 8}])
def test_an_order_that_is_not_told_is_refused(change: dict[str, Any], tmp_path: Path) -> None:
    zero = 1 << (change.get("bits", 4) - 1)
    path, _ = make_gptq(tmp_path / "m", change={"desc_act": True, **change}, zero=zero)
    rewrite(path, lambda tensors: void(tensors.pop(f"{Q}.g_idx")))
    with pytest.raises(CheckpointError, match=r"q_proj.*no 'g_idx'.*desc_act true"):
        open_checkpoint(path)
    # Where one group has all inputs, or nothing was reordered, there is nothing to tell.
    edit_json(path / "config.json", lambda data: data["quantization_config"].update(desc_act=False))
    open_checkpoint(path)
    path, weights = make_gptq(
        tmp_path / "one", change={"desc_act": True, "group_size": -1, **change}, zero=zero
    )
    rewrite(path, lambda tensors: void(tensors.pop(f"{Q}.g_idx")))
    plain = open_checkpoint(path).weights.get("layers.0.q.weight")
    np.testing.assert_array_equal(plain, weights[Q].plain)


@pytest.mark.parametrize(
    ("change", "options", "words"),
    [
        ({}, {}, "zero points other than 8.*sym true"),
        ({"checkpoint_format": "gptq_v2"}, {"zero": 7}, "zero points other than 8"),
        ({"bits": 8}, {"zero": 127}, "zero points other than 128"),
    ],
)
def test_zero_points_that_contradict(
    change: dict[str, Any], options: dict[str, int], words: str, tmp_path: Path
) -> None:
    path, _ = make_gptq(tmp_path / "m", change=change, low_zero=1, **options)
    with pytest.raises(CheckpointError, match=words):
        open_checkpoint(path).weights.get("layers.0.q.weight")


def test_a_zero_point_of_16(tmp_path: Path) -> None:
    path, _ = make_gptq(tmp_path / "m", change={"sym": False}, zero=16)
    with pytest.raises(CheckpointError, match=r"zero point of 16.*gptq_v2"):
        open_checkpoint(path).weights.get("layers.0.q.weight")


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"bits": 2}, "bits is 2"),
        ({"bits": 3}, "bits is 3"),
        ({"bits": None}, "'bits' is missing"),
        ({"bits": 8, "sym": False}, "sym is false with 8 bits"),
        ({"checkpoint_format": "marlin"}, "checkpoint_format is 'marlin'"),
        ({"is_marlin_format": True}, "is_marlin_format"),
        ({"pack_dtype": "int8"}, "pack_dtype is 'int8'"),
        ({"group_size": 48}, "groups of 48"),
        ({"group_size": "32"}, "'group_size' is '32'"),
        ({"dynamic": {"+:.*up_proj": {"bits": 8}}}, "dynamic"),
        ({"rotation": "hadamard"}, "does not know.*rotation"),
    ],
)
def test_config_errors(change: dict[str, Any], words: str, tmp_path: Path) -> None:
    path, _ = make_gptq(tmp_path / "m", zero=8)
    edit_json(path / "config.json", lambda data: data["quantization_config"].update(change))
    with pytest.raises(CheckpointError, match=words):
        open_checkpoint(path)


def _change(leaf: str, value: Any) -> Any:
    return lambda tensors: tensors.update({f"{Q}.{leaf}": value(tensors[f"{Q}.{leaf}"])})


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda tensors: tensors.pop(f"{Q}.qzeros"), "no 'qzeros'"),
        (_change("qweight", lambda one: one[:4]), r"shape \[4, 128\], wanted \[8, 128\]"),
        (_change("scales", lambda one: one.T), r"shape \[128, 2\], wanted \[2, 128\]"),
        (_change("g_idx", lambda one: one[:32]), r"'g_idx' of shape \[32\], wanted \[64\]"),
        (_change("g_idx", lambda one: one.float()), "'g_idx' of type float32, wanted I32"),
    ],
)
def test_tensor_errors(change: Any, words: str, tmp_path: Path) -> None:
    path, _ = make_gptq(tmp_path / "m", zero=8)
    rewrite(path, change)
    with pytest.raises(CheckpointError, match=words):
        open_checkpoint(path)
