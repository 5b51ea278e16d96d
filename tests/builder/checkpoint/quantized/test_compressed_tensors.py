"""compressed-tensors: every format written from known codes comes back, and its groups and patterns are followed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from plansmith.builder.checkpoint import open_checkpoint
from plansmith.runtime.errors import CheckpointError
from tiny_compressed_tensors import (
    CASES,
    FP8,
    INT8,
    TENSOR,
    TOKEN,
    bfloat16_tensor,
    compressed_config,
    make_compressed,
)
from tiny_quantized import edit_json, rewrite

Q = "model.layers.0.self_attn.q_proj"


@pytest.mark.parametrize("name", CASES)
def test_weights(name: str, tmp_path: Path) -> None:
    path, plain = make_compressed(name, tmp_path / "m")
    checkpoint = open_checkpoint(path)
    quantization = checkpoint.quantization
    assert quantization is not None
    assert (quantization.name, quantization.producer) == (CASES[name].name, "compressed-tensors 0.12.2")
    assert dict(quantization.schemes)["layers.0.q"] == CASES[name].scheme
    for short, module in (("q", "self_attn.q_proj"), ("o", "self_attn.o_proj"), ("down", "mlp.down_proj")):
        read, wanted = checkpoint.weights.get(f"layers.0.{short}.weight"), plain[f"model.layers.0.{module}"]
        np.testing.assert_allclose(read, wanted, rtol=1e-6, atol=0)
    calibrated = checkpoint.weights.quantized_input("layers.0.q.weight")  # type: ignore[attr-defined]
    assert calibrated.scale == (1.0 if not CASES[name].scheme.is_static else 0.25 if name == "nvfp4" else 0.5)


@pytest.mark.parametrize("name", ["fp8", "fp8_block", "w4a16_zeros", "nvfp4", "int8_static"])
def test_fused_tensors_are_cut(name: str, tmp_path: Path) -> None:
    path, plain = make_compressed(name, tmp_path / "m", "phi3")
    get = open_checkpoint(path).weights.get
    qkv = np.concatenate([get(f"layers.0.{one}.weight") for one in "qkv"])
    np.testing.assert_allclose(qkv, plain["model.layers.0.self_attn.qkv_proj"], rtol=1e-6, atol=0)


@pytest.mark.parametrize(
    "change",
    [
        {"ignore": ["lm_head", "re:.*mlp.*"]},
        {"targets": ["re:.*self_attn.*"]},
        {"targets": [f"model.layers.0.self_attn.{name}_proj" for name in "qkvo"]},
    ],
)
def test_targets_and_ignore(change: dict[str, Any], tmp_path: Path) -> None:
    path, _ = make_compressed("w4a16", tmp_path / "m", only="self_attn", ignore=change.get("ignore", []))
    if "targets" in change:
        edit_json(
            path / "config.json",
            lambda data: data["quantization_config"]["config_groups"]["group_0"].update(change),
        )
    quantization = open_checkpoint(path).quantization
    assert quantization is not None and quantization.name == "int4_wo"
    assert {name for name, _ in quantization.schemes} == {f"layers.0.{one}" for one in "qkvo"}


def test_groups_of_layers(tmp_path: Path) -> None:
    path, _ = make_compressed("w4a16", tmp_path / "m", only="self_attn")
    fp8, fp8_plain = make_compressed("fp8_channel", tmp_path / "other", only="mlp")
    from safetensors.torch import load_file

    others = {name: one for name, one in load_file(fp8 / "model.safetensors").items() if "mlp" in name}

    def mix(tensors: dict[str, Any]) -> None:
        for name in [name for name in tensors if "mlp" in name]:
            del tensors[name]
        tensors.update(others)

    first, second = (
        compressed_config(CASES[name])["config_groups"]["group_0"] for name in ("w4a16", "fp8_channel")
    )
    groups = {
        "group_0": {**first, "format": "pack-quantized"},
        "group_1": {**second, "targets": ["re:.*mlp.*"], "format": "float-quantized"},
    }
    rewrite(path, mix)
    edit_json(
        path / "config.json",
        lambda data: data["quantization_config"].update(format="mixed-precision", config_groups=groups),
    )
    checkpoint = open_checkpoint(path)
    assert checkpoint.quantization is not None and checkpoint.quantization.name == "mixed"
    schemes = dict(checkpoint.quantization.schemes)
    assert (schemes["layers.0.q"].weight, schemes["layers.0.up"].weight) == ("int4", "fp8")
    np.testing.assert_allclose(
        checkpoint.weights.get("layers.0.up.weight"), fp8_plain["model.layers.0.mlp.up_proj"], rtol=1e-6
    )


@pytest.mark.parametrize(("kind", "wanted"), [("float", "fp8"), ("int", "int8")])
def test_kv_cache(kind: str, wanted: str, tmp_path: Path) -> None:
    scheme = {"num_bits": 8, "type": kind, "strategy": "tensor", "dynamic": False, "symmetric": True}
    path, _ = make_compressed("w4a16", tmp_path / "m", kv_cache_scheme=scheme)
    with pytest.raises(CheckpointError, match=r"self_attn\.k_scale.*missing"):
        open_checkpoint(path)
    scales = {
        "k_scale": bfloat16_tensor(np.array([0.5], ml_dtypes.bfloat16)),
        "v_scale": np.array(0.125, np.float32),
    }
    rewrite(
        path, lambda tensors: tensors.update({f"model.layers.0.self_attn.{k}": v for k, v in scales.items()})
    )
    checkpoint = open_checkpoint(path)
    assert checkpoint.quantization is not None and checkpoint.quantization.kv == wanted
    assert checkpoint.weights.kv_scales(0) == (0.5, 0.125)  # type: ignore[attr-defined]
    rewrite(
        path, lambda tensors: tensors.update({"model.layers.0.self_attn.k_scale": np.ones(2, np.float32)})
    )
    with pytest.raises(CheckpointError, match=r"k_scale.*\[2\].*single heads"):
        open_checkpoint(path)


def test_zero_points_of_zero_are_left_out(tmp_path: Path) -> None:
    path, _ = make_compressed("int8_dynamic", tmp_path / "m")
    rewrite(path, lambda tensors: tensors.update({f"{Q}.weight_zero_point": np.zeros((128, 1), np.int8)}))
    open_checkpoint(path)
    rewrite(path, lambda tensors: tensors.update({f"{Q}.weight_zero_point": np.ones((128, 1), np.int8)}))
    with pytest.raises(CheckpointError, match=r"weight_zero_point.*symmetric true"):
        open_checkpoint(path)


def test_order_of_inputs(tmp_path: Path) -> None:
    path, _ = make_compressed("w4a16", tmp_path / "m")
    order = np.arange(64, dtype=np.int32) // 32
    rewrite(path, lambda tensors: tensors.update({f"{Q}.weight_g_idx": order}))
    open_checkpoint(path)
    rewrite(path, lambda tensors: tensors.update({f"{Q}.weight_g_idx": order[::-1].copy()}))
    with pytest.raises(CheckpointError, match=r"weight_g_idx.*actorder"):
        open_checkpoint(path)


@pytest.mark.parametrize("name", ["w4a16", "w4a16_zeros", "w8a16_group", "nvfp4a16"])
@pytest.mark.parametrize("order", ["group", "dynamic"])
def test_an_order_that_is_not_told_is_refused(name: str, order: str, tmp_path: Path) -> None:
    path, plain = make_compressed(name, tmp_path / "m")
    edit_json(path / "config.json", lambda data: _weights(actorder=order)(data["quantization_config"]))
    with pytest.raises(CheckpointError, match=rf"q_proj.*no 'weight_g_idx'.*actorder {order}"):
        open_checkpoint(path)
    group = 16 if name == "nvfp4a16" else 32

    def tell(tensors: dict[str, Any]) -> None:
        for module in plain:
            inputs = 96 if "down" in module else 128 if "o_proj" in module else 64
            tensors[f"{module}.weight_g_idx"] = np.arange(inputs, dtype=np.int32) // group

    rewrite(path, tell)
    np.testing.assert_allclose(open_checkpoint(path).weights.get("layers.0.q.weight"), plain[Q], rtol=1e-6)


@pytest.mark.parametrize("name", ["w4a16_channel", "w8a16"])
def test_one_group_has_no_order(name: str, tmp_path: Path) -> None:
    path, plain = make_compressed(name, tmp_path / "m")
    edit_json(path / "config.json", lambda data: _weights(actorder="group")(data["quantization_config"]))
    np.testing.assert_allclose(open_checkpoint(path).weights.get("layers.0.q.weight"), plain[Q], rtol=1e-6)


@pytest.mark.parametrize("name", ["fp8_block", "fp8_channel", "int8_dynamic", "w4a16", "w8a16_group"])
def test_groups_of_inputs_that_do_not_divide(name: str, tmp_path: Path) -> None:
    path, _ = make_compressed(name, tmp_path / "m")
    kind = FP8 if "fp8" in name else INT8
    inputs = {**kind, "strategy": "group", "group_size": 48, "dynamic": True}
    edit_json(
        path / "config.json",
        lambda data: data["quantization_config"]["config_groups"]["group_0"].update(input_activations=inputs),
    )
    with pytest.raises(
        CheckpointError, match=r"layer '.*q_proj'.*64 inputs, which groups of 48 do not divide"
    ):
        open_checkpoint(path)


def test_a_pattern_that_would_not_end(tmp_path: Path) -> None:
    path, _ = make_compressed("w4a16", tmp_path / "m", ignore=[r"re:(\w*\.*)*(\w*\.*)*!"])
    with pytest.raises(CheckpointError, match=r"config.json.*re:.*may take hours to match"):
        open_checkpoint(path)


def test_the_older_name_of_the_config(tmp_path: Path) -> None:
    path, _ = make_compressed("w4a16", tmp_path / "m")

    def rename(data: dict[str, Any]) -> None:
        data["compression_config"] = data.pop("quantization_config")

    edit_json(path / "config.json", rename)
    assert open_checkpoint(path).quantization is not None


def _weights(**change: Any) -> Any:
    return lambda quant: quant["config_groups"]["group_0"]["weights"].update(change)


def _inputs(**change: Any) -> Any:
    inputs = {**INT8, **TOKEN, **change}
    return lambda quant: quant["config_groups"]["group_0"].update(input_activations=inputs)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda quant: quant.update(format="marlin-24"), "format is 'marlin-24'"),
        (
            lambda quant: quant.update(format="float-quantized"),
            "int4 by group of 32.*float-quantized.*not supported",
        ),
        (lambda quant: quant.update(sparsity_config={"format": "sparse-24-bitmask"}), "sparse-24-bitmask"),
        (lambda quant: quant.update(transform_config={"config_groups": {"R1": {}}}), "transform_config"),
        (lambda quant: quant.update(ignore=["re:("]), r"re:\(.*no regular expression"),
        (lambda quant: quant.update(config_groups=[]), "config_groups"),
        (lambda quant: quant.update(config_groups={"a": 3}), r"config_groups\['a'\] is 3"),
        (
            lambda quant: quant.update(kv_cache_scheme={**FP8, "strategy": "attn_head"}),
            "strategy is 'attn_head'",
        ),
        (lambda quant: quant.update(kv_cache_scheme={**FP8, **TOKEN}), "kv_cache_scheme is float8 by token"),
        (lambda quant: quant.update(smoothing=1), "does not know.*smoothing"),
        (_weights(num_bits=3), "int3 by group"),
        (_weights(num_bits=True), "num_bits"),
        (_weights(strategy="spiral"), "strategy is 'spiral'"),
        (_weights(group_size=48), "groups of 48"),
        (_weights(group_size=None), "without a group_size"),
        (_weights(dynamic=True), "dynamic"),
        (_weights(type="complex"), "complex"),
        (_weights(actorder=7), "actorder is 7"),
        (_weights(strategy="block", block_structure=[32]), r"block_structure is \[32\]"),
        (_inputs(symmetric=False), "int8 by token, dynamic, asymmetric"),
        (_inputs(num_bits=4), "int4 by token"),
        (_inputs(dynamic=False), "int8 by token, static"),
        (
            lambda quant: quant["config_groups"]["group_0"].update(output_activations={**INT8, **TENSOR}),
            "output_activations",
        ),
        (lambda quant: quant["config_groups"]["group_0"].update(weights=None), "has no weights"),
        (lambda quant: quant["config_groups"]["group_0"].update(weights=[]), "must be an object"),
        (
            lambda quant: quant["config_groups"]["group_0"].update(targets=["re:.*up_proj"]),
            "not known|I32|missing",
        ),
    ],
)
def test_config_errors(change: Any, words: str, tmp_path: Path) -> None:
    path, _ = make_compressed("w4a16", tmp_path / "m")
    edit_json(path / "config.json", lambda data: change(data["quantization_config"]))
    with pytest.raises(CheckpointError, match=words):
        open_checkpoint(path)


@pytest.mark.parametrize(
    ("name", "change", "words"),
    [
        (
            "w4a16",
            lambda t: t.update({f"{Q}.weight_shape": np.array([64, 128])}),
            r"weight_shape \[64, 128\]",
        ),
        ("w4a16", lambda t: t.pop(f"{Q}.weight_shape"), "no 'weight_shape'"),
        (
            "w4a16",
            lambda t: t.update({f"{Q}.weight_packed": t[f"{Q}.weight_packed"][:, :4]}),
            r"shape \[128, 4\]",
        ),
        (
            "w4a16",
            lambda t: t.update({f"{Q}.weight": np.zeros((128, 64), np.float16)}),
            "plain float16.*int4",
        ),
        ("w4a16_zeros", lambda t: t.pop(f"{Q}.weight_zero_point"), "no 'weight_zero_point'"),
        ("fp8", lambda t: t.pop(f"{Q}.input_scale"), "no 'input_scale'"),
        (
            "fp8_channel",
            lambda t: t.update({f"{Q}.input_scale": np.ones(1, np.float32)}),
            "input_scale.*not known",
        ),
        ("nvfp4", lambda t: t.pop(f"{Q}.input_global_scale"), "no 'input_global_scale'"),
        ("int8_dynamic", lambda t: t.update({f"{Q}.weight": t[f"{Q}.weight"].int()}), "type I32, wanted I8"),
    ],
)
def test_tensor_errors(name: str, change: Any, words: str, tmp_path: Path) -> None:
    path, _ = make_compressed(name, tmp_path / "m")
    rewrite(path, change)
    with pytest.raises(CheckpointError, match=words):
        open_checkpoint(path)
