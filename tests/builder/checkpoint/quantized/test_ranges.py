"""Scales that are numbers, and whose products are none in float32, are refused where they are read, by layer."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from plansmith.builder.checkpoint import open_checkpoint
from plansmith.builder.checkpoint.quantized.ranges import input_fault, weight_fault
from plansmith.builder.precision import of_checkpoint
from plansmith.builder.scheme import Quantization, QuantizedInput, QuantizedWeight, Scheme
from plansmith.runtime.errors import CheckpointError, InvalidArgumentError
from quantized_weights import SCHEMES, random_weight
from tiny_compressed_tensors import make_compressed
from tiny_fp8 import make_blocks
from tiny_packing import make_awq, make_gptq
from tiny_quantized import make_modelopt, rewrite

Q = "model.layers.0.self_attn.q_proj"
NAME = "layers.0.q.weight"
F32 = np.float32

_KV = {"num_bits": 8, "type": "float", "strategy": "tensor", "dynamic": False, "symmetric": True}
_MAKERS: dict[str, Callable[[Path], Any]] = {
    "awq": make_awq,
    "gptq": lambda path: make_gptq(path, zero=8),
    "blocks": make_blocks,
    "kv": lambda path: make_compressed("w4a16", path, kv_cache_scheme=_KV),
    **{
        name: lambda path, name=name: make_compressed(name, path)
        for name in ("fp8", "nvfp4", "int8_static", "w4a16")
    },
    **{
        f"modelopt_{name}": lambda path, name=name: make_modelopt(name, path, num_hidden_layers=1)
        for name in ("w4a8_awq", "nvfp4")
    },
}

# format, tensor, the number that fills it, what is said
_FAULTS: list[tuple[str, str, float, str]] = [
    ("awq", "scales", 6e4, ""),
    ("gptq", "scales", 0.0, ""),
    ("blocks", "weight_scale_inv", 3e38, "its weights 1.3"),
    ("blocks", "weight_scale_inv", 1e-40, "largest scale is 1e-40"),
    ("fp8", "weight_scale", 3e38, "its weights 1.3"),
    ("fp8", "weight_scale", np.nan, "NaN"),
    ("fp8", "weight_scale", -1.0, "negative"),
    ("fp8", "input_scale", 3e38, "scale of its input is 3e"),
    ("fp8", "input_scale", 1e-40, "scale of its input is 1e-40, which is too small"),
    ("fp8", "input_scale", 0.0, "'input_scale' = 0"),
    ("fp8", "input_scale", np.inf, "infinite"),
    ("int8_static", "weight_scale", 1e37, "weights"),
    ("w4a16", "weight_scale", 1e38, "weights"),
    ("nvfp4", "weight_global_scale", 1e-40, "factor on its scales is 1e.40, which is too large"),
    ("nvfp4", "weight_global_scale", 3e38, "factor on its scales is 3.33e-39, which is too small"),
    ("nvfp4", "weight_global_scale", 3e-38, "weights"),
    ("nvfp4", "input_global_scale", 1e-40, "scale of its input is 1e.40"),
    ("nvfp4", "input_global_scale", np.nan, "NaN"),
    ("modelopt_nvfp4", "weight_scale_2", 1e38, "weights"),
    ("modelopt_nvfp4", "weight_scale_2", -1.0, "negative"),
    ("modelopt_nvfp4", "input_scale", 3e38, "scale of its input"),
    ("modelopt_w4a8_awq", "weight_scale_2", 3e38, "FP8 grid is 3e"),
    ("modelopt_w4a8_awq", "weight_scale_2", 1e-40, "FP8 grid is 1e-40"),
]


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], tuple[Path, bytes]]:
    """Return format -> a directory whose tensors a test may change, and the bytes that they had."""
    kept: dict[str, tuple[Path, bytes]] = {}

    def get(name: str) -> tuple[Path, bytes]:
        if name not in kept:
            path = tmp_path_factory.mktemp("ranges") / name
            _MAKERS[name](path)
            kept[name] = path, (path / "model.safetensors").read_bytes()
        path, tensors = kept[name]
        (path / "model.safetensors").write_bytes(tensors)
        return path, tensors

    return get


def read(path: Path) -> None:
    """Read a weight and its input's scales; a warning of numpy's is an error."""
    weights: Any = open_checkpoint(path).weights
    with warnings.catch_warnings():
        warnings.simplefilter("error", RuntimeWarning)
        weights.quantized_input(NAME)
        assert np.isfinite(weights.get(NAME)).all()


@pytest.mark.parametrize(("name", "leaf", "value", "words"), _FAULTS)
def test_a_number_beyond_float32(
    name: str, leaf: str, value: float, words: str, made: Callable[[str], tuple[Path, bytes]]
) -> None:
    path, _ = made(name)
    read(path)
    rewrite(path, lambda t: t.update({f"{Q}.{leaf}": t[f"{Q}.{leaf}"].clone().fill_(value)}))
    if not words:
        read(path)
        return
    with pytest.raises(CheckpointError, match=rf"{Q}'.*({words})"):
        read(path)


@pytest.mark.parametrize(
    ("value", "words"),
    [
        (np.inf, "infinite"),
        (np.nan, "NaN"),
        (-1.0, "negative"),
        (0.0, "zeros in"),
        (1e-40, "a factor on its input is 1e-40"),
        (3.4e38, "weights"),
    ],
)
def test_factors_beyond_float32(value: float, words: str, made: Callable[[str], tuple[Path, bytes]]) -> None:
    path, _ = made("modelopt_w4a8_awq")
    factors = np.ones(128, F32)
    factors[5] = value

    def change(tensors: dict[str, Any]) -> None:
        tensors["model.layers.0.self_attn.o_proj.pre_quant_scale"] = factors
        tensors["model.layers.0.self_attn.o_proj.weight_scale"].fill_(1.0)
        tensors["model.layers.0.self_attn.o_proj.weight_scale_2"].fill_(1.0)

    rewrite(path, change)
    weights: Any = open_checkpoint(path).weights
    with pytest.raises(CheckpointError, match=f"o_proj.*({words})"):
        weights.quantized_input("layers.0.o.weight")
        weights.quantized("layers.0.o.weight")


@pytest.mark.parametrize("value", [0.0, -1.0, np.nan, np.inf, 1e-40, 3e38])
def test_kv_scales_beyond_float32(value: float, made: Callable[[str], tuple[Path, bytes]]) -> None:
    path, _ = made("kv")
    scales = {"k_scale": np.array(0.5, F32), "v_scale": np.array(value, F32)}
    rewrite(path, lambda t: t.update({f"model.layers.0.self_attn.{k}": v for k, v in scales.items()}))
    weights: Any = open_checkpoint(path).weights
    with pytest.raises(CheckpointError, match=r"tensor 'model\.layers\.0\.self_attn\.v_scale' is"):
        weights.kv_scales(0)


@pytest.mark.parametrize("name", SCHEMES)
def test_no_fault_is_seen_in_what_is_right(name: str) -> None:
    weight = random_weight(np.random.default_rng(0), SCHEMES[name], (32, 256))
    assert weight_fault(weight, SCHEMES[name]) is None
    assert input_fault(QuantizedInput(0.01), SCHEMES[name]) is None
    zeros = QuantizedWeight(weight.codes, np.zeros_like(weight.scale), weight.zero, weight.scale_2)
    assert weight_fault(zeros, SCHEMES[name]) is None  # a layer of zeros is one


def test_an_output_may_vanish_but_not_all() -> None:
    codes = np.ones((2, 4), ml_dtypes.float8_e4m3fn)
    assert weight_fault(QuantizedWeight(codes, np.array([1e-40, 1.0], F32)), Scheme("fp8")) is None
    assert "vanishes" in str(weight_fault(QuantizedWeight(codes, np.array([1e-40, 0], F32)), Scheme("fp8")))


@pytest.mark.parametrize(
    "scheme",
    [
        Scheme("int4", 48),
        Scheme("int8", 0, input="int8", input_group=48),
        Scheme("fp4", 16),
        Scheme(input="fp4"),
    ],
)
def test_groups_that_do_not_divide_meet_no_graph(scheme: Scheme) -> None:
    held = of_checkpoint(Quantization("test", "tests", (("layers.0.q", scheme),)), "float32")
    assert held.scheme("layers.0.q", 96 if "fp4" in (scheme.weight, scheme.input) else 144) == scheme
    with pytest.raises(InvalidArgumentError, match=r"layers.0.q has 72 inputs, which groups of \d+ do not"):
        held.scheme("layers.0.q", 72)
