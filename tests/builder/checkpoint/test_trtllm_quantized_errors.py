"""Quantized TensorRT-LLM checkpoints whose tensors or configuration do not fit: one error a broken rule."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from plansmith.builder.checkpoint import open_checkpoint
from plansmith.runtime.errors import CheckpointError
from trtllm_exports import Exported, change_tensors

pytest.importorskip("modelopt")
pytestmark = pytest.mark.filterwarnings("ignore")


FP8_ZEROS = torch.zeros(128, 128, dtype=torch.float8_e4m3fn)
KV_SCALE = "transformer.layers.0.attention.v_cache_scaling_factor"
QKV, FC = "transformer.layers.0.attention.qkv.", "transformer.layers.1.mlp.fc."
TENSORS: list[tuple[str, Callable[[dict[str, torch.Tensor]], Any], str]] = [
    ("fp8", lambda t: t.pop(QKV + "weights_scaling_factor"), "qkv' has no 'weights_scaling_factor'"),
    ("fp8", lambda t: t.pop(QKV + "activation_scaling_factor"), "qkv' has no 'activation_scaling_factor'"),
    ("fp8", lambda t: t.pop(QKV + "weight"), "qkv' has no 'weight'"),
    ("fp8", lambda t: t.update({QKV + "weight": t[QKV + "weight"].half()}), "is plain float16, .* says FP8"),
    ("fp8", lambda t: t.update({QKV + "weight": t[QKV + "weight"][:8].clone()}), r"'weight' of shape \[8, 128\]"),
    ("fp8", lambda t: t.update({FC + "odd": torch.ones(1)}), r"mlp.fc.odd' is not known"),
    ("fp8", lambda t: t.pop(KV_SCALE), "v_cache.* is missing"),
    ("int8_sq", lambda t: t.update({FC + "weights_scaling_factor": torch.ones(1)}), r"of shape \[1\], wanted \[256\]"),
    ("int4_awq", lambda t: t.update({FC + "weight": FP8_ZEROS}), "type F8_E4M3, wanted"),
    ("int4_awq", lambda t: t.update({FC + "weight": t[FC + "weight"].repeat(1, 2)}), r"'weight' of shape"),
    ("int8_wo", lambda t: t.update({FC + "per_channel_scale": torch.ones(256)}), "interleaved for the kernels of one"),
]  # fmt: skip


@pytest.mark.parametrize(("recipe", "change", "message"), TENSORS)
def test_tensors_that_do_not_fit(
    recipe: str, change: Any, message: str, trtllm_exported: Callable[[str], Exported], tmp_path: Path
) -> None:
    out = shutil.copytree(trtllm_exported(recipe).path, tmp_path / "t")
    change_tensors(out, change)
    with pytest.raises(CheckpointError, match=message):
        open_checkpoint(out)


@pytest.mark.parametrize("value", [-1.0, float("nan"), float("inf")])
def test_scales_that_are_no_scales(
    value: float, trtllm_exported: Callable[[str], Exported], tmp_path: Path
) -> None:
    out = shutil.copytree(trtllm_exported("int8_wo").path, tmp_path / "t")
    change_tensors(out, lambda t: t[QKV + "weights_scaling_factor"].fill_(value))
    with pytest.raises(CheckpointError, match="'weights_scaling_factor' that are negative, NaN or infinite"):
        open_checkpoint(out).weights.get("layers.0.k.weight")


@pytest.mark.parametrize(
    ("recipe", "name", "value", "message"),
    [
        ("fp8", QKV + "weights_scaling_factor", 3e38, "qkv' cannot be held in float32: its scales reach 3e"),
        ("fp8", QKV + "activation_scaling_factor", 1e-40, "qkv' .* scale of its input is 1e-40"),
        ("fp8", QKV + "activation_scaling_factor", 0.0, "qkv' has 'activation_scaling_factor' = 0, wanted"),
        ("fp8", KV_SCALE, 1e-40, "v_cache.*is 1e-40, which is too small"),
        ("w4a8_awq", QKV + "weights_scaling_factor_2", 1e-40, "qkv' .* FP8 grid is 1e-40"),
        ("w4a8_awq", QKV + "prequant_scaling_factor", 0.0, "qkv' has zeros in 'prequant_scaling_factor'"),
    ],
)
def test_numbers_that_float32_does_not_hold(
    recipe: str,
    name: str,
    value: float,
    message: str,
    trtllm_exported: Callable[[str], Exported],
    tmp_path: Path,
) -> None:
    out = shutil.copytree(trtllm_exported(recipe).path, tmp_path / "t")
    change_tensors(out, lambda t: t[name].fill_(value))
    weights: Any = open_checkpoint(out).weights
    with pytest.raises(CheckpointError, match=message):
        weights.quantized_input("layers.0.k.weight")
        weights.quantized("layers.0.k.weight")
        weights.kv_scales(0)


SECTIONS: list[tuple[str, dict[str, Any], str]] = [
    (
        "fp8",
        {"quant_algo": None, "kv_cache_quant_algo": None},
        "as F8_E4M3, and config.json has no quantization",
    ),
    (
        "fp8",
        {"quant_algo": None},
        "only linear layers that the quantization config names may be quantized|not known",
    ),
    ("fp8", {"quant_algo": "W4A16"}, "interleaved for the kernels of one generation"),
    ("fp8", {"quant_algo": "W4A16_GPTQ"}, "interleaved"),
    ("fp8", {"quant_algo": "W8A8_SQ_PER_TENSOR_PLUGIN"}, "whose scales belong to that stack's plugins"),
    ("fp8", {"quant_algo": "W4A8_QSERVE_PER_GROUP"}, "QServe"),
    ("fp8", {"quant_algo": "FP8_BLOCK_SCALES"}, "quant_algo is 'FP8_BLOCK_SCALES', supported are"),
    ("fp8", {"quant_algo": 8}, "quant_algo is 8"),
    ("fp8", {"kv_cache_quant_algo": "NVFP4"}, "KV cache's quantization is 'NVFP4'"),
    ("fp8", {"kv_cache_quant_algo": None}, "cache_scaling_factor.* not known"),
    ("fp8", {"exclude_modules": ["*attention*", "lm_head"]}, "not known|only linear layers"),
    ("fp8", {"exclude_modules": "lm_head"}, "exclude_modules' is 'lm_head'"),
    ("fp8", {"quant_algo": "W8A16"}, "'weight' of type F8_E4M3, wanted I8"),
    ("fp8_per_channel", {"use_meta_recipe": True}, "use_meta_recipe is True, inputs that are clipped"),
    ("fp8_per_channel", {"clamp_val": [-1200.0, 1200.0]}, "clamp_val is"),
    ("int4_awq", {"has_zero_point": True}, "has_zero_point is True"),
    ("int4_awq", {"group_size": 64}, r"'weights_scaling_factor' of shape \[\d+, 1\], wanted"),
    ("int4_awq", {"group_size": 100}, "which groups of 100 do not divide"),
    ("int4_awq", {"frobnicate": 1}, "'frobnicate'"),
]


@pytest.mark.parametrize(("recipe", "fields", "message"), SECTIONS)
def test_section_that_does_not_fit(
    recipe: str,
    fields: dict[str, Any],
    message: str,
    trtllm_exported: Callable[[str], Exported],
    tmp_path: Path,
) -> None:
    out = shutil.copytree(trtllm_exported(recipe).path, tmp_path / "t")
    config = json.loads((out / "config.json").read_text())
    config["quantization"].update(fields)
    (out / "config.json").write_text(json.dumps(config))
    with pytest.raises(CheckpointError, match=message):
        open_checkpoint(out)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda path: path.unlink(), r"quant_cfg.json: is missing"),
        (lambda path: path.write_text("{"), r"quant_cfg.json: is not valid JSON"),
        (lambda path: path.write_text('{"quant_algo": "FP8"}'), "quant_algo is 'FP8', config.json beside it"),
        (lambda path: path.write_text('{"quant_algo": "MIXED_PRECISION"}'), "quantized_layers"),
        (lambda path: path.write_text(path.read_text().replace("s.0.mlp.fc", "s.7.mlp.fc")), "layers.7.mlp.fc"),
        (lambda path: path.write_text(path.read_text().replace('"W8A16"', '"W4A16"', 1)), "interleaved"),
    ],
)  # fmt: skip
def test_layers_of_a_mixed_checkpoint(
    change: Callable[[Path], Any], message: str, trtllm_exported: Callable[[str], Exported], tmp_path: Path
) -> None:
    out = shutil.copytree(trtllm_exported("mixed").path, tmp_path / "t")
    change(out / "quant_cfg.json")
    with pytest.raises(CheckpointError, match=message):
        open_checkpoint(out)
