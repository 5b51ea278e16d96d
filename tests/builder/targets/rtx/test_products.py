"""Quantized products as TensorRT-RTX is given them, run in numpy: the reference's logits come out."""

from __future__ import annotations

import collections
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt
import onnx_ir as ir
import pytest
from onnx.reference import ReferenceEvaluator
from plansmith.builder.batch import BatchPlanner, PlannedStep
from plansmith.builder.graph import build_graph
from plansmith.builder.graph.graph_builder import GraphBuilder
from plansmith.builder.precision import of_checkpoint
from plansmith.builder.scheme import ROW, WHOLE, QuantizedWeight, Scheme
from plansmith.builder.targets.reference import ReferenceSession
from plansmith.builder.targets.rtx import lowering
from plansmith.builder.targets.rtx.compile import save_lowered
from plansmith.builder.targets.rtx.pen import Pen
from plansmith.builder.targets.rtx.products import lower_products
from quantized_weights import SCHEMES, RandomQuantizedWeights, quantization, quantized_spec
from rtx_models import LIMITS
from rtx_numpy import NumpySession

SPEC = quantized_spec(num_layers=1, layers=quantized_spec().layers[:1])
BLOCKS = 24
ODD = {
    "int4_fp8_static": Scheme("int4", 32, input="fp8", input_group=WHOLE),
    "int8_groups_static": Scheme("int8", 32, input="int8", input_group=WHOLE),
    "int4_zeros_int8_rows": Scheme("int4", 32, zero_points=True, input="int8", input_group=ROW),
    "w4a8_rows": Scheme("int4", 32, input="fp8", input_group=ROW, fp8_grid=True),
    "fp8_channels_static": Scheme("fp8", ROW, input="fp8", input_group=WHOLE),
    "w4a8_zeros": Scheme("int4", 32, zero_points=True, input="fp8", input_group=WHOLE, fp8_grid=True),
    "w4_on_grid": Scheme("int4", 32, zero_points=True, fp8_grid=True),
    "fp8_rows_whole": Scheme("fp8", WHOLE, input="fp8", input_group=ROW),
}
ALL = SCHEMES | ODD


def graph_of(name: str, compute: str = "float32", **fields: Any) -> ir.Model:
    held = quantization(SPEC, ALL[name], **fields)
    weights = RandomQuantizedWeights(SPEC, held)
    return build_graph(SPEC, weights, of_checkpoint(held, "float32"), LIMITS, compute=compute)


def steps() -> list[PlannedStep]:
    rng = np.random.default_rng(7)
    seqs = [rng.integers(3, SPEC.vocab_size, n).tolist() for n in (19, 9, 1)]
    planner = BatchPlanner(
        seqs, num_blocks=BLOCKS, tokens_per_block=8, max_blocks_per_seq=8, max_num_tokens=16, max_batch_size=4
    )
    return list(planner)


def apart(found: npt.NDArray[Any], wanted: npt.NDArray[Any]) -> float:
    """Return the root mean square of the difference, as a share of the logits' own."""
    return float(np.sqrt(np.square(found - wanted).mean() / np.square(wanted).mean()))


@pytest.mark.parametrize("name", ALL)
def test_lowered_products_give_the_reference_s_logits(name: str) -> None:
    graph = graph_of(name)
    session, reference = NumpySession(lowering.lower(graph), BLOCKS), ReferenceSession(graph, BLOCKS)
    shares = [apart(session.step(s.batch), reference.step(s.batch)) for s in steps()]
    # Both compute in float32, so most steps agree to rounding; a sum in another order may move a code to its neighbour,
    # after which rounding noise of that format is between them. A wrong scale gives about 100 %.
    rounds = ALL[name].input != "float"
    assert np.median(shares) < 1e-5, shares
    assert max(shares) < (0.1 if rounds else 1e-5), shares


@pytest.mark.parametrize("compute", ["float16", "bfloat16"])
@pytest.mark.parametrize(
    "name", ["int8_rows", "int8_sq", "fp8", "fp8_blocks", "int4_awq_zeros", "w4a8", "nvfp4"]
)
def test_half_precision_stays_near_the_reference(name: str, compute: str) -> None:
    session = NumpySession(lowering.lower(graph_of(name, compute)), BLOCKS)
    reference = ReferenceSession(graph_of(name), BLOCKS)
    shares = [apart(session.step(s.batch).astype(np.float32), reference.step(s.batch)) for s in steps()]
    # Activations rounded to 11 or 8 bits move many codes to a neighbour; a wrong scale gives about 100 %.
    assert np.mean(shares) < {"float16": 0.1, "bfloat16": 0.3}[compute], shares


