"""The reference's rounding of activations: the formula, and what the cpu target does."""

from __future__ import annotations

import pathlib
from typing import Any

import numpy as np
import onnx_ir as ir
import onnxruntime
import pytest
from plansmith.builder.batch import BatchPlanner
from plansmith.builder.graph import build_graph
from plansmith.builder.limits import make_limits
from plansmith.builder.precision import activation_group_size, precision
from plansmith.builder.round_activations import round_activations
from plansmith.builder.targets.cpu import compile_plan
from plansmith.builder.targets.cpu.session import CpuSession
from plansmith.builder.targets.reference import ReferenceSession
from tiny_graph import RandomWeights, tiny_spec


def test_columns_that_share_a_scale() -> None:
    assert [activation_group_size(0, cols) for cols in (576, 1536, 96, 40)] == [64, 128, 32, 0]
    assert activation_group_size(32, 128) == 32


@pytest.mark.parametrize(("width", "block", "size"), [(200, 0, 200), (192, 0, 64), (192, 32, 32)])
def test_rounding_is_the_formula(width: int, block: int, size: int) -> None:
    """One product with a quantized weight, rounded in the graph and by hand, `size` columns a scale."""
    rng = np.random.default_rng(1)
    rows, outs = 5, 3
    groups = width // block if block else 1
    weight = rng.integers(-127, 128, (width, outs)).astype(np.int8)
    scale = rng.uniform(0.01, 0.02, (groups, outs) if block else outs).astype(np.float32)
    x = (rng.normal(size=(rows, width)) * rng.uniform(0.1, 9, (rows, 1))).astype(np.float32)
    x[2] = 0
    source = ir.Value(name="x", type=ir.TensorType(ir.DataType.FLOAT), shape=ir.Shape(["T", width]))
    w = ir.Value(name="w", const_value=ir.tensor(weight), shape=ir.Shape(weight.shape))
    s = ir.Value(name="s", const_value=ir.tensor(scale), shape=ir.Shape(scale.shape))
    attributes: dict[str, Any] = {"axis": 0, "block_size": block} if block else {"axis": 1}
    dequantize = ir.node("DequantizeLinear", [w, s], attributes)
    dequantize.outputs[0].shape = ir.Shape([width, outs])
    product = ir.node("MatMul", [source, dequantize.outputs[0]])
    product.outputs[0].name, product.outputs[0].dtype = "y", ir.DataType.FLOAT
    product.outputs[0].shape = ir.Shape(["T", outs])
    graph = ir.Graph(
        [source], product.outputs, nodes=[dequantize, product], initializers=[w, s], opset_imports={"": 24}
    )
    graph.name = "g"
    model = ir.Model(graph, ir_version=11)
    round_activations(model)
    options = onnxruntime.SessionOptions()
    # The default level replaces the product by one that quantizes its input in another way.
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_ENABLE_BASIC
    session = onnxruntime.InferenceSession(ir.to_proto(model).SerializeToString(), options)
    got = session.run(["y"], {"x": x})[0]

    parts = x.reshape(rows, -1, size)
    step = np.abs(parts).max(-1, keepdims=True) / 127
    rounded = np.where(step > 0, np.rint(parts / np.where(step > 0, step, 1)) * step, 0).reshape(rows, width)
    full = weight * (np.repeat(scale, block, 0) if block else scale)
    np.testing.assert_allclose(got, rounded @ full, rtol=2e-4, atol=2e-4)
    assert np.abs(got - x @ full).max() > 1e-3


@pytest.mark.parametrize("hidden_size", [64, 40])  # of 40 columns no group divides: they are rounded by row
def test_the_cpu_target_rounds_the_same(hidden_size: int, tmp_path: pathlib.Path) -> None:
    spec = tiny_spec(hidden_size=hidden_size)
    limits = make_limits(spec.max_position_embeddings, max_seq_len=32, tokens_per_block=8)
    model = build_graph(spec, RandomWeights(spec), precision("int8"), limits)
    compile_plan(model, spec, limits, tmp_path / "model.plan")
    rounded, unrounded = model.clone(), ReferenceSession(model, 4)
    round_activations(rounded)
    reference = ReferenceSession(rounded, 4)
    sequences = np.random.default_rng(0).integers(0, spec.vocab_size, (2, 9)).tolist()
    planner = BatchPlanner(sequences, num_blocks=4, tokens_per_block=8, max_blocks_per_seq=4)
    with CpuSession(tmp_path / "model.plan", 4) as cpu:
        for step in planner:
            got, wanted, exact = (one.step(step.batch) for one in (cpu, reference, unrounded))
            # One code that falls to the other side of a half moves a logit by up to a hundredth of the largest.
            assert np.abs(got - wanted).max() < 0.2 * np.abs(exact - wanted).max()
