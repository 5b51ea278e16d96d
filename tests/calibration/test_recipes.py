"""Recipes as configurations of ModelOpt, and which layers they are for."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from plansmith.builder.checkpoint import open_checkpoint
from plansmith.builder.precision import PRECISIONS
from plansmith.builder.precision import RECIPES as NAMED
from plansmith.calibration.layers import Layer, check_groups, choose_layers, linear_layers
from plansmith.calibration.options import QuantizeOptions, plan_quantization
from plansmith.calibration.recipes import RECIPES, check_layers, find_recipe, group_size_of, modelopt_config
from plansmith.runtime.errors import InvalidArgumentError, UnsupportedError
from tiny_quantized import PRESETS

Tiny = Callable[[str], Path]


def test_builds_name_the_recipes_that_there_are() -> None:
    """The builder, which imports nothing of calibration, names them a second time."""
    assert set(NAMED) == set(RECIPES)
    assert len(NAMED) == len(set(NAMED))
    assert set(NAMED) & set(PRECISIONS) == set()  # of one name, --precision would be two things


@pytest.mark.parametrize("family", ["llama", "phi3", "gemma2"])
def test_layers_are_transformers_modules(family: str, tiny_checkpoint: Tiny) -> None:
    import transformers

    path = tiny_checkpoint(family)
    model = transformers.AutoModelForCausalLM.from_pretrained(path)
    linears = {
        name: tuple(module.weight.shape)
        for name, module in model.named_modules()
        if isinstance(module, torch.nn.Linear)
    }
    layers = linear_layers(open_checkpoint(path).spec)
    assert {one.name: (one.out_features, one.in_features) for one in layers} == linears


@pytest.mark.parametrize("name", RECIPES)
def test_recipes_are_modelopts(name: str) -> None:
    import modelopt.torch.quantization as mtq

    preset = getattr(mtq, PRESETS[name])
    layer = Layer("a", 128, 128, "a")
    config = modelopt_config(
        RECIPES[name], [layer], group_size=None, kv_cache="none", alpha=0.5, torch_fp4=False
    )
    assert config["algorithm"]["method"] == _method(preset["algorithm"])
    ours = {entry["quantizer_name"].rpartition(".")[2]: entry.get("cfg") for entry in config["quant_cfg"]}
    for one in ("weight_quantizer", "input_quantizer"):
        theirs = [entry for entry in preset["quant_cfg"] if entry["quantizer_name"] == f"*{one}"]
        assert _plain(ours.get(one)) == _plain(theirs[0].get("cfg") if theirs else None)


def _method(algorithm: Any) -> str:
    return str(algorithm["method"] if isinstance(algorithm, dict) else algorithm)


def _plain(value: Any) -> Any:
    """Return attributes without lists for tuples, and without what only says how many bits that are."""
    if isinstance(value, dict):
        return {str(key): _plain(one) for key, one in value.items() if key != "effective_bits"}
    return [_plain(one) for one in value] if isinstance(value, list | tuple) else value


def test_patterns() -> None:
    layers = [Layer(f"model.layers.{n}.mlp.{one}", 4, 4, one) for n in (0, 1, 11) for one in ("up", "down")]
    layers.append(Layer("lm_head", 4, 4, "lm_head"))

    def left(*patterns: str) -> list[str]:
        return [one.name for one in choose_layers(layers, patterns, False)]

    assert len(left()) == 6 and len(choose_layers(layers, (), True)) == 7
    assert left("*down") == left("down") == [f"model.layers.{n}.mlp.up" for n in (0, 1, 11)]
    assert left("layers.1") == left("model.layers.1.*")  # not layer 11
    assert all(".1." not in name for name in left("layers.1")) and len(left("layers.1")) == 4
    with pytest.raises(
        InvalidArgumentError, match=r"'layers\.2' matches no layer; the layers are model\.layers\.0"
    ):
        left("layers.2")
    with pytest.raises(InvalidArgumentError, match="no layer to quantize"):
        left("*")
    with pytest.raises(InvalidArgumentError, match="--quantize-lm-head"):
        choose_layers(layers, ("lm_head",), True)


def test_group_sizes() -> None:
    awq, fp8 = RECIPES["int4_awq"], RECIPES["fp8"]
    sizes = {256: 128, 576: 64, 96: 32}
    for inputs, size in sizes.items():
        assert group_size_of(awq, Layer("a", 2, inputs, "a"), None) == size
    check_layers(awq, [Layer("a", 2, n, "a") for n in sizes], None)
    with pytest.raises(
        InvalidArgumentError, match=r"128 do not divide the inputs of b \[2, 576\]; give another"
    ):
        check_layers(awq, [Layer("a", 2, 256, "a"), Layer("b", 2, 576, "b")], 128)
    with pytest.raises(InvalidArgumentError, match=r"128 or 64 or 32 do not divide.*--exclude"):
        check_layers(awq, [Layer("a", 2, 100, "a")], None)
    with pytest.raises(InvalidArgumentError, match=r"pairs of outputs.*a "):
        check_layers(awq, [Layer("a", 3, 128, "a")], None)
    with pytest.raises(InvalidArgumentError, match="blocks of 16 do not divide"):
        check_layers(RECIPES["nvfp4"], [Layer("a", 2, 24, "a")], None)
    with pytest.raises(InvalidArgumentError, match="is for int4 weights"):
        check_layers(fp8, [Layer("a", 2, 128, "a")], 128)


def test_layers_that_read_one_input_go_together(tiny_checkpoint: Tiny) -> None:
    layers = linear_layers(open_checkpoint(tiny_checkpoint("llama")).spec)
    check_groups(layers, choose_layers(layers, ("*down_proj", "layers.1"), False), "int4_awq")
    with pytest.raises(InvalidArgumentError, match=r"q_proj.*exclude all of them"):
        check_groups(layers, choose_layers(layers, ("layers.0.self_attn.q_proj",), False), "int4_awq")


def test_names() -> None:
    assert find_recipe("fp8").name == "fp8" and find_recipe("w4a8_awq_beta").name == "w4a8_awq"
    with pytest.raises(InvalidArgumentError, match="choose one of fp8, "):
        find_recipe("fp9")
    with pytest.raises(InvalidArgumentError, match="quantizes nothing"):
        find_recipe("full_prec")


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"calib_size": 0}, "--calib-size is 0"),
        ({"calib_length": 0}, "--calib-length is 0"),
        ({"calib_length": 300}, "the model takes 256 tokens"),
        ({"batch_size": 0}, "--batch-size is 0"),
        ({"recipe": "int8_sq", "smoothquant": 1.5}, "must be 0 to 1"),
        ({"recipe": "fp8", "smoothquant": 0.5}, "is for --recipe int8_sq"),
        ({"dtype": "int3"}, "--dtype is 'int3'"),
        ({"kv_cache": "nvfp4"}, "--kv-cache is 'nvfp4', it must be none, fp8 or int8"),
        ({"device": "tpu"}, "--device is 'tpu'"),
        ({"auto_recipes": ("fp8",)}, "goes with --auto-bits"),
        ({"auto_bits": 3.0}, "must be 4 to 16"),
        ({"auto_bits": 8.0, "recipe": "int4_awq"}, "as --auto-recipes"),
        ({"auto_bits": 9.0, "auto_recipes": ("fp8", "int8_sq"), "group_size": 32}, "--auto-recipes has none"),
        ({"auto_bits": 9.0, "calib_length": 1}, "give 2 or more"),
        ({"seed": 2**64}, "must fit in 64 bits"),
        ({"auto_bits": 6.0, "auto_recipes": ("fp8",)}, "must be 8 to 16"),
        ({"recipe": "int4_awq", "exclude": ("*q_proj",)}, "exclude all of them"),
        ({"calib_data": "cnn_dailymail"}, "is a data set of the network"),
    ],
)
def test_options_that_are_refused(given: dict[str, Any], message: str, tiny_checkpoint: Tiny) -> None:
    with pytest.raises(InvalidArgumentError, match=message):
        plan_quantization(tiny_checkpoint("llama"), QuantizeOptions(**given))


def test_a_package_that_is_missing(tiny_checkpoint: Tiny, monkeypatch: pytest.MonkeyPatch) -> None:
    import importlib.util

    find = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util,
        "find_spec",
        lambda name, package=None: None if name == "modelopt" else find(name, package),
    )
    with pytest.raises(
        UnsupportedError, match=r"modelopt, which is not.*pip install 'plansmith\[quantize\]'"
    ):
        plan_quantization(tiny_checkpoint("llama"), QuantizeOptions())


def test_weight_only_recipes_need_no_data(tiny_checkpoint: Tiny) -> None:
    path = tiny_checkpoint("llama")
    assert plan_quantization(path, QuantizeOptions(recipe="int8_wo")).samples is None
    assert plan_quantization(path, QuantizeOptions(recipe="fp8_per_channel")).samples is None
    assert plan_quantization(path, QuantizeOptions(recipe="int8_wo", kv_cache="fp8")).samples is not None
