"""FP8 with a scale a block or a tensor: equal to transformers' own dequantization, and strict."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from plansmith.builder.checkpoint import open_checkpoint
from plansmith.builder.scheme import ROW, WHOLE, Scheme
from plansmith.runtime.errors import CheckpointError
from tiny_fp8 import fp8_tensor, make_blocks, to_fp8
from tiny_models import make_tiny
from tiny_quantized import edit_json, linear_names, rewrite

WHOLES = {"quant_method": "fp8", "activation_scheme": "static"}
Q = "model.layers.0.self_attn.q_proj"


def test_blocks(tmp_path: Path) -> None:
    plain = make_blocks(tmp_path / "m")
    checkpoint = open_checkpoint(tmp_path / "m")
    quantization = checkpoint.quantization
    assert quantization is not None and (quantization.name, quantization.producer) == ("fp8_blocks", "fp8")
    assert {one for _, one in quantization.schemes} == {Scheme("fp8", 128, input="fp8", input_group=128)}
    assert checkpoint.weights.shape("layers.0.k.weight") == (96, 256)  # fewer outputs than a block
    assert checkpoint.weights.shape("layers.0.q.weight") == (384, 256)
    read = checkpoint.weights.quantized("layers.0.k.weight")  # type: ignore[attr-defined]
    assert read.scale.shape == (96, 2) and read.codes.dtype == ml_dtypes.float8_e4m3fn
    for short, module in (("q", "self_attn.q_proj"), ("k", "self_attn.k_proj"), ("down", "mlp.down_proj")):
        np.testing.assert_array_equal(
            checkpoint.weights.get(f"layers.0.{short}.weight"), plain[f"model.layers.0.{module}"]
        )


def test_blocks_equal_transformers(tmp_path: Path) -> None:
    import torch
    import transformers

    make_blocks(tmp_path / "m")
    edit_json(
        tmp_path / "m" / "config.json", lambda data: data["quantization_config"].update(dequantize=True)
    )
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "m", dtype=torch.float32)
    weights = open_checkpoint(tmp_path / "m").weights
    for short, module in (("q", "self_attn.q_proj"), ("v", "self_attn.v_proj"), ("gate", "mlp.gate_proj")):
        wanted = model.get_parameter(f"model.layers.0.{module}.weight").detach().float().numpy()
        read = weights.get(f"layers.0.{short}.weight")
        assert np.abs(read - wanted).max() <= 2**-8 * np.abs(wanted).max()  # bfloat16 at the worst


def test_blocks_of_fused_tensors(tmp_path: Path) -> None:
    # Of 8 heads of 48: q's 384 rows are whole blocks, k and v begin and end inside of one.
    plain = make_blocks(tmp_path / "m", "phi3")
    get = open_checkpoint(tmp_path / "m").weights.get
    qkv = np.concatenate([get(f"layers.0.{name}.weight") for name in "qkv"])
    np.testing.assert_array_equal(qkv, plain["model.layers.0.self_attn.qkv_proj"])


@pytest.mark.parametrize("names", [("weight_scale", "input_scale"), ("weight_scale_inv", "activation_scale")])
@pytest.mark.parametrize("scheme", ["static", "dynamic"])
def test_one_scale(names: tuple[str, str], scheme: str, tmp_path: Path) -> None:
    make_tiny("llama", tmp_path / "m", num_hidden_layers=1)
    plain = {}

    def quantize(tensors: dict[str, Any]) -> None:
        for n, name in enumerate(linear_names(tensors)):
            w, scale = tensors[f"{name}.weight"].numpy(), np.float32(0.002 + n / 4096)
            codes = to_fp8(w, scale)
            plain[name] = codes.astype(np.float32) * scale
            tensors[f"{name}.weight"] = fp8_tensor(codes)
            tensors[f"{name}.{names[0]}"] = np.array(scale)
            if scheme == "static":
                tensors[f"{name}.{names[1]}"] = np.array([0.25 + n], np.float32)

    rewrite(tmp_path / "m", quantize, {"quantization_config": {**WHOLES, "activation_scheme": scheme}})
    checkpoint = open_checkpoint(tmp_path / "m")
    assert checkpoint.quantization is not None
    group, name = (WHOLE, "fp8") if scheme == "static" else (ROW, "fp8_dynamic")
    assert checkpoint.quantization.name == name
    assert {one for _, one in checkpoint.quantization.schemes} == {
        Scheme("fp8", WHOLE, input="fp8", input_group=group)
    }
    np.testing.assert_array_equal(checkpoint.weights.get("layers.0.q.weight"), plain[Q])
    scale = checkpoint.weights.quantized_input("layers.0.gate.weight").scale  # type: ignore[attr-defined]
    assert scale == (0.25 + list(plain).index("model.layers.0.mlp.gate_proj") if scheme == "static" else 1.0)


def test_layers_that_stay_float(tmp_path: Path) -> None:
    plain = make_blocks(tmp_path / "m")

    def put_back(tensors: dict[str, Any]) -> None:
        tensors[f"{Q}.weight"] = plain[Q]
        del tensors[f"{Q}.weight_scale_inv"]

    rewrite(tmp_path / "m", put_back)
    quantization = open_checkpoint(tmp_path / "m").quantization
    assert quantization is not None and "layers.0.q" not in dict(quantization.schemes)
    edit_json(
        tmp_path / "m" / "config.json",
        lambda data: data["quantization_config"].update(modules_to_not_convert=["lm_head", "mlp.up_proj"]),
    )
    with pytest.raises(CheckpointError, match=r"up_proj.*is quantized.*lists it"):
        open_checkpoint(tmp_path / "m")


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"activation_scheme": "per_token"}, "activation_scheme"),
        ({"activation_scheme": "static"}, "static.*blocks"),
        ({"fmt": "e5m2"}, "e5m2"),
        ({"scale_fmt": "ue8m0"}, "scale_fmt is 'ue8m0'"),
        ({"weight_block_size": [128]}, r"weight_block_size is \[128\]"),
        ({"weight_block_size": [128, 0]}, r"weight_block_size is \[128, 0\]"),
        ({"weight_block_size": [128, 96]}, "groups of 96"),
        ({"weight_block_size": [64, 128]}, r"weight_scale_inv' of shape \[3, 2\], wanted \[6, 2\]"),
        ({"kv_cache_scheme": "static"}, "kv_cache_scheme"),
        ({"modules_to_convert": ["embed_tokens"]}, "modules_to_convert"),
        ({"clip": 3}, "does not know.*clip"),
    ],
)
def test_config_errors(change: dict[str, Any], words: str, tmp_path: Path) -> None:
    make_blocks(tmp_path / "m")
    edit_json(tmp_path / "m" / "config.json", lambda data: data["quantization_config"].update(change))
    with pytest.raises(CheckpointError, match=words):
        open_checkpoint(tmp_path / "m")


def _as_e8m0(tensors: dict[str, Any]) -> None:
    import torch

    tensors[f"{Q}.weight_scale_inv"] = torch.full((3, 2), 127, dtype=torch.uint8).view(torch.float8_e8m0fnu)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (_as_e8m0, "F8_E8M0.*powers of two"),
        (lambda tensors: tensors.pop(f"{Q}.weight_scale_inv"), "no 'weight_scale_inv'"),
        (
            lambda tensors: tensors.update({f"{Q}.weight": np.zeros((384, 256), np.int8)}),
            "type I8, wanted F8_E4M3",
        ),
        (
            lambda tensors: tensors.update({f"{Q}.input_scale": np.ones(1, np.float32)}),
            "input_scale.*not known",
        ),
    ],
)
def test_tensor_errors(change: Any, words: str, tmp_path: Path) -> None:
    make_blocks(tmp_path / "m")
    rewrite(tmp_path / "m", change)
    with pytest.raises(CheckpointError, match=words):
        open_checkpoint(tmp_path / "m")
