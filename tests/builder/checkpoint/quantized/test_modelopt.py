"""ModelOpt's checkpoints, made by ModelOpt: what is read is what ModelOpt's simulation computes with."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from plansmith.builder.checkpoint import open_checkpoint
from plansmith.builder.scheme import ROW, WHOLE, QuantizedSource, Scheme
from plansmith.runtime.errors import CheckpointError
from tiny_quantized import GROUP, RECIPES, Simulated, edit_json, make_modelopt, rewrite

Made = tuple[Path, dict[str, Simulated]]

_SCHEMES = {
    "fp8": Scheme("fp8", WHOLE, input="fp8"),
    "fp8_per_channel": Scheme("fp8", ROW, input="fp8", input_group=ROW),
    "int8_sq": Scheme("int8", ROW, input="int8", pre_scale=True),
    "int8_wo": Scheme("int8", ROW),
    "int4_awq": Scheme("int4", GROUP, pre_scale=True),
    "int4_wo": Scheme("int4", GROUP),
    "w4a8_awq": Scheme("int4", GROUP, input="fp8", pre_scale=True, fp8_grid=True),
    "nvfp4": Scheme("fp4", 16, input="fp4"),
    "nvfp4_wo": Scheme("fp4", 16),
}
_MAX = {"fp8": 448.0, "int8": 127.0, "fp4": 6.0 * 448.0}
_MODULES = {
    "q": "self_attn.q_proj",
    "k": "self_attn.k_proj",
    "v": "self_attn.v_proj",
    "o": "self_attn.o_proj",
    "gate": "mlp.gate_proj",
    "up": "mlp.up_proj",
    "down": "mlp.down_proj",
}


@pytest.fixture(scope="session")
def quantized(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Made]:
    """Return recipe -> directory and simulation, made once; do not change the files."""
    made: dict[str, Made] = {}

    def get(recipe: str) -> Made:
        if recipe not in made:
            made[recipe] = make_modelopt(recipe, tmp_path_factory.mktemp("modelopt") / recipe)
        return made[recipe]

    return get


@pytest.fixture
def copy(quantized: Callable[[str], Made], tmp_path: Path) -> Callable[[str], Path]:
    """Return recipe -> a copy that may be changed."""

    def get(recipe: str) -> Path:
        return Path(shutil.copytree(quantized(recipe)[0], tmp_path / recipe))

    return get


def module_name(canonical: str) -> str:
    _, layer, name, _ = canonical.split(".")
    return f"model.layers.{layer}.{_MODULES[name]}"


def source(weights: Any) -> QuantizedSource:
    return weights  # type: ignore[no-any-return]


@pytest.mark.parametrize("recipe", RECIPES)
def test_equals_the_simulation(recipe: str, quantized: Callable[[str], Made]) -> None:
    path, simulated = quantized(recipe)
    checkpoint = open_checkpoint(path)
    quantization = checkpoint.quantization
    assert quantization is not None and quantization.producer.startswith("modelopt 0.")
    assert (quantization.name, quantization.kv) == (recipe, "float")
    assert len(quantization.schemes) == 14 == len(simulated)
    assert _SCHEMES[recipe] in {scheme for _, scheme in quantization.schemes}
    for name, scheme in quantization.schemes:
        one = simulated[module_name(f"{name}.weight")]
        check_layer(checkpoint.weights, f"{name}.weight", scheme, one)


def check_layer(weights: Any, name: str, scheme: Scheme, one: Simulated) -> None:
    read, wanted = weights.get(name), one.weight
    if one.pre_scale is not None:
        wanted = wanted * one.pre_scale
    assert read.dtype == np.float32 and read.shape == weights.shape(name)
    # ModelOpt's simulation multiplies by 1 / scale where its export divides: a value between two codes may differ.
    step = np.abs(wanted).max() / 7
    differs = np.abs(read - wanted) > 1e-5 * np.abs(wanted).max()
    assert differs.mean() < 2e-3 and np.abs(read - wanted).max() <= step
    calibrated = source(weights).quantized_input(name)
    assert (calibrated.pre_scale is not None) == (one.pre_scale is not None) == scheme.pre_scale
    if calibrated.pre_scale is not None:
        np.testing.assert_array_equal(calibrated.pre_scale, one.pre_scale)
    if scheme.is_static:
        assert one.input_amax is not None
        assert calibrated.scale == pytest.approx(one.input_amax / _MAX[scheme.input], rel=1e-6)


def test_codes_are_the_stored_ones(quantized: Callable[[str], Made]) -> None:
    from safetensors.torch import load_file

    path, _ = quantized("int4_wo")
    stored = load_file(path / "model.safetensors")["model.layers.1.mlp.down_proj.weight"].numpy()
    codes = source(open_checkpoint(path).weights).quantized("layers.1.down.weight").codes
    for row, column in [(0, 0), (1, 0), (6, 95), (63, 17), (62, 17)]:
        byte = int(stored[row // 2, column])
        code = byte & 15 if row % 2 == 0 else byte >> 4
        assert codes[row, column] == (code - 16 if code > 7 else code)


def test_fused_tensors_are_cut(tmp_path: Path) -> None:
    for recipe in ("fp8", "int4_awq", "nvfp4"):
        path, simulated = make_modelopt(recipe, tmp_path / recipe, "phi3", num_hidden_layers=1)
        checkpoint = open_checkpoint(path)
        assert checkpoint.quantization is not None
        schemes = dict(checkpoint.quantization.schemes)
        for tensor, parts in (("self_attn.qkv_proj", "q k v"), ("mlp.gate_up_proj", "gate up")):
            fused, first = simulated[f"model.layers.0.{tensor}"], 0
            for part in parts.split():
                name = f"layers.0.{part}.weight"
                rows = checkpoint.weights.shape(name)[0]
                cut = Simulated(fused.weight[first : first + rows], fused.pre_scale, fused.input_amax)
                check_layer(checkpoint.weights, name, schemes[f"layers.0.{part}"], cut)
                first += rows


def test_nvfp4_with_factors(copy: Callable[[str], Path]) -> None:
    path = copy("nvfp4")
    plain = open_checkpoint(path).weights.get("layers.0.q.weight")
    factors = np.linspace(0.5, 2, 64, dtype=np.float32)
    rewrite(path, lambda tensors: tensors.update({_q("pre_quant_scale"): factors}))
    edit_json(path / "hf_quant_config.json", _set_algo("NVFP4_AWQ"))
    edit_json(path / "config.json", lambda data: data["quantization_config"].update(quant_algo="NVFP4_AWQ"))
    checkpoint = open_checkpoint(path)
    assert checkpoint.quantization is not None and checkpoint.quantization.name == "nvfp4_awq"
    assert dict(checkpoint.quantization.schemes)["layers.0.q"] == Scheme(
        "fp4", 16, input="fp4", pre_scale=True
    )
    np.testing.assert_array_equal(checkpoint.weights.get("layers.0.q.weight"), plain * factors)


def test_kv_cache_scales(tmp_path: Path) -> None:
    path, _ = make_modelopt("fp8", tmp_path / "m", kv="FP8", num_hidden_layers=1)
    checkpoint = open_checkpoint(path)
    assert checkpoint.quantization is not None and checkpoint.quantization.kv == "fp8"
    k, v = source(checkpoint.weights).kv_scales(0)
    assert 0 < k < 1 and 0 < v < 1 and k != v

    def drop(tensors: dict[str, Any]) -> None:
        del tensors["model.layers.0.self_attn.k_proj.k_scale"]

    rewrite(path, drop)
    assert source(open_checkpoint(path).weights).kv_scales(0) == (1.0, v)


def test_kv_cache_alone(tmp_path: Path) -> None:
    path, _ = make_modelopt("none", tmp_path / "m", kv="FP8", num_hidden_layers=1)
    checkpoint = open_checkpoint(path)
    quantization = checkpoint.quantization
    assert quantization is not None
    assert (quantization.name, quantization.kv, quantization.schemes) == ("none", "fp8", ())
    assert source(checkpoint.weights).kv_scales(0)[0] > 0


def test_int8_kv_cache_needs_scales(copy: Callable[[str], Path]) -> None:
    path = copy("fp8")

    def set_kv(data: dict[str, Any]) -> None:
        data.get("quantization", data)["kv_cache_quant_algo"] = "INT8"

    edit_json(path / "hf_quant_config.json", set_kv)
    edit_json(path / "config.json", lambda data: data["quantization_config"].update(kv_cache_scheme="INT8"))
    with pytest.raises(CheckpointError, match=r"k_proj\.k_scale.*missing"):
        open_checkpoint(path)

    def add(tensors: dict[str, Any]) -> None:
        for n in range(2):
            tensors[f"model.layers.{n}.self_attn.k_proj.k_scale"] = np.array(0.5 + n, np.float32)
            tensors[f"model.layers.{n}.self_attn.v_proj.v_scale"] = np.array([0.25], np.float32)

    rewrite(path, add)
    checkpoint = open_checkpoint(path)
    assert checkpoint.quantization is not None and checkpoint.quantization.kv == "int8"
    assert source(checkpoint.weights).kv_scales(1) == (1.5, 0.25)


def test_mixed_precision(tmp_path: Path) -> None:
    def fp8_mlp(config: dict[str, Any]) -> None:
        for target, entry in (("weight_quantizer", None), ("input_quantizer", None)):
            del entry
            config["quant_cfg"].append(
                {
                    "quantizer_name": f"*mlp*{target}",
                    "cfg": {"num_bits": (4, 3), "axis": None},
                    "enable": True,
                }
            )

    path, simulated = make_modelopt("int8_wo", tmp_path / "m", edit=fp8_mlp, num_hidden_layers=1)
    assert (
        json.loads((path / "hf_quant_config.json").read_text())["quantization"]["quant_algo"]
        == "MIXED_PRECISION"
    )
    checkpoint = open_checkpoint(path)
    assert checkpoint.quantization is not None and checkpoint.quantization.name == "mixed"
    schemes = dict(checkpoint.quantization.schemes)
    assert schemes["layers.0.q"] == _SCHEMES["int8_wo"] and schemes["layers.0.down"] == _SCHEMES["fp8"]
    for name, scheme in schemes.items():
        one = simulated[module_name(f"{name}.weight")]
        check_layer(checkpoint.weights, f"{name}.weight", scheme, one)


def test_excluded_layers_stay_float(tmp_path: Path) -> None:
    def without_first(config: dict[str, Any]) -> None:
        config["quant_cfg"].append({"quantizer_name": "*layers.0*", "enable": False})

    path, _ = make_modelopt("fp8", tmp_path / "m", edit=without_first)
    excluded = json.loads((path / "hf_quant_config.json").read_text())["quantization"]["exclude_modules"]
    assert any("layers.0" in name and "*" in name for name in excluded), excluded
    checkpoint = open_checkpoint(path)
    assert checkpoint.quantization is not None
    assert {name.split(".")[1] for name, _ in checkpoint.quantization.schemes} == {"1"}
    with pytest.raises(KeyError):
        source(checkpoint.weights).quantized("layers.0.q.weight")


def test_one_config_is_enough(copy: Callable[[str], Path]) -> None:
    path = copy("int4_awq")
    wanted = open_checkpoint(path)
    fingerprint = wanted.fingerprint()
    (path / "hf_quant_config.json").rename(path / "kept.json")
    assert (
        open_checkpoint(path).quantization == wanted.quantization
    )  # the group is in the scales' shape alone
    assert open_checkpoint(path).fingerprint() != fingerprint
    (path / "kept.json").rename(path / "hf_quant_config.json")
    edit_json(path / "config.json", lambda data: data.pop("quantization_config"))
    assert open_checkpoint(path).quantization == wanted.quantization


def test_a_quantized_head_is_no_longer_tied(tmp_path: Path) -> None:
    def with_head(config: dict[str, Any]) -> None:
        config["quant_cfg"] = [one for one in config["quant_cfg"] if "lm_head" not in one["quantizer_name"]]

    path, simulated = make_modelopt(
        "fp8", tmp_path / "m", "llama_linear", edit=with_head, num_hidden_layers=1
    )
    checkpoint = open_checkpoint(path)
    assert checkpoint.quantization is not None
    assert not checkpoint.spec.tie_embeddings
    head = dict(checkpoint.quantization.schemes)["lm_head"]
    check_layer(checkpoint.weights, "lm_head.weight", head, simulated["lm_head"])
    assert checkpoint.weights.get("embed.weight").dtype == np.float32


def test_a_float_head_stays_tied(tmp_path: Path) -> None:
    path, _ = make_modelopt("fp8", tmp_path / "m", "llama_linear", num_hidden_layers=1)
    checkpoint = open_checkpoint(path)
    assert checkpoint.spec.tie_embeddings and "lm_head.weight" not in checkpoint.weights.names()


def _set_algo(algo: str) -> Callable[[dict[str, Any]], None]:
    return lambda data: data["quantization"].update(quant_algo=algo)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (_set_algo("NVFP4_SVD"), "NVFP4_SVD.*supported are FP8"),
        (_set_algo("W8A16"), "FP8.*belongs to another"),
        (
            lambda data: data["quantization"].update(kv_cache_quant_algo="NVFP4"),
            "NVFP4.*supported are FP8, INT8",
        ),
        (lambda data: data["quantization"].update(rotation=True), "does not know.*rotation"),
        (lambda data: data["quantization"].update(exclude_modules="lm_head"), "exclude_modules.*list"),
        (lambda data: data["quantization"].update(quantized_layers={"a": {}}), "quantized_layers"),
        (lambda data: data["quantization"].update(has_zero_point=True), "has_zero_point"),
        (lambda data: data.update(quantization=3), "must be an object"),
    ],
)
def test_config_errors(
    change: Callable[[dict[str, Any]], None], words: str, copy: Callable[[str], Path]
) -> None:
    path = copy("fp8")
    edit_json(path / "hf_quant_config.json", change)
    with pytest.raises(CheckpointError, match=f"hf_quant_config.*{words}"):
        open_checkpoint(path)


def _q(leaf: str) -> str:
    return f"model.layers.0.self_attn.q_proj.{leaf}"


@pytest.mark.parametrize(
    ("recipe", "change", "words"),
    [
        ("fp8", lambda t: t.pop(_q("weight_scale")), r"q_proj.*no 'weight_scale'"),
        ("fp8", lambda t: t.pop(_q("input_scale")), r"q_proj.*no 'input_scale'"),
        ("fp8", lambda t: t.update({_q("weight"): t[_q("weight")].float()}), r"q_proj.*plain float32.*FP8"),
        (
            "fp8",
            lambda t: t.update({_q("weight_scale"): np.ones(7, np.float32)}),
            r"shape \[7\], wanted \[\]",
        ),
        (
            "fp8",
            lambda t: t.update({_q("pre_quant_scale"): np.ones(64, np.float32)}),
            r"pre_quant_scale.*not known",
        ),
        (
            "int4_awq",
            lambda t: t.update({_q("weight"): t[_q("weight")][1:]}),
            r"'weight' of shape \[63, 64\]",
        ),
        (
            "int4_awq",
            lambda t: t.update({_q("weight_scale"): t[_q("weight_scale")][:, :1]}),
            r"\[128, 1\].*\[128, 2\]",
        ),
        ("int4_awq", lambda t: t.update({_q("weight"): t[_q("weight")].int()}), r"type I32, wanted U8"),
        ("nvfp4", lambda t: t.pop(_q("weight_scale_2")), r"no 'weight_scale_2'"),
        (
            "nvfp4",
            lambda t: t.update({_q("weight_scale"): t[_q("weight_scale")].float()}),
            r"float32, wanted F8_E4M3",
        ),
        ("int8_sq", lambda t: t.update({_q("weight"): t[_q("weight")].float().half()}), r"plain float16"),
        (
            "fp8",
            lambda t: t.update({"lm_head.weight_scale": np.ones((), np.float32)}),
            r"lm_head.weight_scale.*not known",
        ),
        (
            "fp8",
            lambda t: t.update({"model.norm.weight": np.ones(64, np.int8)}),
            r"model.norm.weight.*I8.*linear",
        ),
    ],
)
def test_tensor_errors(
    recipe: str, change: Callable[[dict[str, Any]], None], words: str, copy: Callable[[str], Path]
) -> None:
    path = copy(recipe)
    rewrite(path, change)
    with pytest.raises(CheckpointError, match=words):
        open_checkpoint(path)


@pytest.mark.parametrize(
    ("leaf", "value", "words"),
    [
        ("weight_scale", np.array(np.nan, np.float32), "negative, NaN or infinite"),
        ("weight_scale", np.array(-1, np.float32), "negative, NaN or infinite"),
        ("input_scale", np.array(0, np.float32), "wanted a positive"),
    ],
)
def test_value_errors(leaf: str, value: np.ndarray, words: str, copy: Callable[[str], Path]) -> None:
    path = copy("fp8")
    rewrite(path, lambda tensors: tensors.update({_q(leaf): value}))
    weights = open_checkpoint(path).weights
    with pytest.raises(CheckpointError, match=f"q_proj.*{leaf}.*{words}|q_proj.*{words}.*{leaf}|{words}"):
        weights.get("layers.0.q.weight")
        source(weights).quantized_input("layers.0.q.weight")


def test_nan_codes(copy: Callable[[str], Path]) -> None:
    import torch

    path = copy("fp8")

    def spoil(tensors: dict[str, Any]) -> None:
        tensors[_q("weight")].view(torch.uint8)[3, 5] = 0x7F

    rewrite(path, spoil)
    with pytest.raises(CheckpointError, match="NaN in 'weight'"):
        open_checkpoint(path).weights.get("layers.0.q.weight")