def with_data(graph: ir.Model, name: str, data: npt.NDArray[Any]) -> ir.Model:
    """Return the graph after putting other data in an initializer's place."""
    value = graph.graph.initializers[name]
    value.const_value = ir.Tensor(data.astype(value.dtype.numpy()), name=name)  # type: ignore[union-attr]
    return graph


@pytest.mark.parametrize("name", ["int8_rows", "fp8_rows", "int8_sq", "fp8_channels_static"])
@pytest.mark.parametrize("zeros", ["one", "all"])
def test_outputs_without_a_scale_are_zero(name: str, zeros: str) -> None:
    graph = graph_of(name)
    scale = graph.graph.initializers["layers.0.up.weight.scale"].const_value.numpy().copy()  # type: ignore[union-attr]
    scale[3 if zeros == "one" else slice(None)] = 0
    with_data(graph, "layers.0.up.weight.scale", scale)
    step = steps()[0].batch
    found = NumpySession(lowering.lower(graph), BLOCKS).step(step)
    assert np.isfinite(found).all()
    np.testing.assert_allclose(found, ReferenceSession(graph, BLOCKS).step(step), atol=1e-3)


@pytest.mark.parametrize("name", ["int8_rows", "int8_row_groups", "fp8_rows", "fp8_blocks", "nvfp4"])
def test_a_token_of_zeros_stays_zero(name: str) -> None:
    graph = with_data(graph_of(name), "embed.weight", np.zeros((SPEC.vocab_size, SPEC.hidden_size)))
    step = steps()[0].batch
    for session in (NumpySession(lowering.lower(graph), BLOCKS), ReferenceSession(graph, BLOCKS)):
        np.testing.assert_array_equal(session.step(step), 0)


def test_sums_of_codes_stay_within_float16() -> None:
    """4096 inputs of one sign: the plain sums of FP8 codes would be 8e8, float16 ends at 65504."""
    rows = 4096
    x = np.full((1, rows), 3.0, np.float16)
    weight = np.full((rows, 16), 448.0).astype(ml_dtypes.float8_e4m3fn)
    scale = np.geomspace(1e-5, 1e-3, 16).astype(np.float16)
    g = GraphBuilder(ir.DataType.FLOAT16)
    value = g.input("x", g.compute, ("T", rows))
    rounded = ir.Value(name="r/out", shape=ir.Shape(["T", rows]), type=ir.TensorType(g.compute))
    attributes = {"format": "fp8", "group": 0}
    g.add("RoundInput", [value], [rounded], "r", attributes, domain="plansmith")
    codes, scales = g.const("w", weight), g.const("w.scale", scale)
    w = g.node("DequantizeLinear", [codes, scales], "w/dq", g.compute, (rows, 16), {"axis": 1})
    g.output(g.node("MatMul", [rounded, w], "y/matmul", g.compute, ("T", 16)))
    model = g.finish("one", {})
    lower_products(Pen(model.graph, g.compute))
    del model.graph.opset_imports["plansmith"]
    middle: list[npt.NDArray[Any]] = []
    for node in model.graph:
        if node.op_type == "MatMul":
            model.graph.outputs.append(node.outputs[0])
            node.outputs[0].shape, node.outputs[0].type = ir.Shape(["T", 16]), ir.TensorType(g.compute)
    y, *middle = ReferenceEvaluator(ir.to_proto(model)).run(None, {"x": x})
    wanted = 3.0 * 448 * rows * scale.astype(np.float64)
    np.testing.assert_allclose(y[0], wanted, rtol=2e-3)
    assert len(middle) == 1 and np.abs(middle[0]).max() < 2000


class CountingWeights(RandomQuantizedWeights):
    """Counts how often each weight is read."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.reads: collections.Counter[str] = collections.Counter()

    def quantized(self, name: str) -> QuantizedWeight:
        self.reads[name] += 1
        return super().quantized(name)


@pytest.mark.parametrize("name", ["int8_rows", "int4_zeros", "fp8", "w4a8", "nvfp4"])
def test_writing_reads_each_weight_once(name: str, tmp_path: Path) -> None:
    held = quantization(SPEC, SCHEMES[name])
    weights = CountingWeights(SPEC, held)
    graph = build_graph(SPEC, weights, of_checkpoint(held, "float32"), LIMITS, compute="float16")
    save_lowered(graph, tmp_path / "graph.onnx")
    # The constant that products of one input share is of all their scales, so those are read before their turn.
    sharing = {"q", "k", "v", "gate", "up"} if "int4_z" not in name and "nvfp4" not in name else set()
    for weight, reads in weights.reads.items():
        assert reads <= (2 if weight.split(".")[-2] in sharing else 1), (weight, reads)
    assert len(weights.reads) == 8
