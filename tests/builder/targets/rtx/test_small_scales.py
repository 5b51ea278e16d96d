"""Scales that float16 does not hold: products keep them, or the build says which it cannot."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import onnx_ir as ir
import pytest
from onnx.reference import ReferenceEvaluator
from plansmith.builder.graph import save
from plansmith.builder.graph.graph_builder import GraphBuilder
from plansmith.builder.graph.inputs import holds
from plansmith.builder.graph.linear import linear
from plansmith.builder.graph.weights import WeightLoader
from plansmith.builder.precision import of_checkpoint
from plansmith.builder.scheme import ROW, WHOLE, QuantizedInput, QuantizedWeight, Scheme
from plansmith.builder.targets.rtx import contract
from plansmith.builder.targets.rtx.pen import Pen
from plansmith.builder.targets.rtx.products import lower_products
from plansmith.runtime.errors import CheckpointError
from quantized_weights import SCHEMES, RandomQuantizedWeights, quantization, quantized_spec
from rtx_numpy import TRT_FP4DynamicQuantize

SPEC = quantized_spec()
F16, F32 = ir.DataType.FLOAT16, ir.DataType.FLOAT
K, N = 256, 128
ALL = SCHEMES | {
    "fp8_channels_static": Scheme("fp8", ROW, input="fp8", input_group=WHOLE),
    "w4_on_grid": Scheme("int4", 32, zero_points=True, fp8_grid=True),
}


class Shrunk(RandomQuantizedWeights):
    """Random weights whose scales, their inputs' scales and their inputs' factors are multiplied by numbers."""

    def __init__(self, scheme: Scheme, weight: float = 1.0, input: float = 1.0, factor: float = 1.0) -> None:
        super().__init__(SPEC, quantization(SPEC, scheme))
        self.scheme, self.weight, self.input, self.factor = scheme, weight, input, factor

    def quantized(self, name: str) -> QuantizedWeight:
        found, by = super().quantized(name), np.float32(self.weight)
        scale = found.scale if self.scheme.weight == "fp4" else found.scale * by
        return dataclasses.replace(found, scale=scale, scale_2=found.scale_2 * self.weight)

    def quantized_input(self, name: str) -> QuantizedInput:
        found = super().quantized_input(name)
        factors = None if found.pre_scale is None else found.pre_scale * np.float32(self.factor)
        return QuantizedInput(found.scale * self.input if self.scheme.is_static else 1.0, factors)


def lowered(name: str, compute: ir.DataType, **shrink: float) -> ir.Model:
    """Return a lowered product of K inputs."""
    scheme = ALL[name]
    g = GraphBuilder(compute)
    source = Shrunk(scheme, **shrink)
    w = WeightLoader(g, source, of_checkpoint(quantization(SPEC, scheme), "float32"))
    x = g.input("x", compute, ("T", K))
    g.output(linear(g, w, x, "layers.0.down", N, bias=False, rows="T"))
    model = g.finish("one", {})
    lower_products(Pen(model.graph, compute))
    model.graph.opset_imports[contract.DOMAIN] = 1
    model.graph.opset_imports.pop("plansmith")
    return model


def run(model: ir.Model, x: npt.NDArray[Any]) -> npt.NDArray[np.float64]:
    (y,) = ReferenceEvaluator(ir.to_proto(model), new_ops=[TRT_FP4DynamicQuantize]).run(None, {"x": x})  # type: ignore[arg-type]
    return np.asarray(y).astype(np.float64)


def share(name: str, size: float, **shrink: float) -> float:
    """Return how far the float16 product is from the float32 one, as a share of its size."""
    x = (size * np.random.default_rng(0).standard_normal((5, K))).astype(np.float16)
    found = run(lowered(name, F16, **shrink), x)
    wanted = run(lowered(name, F32, **shrink), x.astype(np.float32))
    return float(np.sqrt(np.square(found - wanted).mean() / np.square(wanted).mean()))


# Of INT4 alone each group's scale is in float16.
FLOAT32_SCALES = [
    name for name, scheme in ALL.items() if not (scheme.weight == "int4" and not scheme.fp8_grid)
]


@pytest.mark.parametrize("name", FLOAT32_SCALES)
def test_small_scales_of_weights(name: str) -> None:
    """FP8 scales near 1.5e-7 are 2 or 3 of float16's smallest steps: a fifth would be lost."""
    assert not holds(np.array(1.5e-7), F16)
    assert share(name, 8.0, weight=2.0**-12) < 2e-3


@pytest.mark.parametrize("name", ["fp8", "fp8_channels_static", "int8_static", "int8_sq", "w4a8", "nvfp4"])
@pytest.mark.parametrize("shrink", [2.0**-7, 2.0**-11])
def test_small_scales_of_inputs(name: str, shrink: float) -> None:
    assert share(name, shrink, weight=2.0**6, input=shrink) < 4e-3


@pytest.mark.parametrize("name", ["int4_awq", "int8_sq", "w4a8"])
@pytest.mark.parametrize("factor", [2.0**-20, 2.0**17])
def test_factors_beyond_half_floats(name: str, factor: float) -> None:
    size = min(1 / factor, 2.0**10)
    found = share(name, size, weight=min(1 / (size * factor), 2.0**6), input=size * factor, factor=factor)
    # The float32 product is behind float16, so a code or two differ where inputs are rounded.
    assert found < (0.03 if ALL[name].is_static else 4e-3)


@pytest.mark.parametrize(
    ("name", "shrink", "words"),
    [
        ("int4_32", 2.0**-12, r"layers.0.down.weight.scale has no scale above .*e-06.*build for cpu alone"),
        ("int4_zeros", 2.0**-30, "has no scale above"),
        ("int4_32", 2.0**40, "float16 ends at 65504"),
        ("fp8_rows", 2.0**40, "float16 ends at 65504"),
    ],
)
def test_scales_that_cannot_be_kept_are_named(name: str, shrink: float, words: str, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=words):
        save(lowered(name, F16, weight=shrink), tmp_path / "one.onnx")


@pytest.mark.parametrize(
    ("number", "kind", "is_held"),
    [
        (1.0, F16, True),
        (6.2e-5, F16, True),
        (2.0**-24, F16, True),
        (1.4 * 2.0**-24, F16, False),
        (1e-8, F16, False),
        (7e4, F16, False),
        (1.001, ir.DataType.BFLOAT16, True),
        (0.0, F16, True),
    ],
)
def test_holds(number: float, kind: ir.DataType, is_held: bool) -> None:
    assert holds(np.array([1.0, number], np.float32), kind) == is_held
