"""verify tells a right engine from a wrong one, at every precision."""

from __future__ import annotations

import dataclasses
import json
import pathlib
import shutil
from collections.abc import Callable
from typing import Any

import numpy as np
import onnx_ir as ir
import pytest
from plansmith.builder import compare, prompts
from plansmith.builder.checkpoint import open_checkpoint
from plansmith.builder.precision import precision
from plansmith.builder.round_activations import round_activations
from plansmith.builder.targets.cpu import read_plan
from plansmith.builder.verify import verify
from plansmith.builder.verify_subject import Subject, open_subject
from plansmith.runtime.errors import EngineFileError, InvalidArgumentError
from tiny_engines import build_tiny

GetCheckpoint = Callable[[str], pathlib.Path]
SMALL: dict[str, Any] = {"num_sequences": 4, "max_length": 40}


def kinds(report: Any) -> set[tuple[str, str]]:
    return {(one.subject, one.referee) for one in report.comparisons}


@pytest.mark.parametrize("name", ["fp32", "fp16", "bf16", "int8", "int4"])
def test_a_right_engine_passes(tiny_checkpoint: GetCheckpoint, name: str) -> None:
    with open_subject(tiny_checkpoint("llama"), precision_name=name) as subject:
        report = verify(subject, **SMALL)
    assert report.passed, report.comparisons
    first = report.comparisons[0]
    assert (first.subject, first.referee) == ("cpu", "reference")
    assert report.steps > 4 and first.rows > 40
    # On two layers the rounding has no room to drift: far closer than the bound of a deep model.
    assert first.mean_kl < (1e-9 if precision(name).weight_bits > 8 else 3e-4)
    assert kinds(report) == {("cpu", "reference")} | (
        {("reference", "unrounded")} if name.startswith("int") else set()
    )


def test_with_transformers(tiny_checkpoint: GetCheckpoint) -> None:
    pytest.importorskip("transformers")
    with open_subject(tiny_checkpoint("gemma2"), precision_name="fp32") as subject:
        report = verify(subject, ("reference", "transformers"), **SMALL)
    assert kinds(report) == {("cpu", "reference"), ("cpu", "transformers"), ("reference", "transformers")}
    assert report.passed, report.comparisons
    with open_subject(tiny_checkpoint("gemma2"), precision_name="int8") as subject:
        report = verify(subject, ("transformers",), **SMALL)
    assert kinds(report) == {("cpu", "transformers")} and report.passed


@pytest.mark.parametrize("name", ["fp32", "int8"])
@pytest.mark.parametrize("tensor", ["layers.1.o.weight", "layers.0.attn_norm.weight", "rope.0.sin"])
def test_a_wrong_weight_fails(
    tiny_checkpoint: GetCheckpoint, tmp_path: pathlib.Path, name: str, tensor: str
) -> None:
    """Reverse the bytes of one tensor of the plan: every other check of the file still passes."""
    with open_subject(tiny_checkpoint("llama"), precision_name=name) as subject:
        broken = tmp_path / "model.plan"
        data = bytearray(subject.plan.read_bytes())
        one = next(t for t in read_plan(subject.plan).tensors if t.name == tensor)
        values = np.ascontiguousarray(one.data).reshape(-1)
        at = data.find(values.tobytes())
        assert at > 0
        data[at : at + values.nbytes] = values[::-1].tobytes()
        broken.write_bytes(bytes(data))
        report = verify(dataclasses.replace(subject, plan=broken), **SMALL)
    assert not report.passed, report.comparisons


def test_other_limits_of_a_step_do_not_matter(tiny_checkpoint: GetCheckpoint) -> None:
    with open_subject(tiny_checkpoint("qwen3"), precision_name="fp32") as subject:
        reports = [verify(subject, **SMALL, seed=seed) for seed in (1, 2)]
    assert all(report.passed for report in reports)
    assert reports[0].steps != reports[1].steps


def test_an_engine_and_its_checkpoint(tiny_checkpoint: GetCheckpoint, tmp_path: pathlib.Path) -> None:
    moved = shutil.copytree(tiny_checkpoint("llama"), tmp_path / "before")
    engine = build_tiny(moved, tmp_path / "engine", "int8")
    with open_subject(engine) as subject:
        assert subject.recipe.name == "int8" and subject.limits.max_seq_len == 128
        assert verify(subject, **SMALL).passed
    moved.rename(tmp_path / "after")
    with (
        pytest.raises(InvalidArgumentError, match=r"not at .* any more; say where it is"),
        open_subject(engine),
    ):
        pass
    with open_subject(engine, tmp_path / "after") as subject:
        assert subject.checkpoint.path == tmp_path / "after"
    other = tiny_checkpoint("qwen3")
    with pytest.raises(InvalidArgumentError, match="is not the checkpoint that"), open_subject(engine, other):
        pass
    with (
        pytest.raises(InvalidArgumentError, match=r"--precision fp32 is asked for, .* has int8"),
        open_subject(engine, tmp_path / "after", "fp32"),
    ):
        pass
    with (
        pytest.raises(InvalidArgumentError, match="goes with an engine directory"),
        open_subject(other, other),
    ):
        pass
    plan = engine / "targets" / "cpu" / "model.plan"
    data = bytearray(plan.read_bytes())
    data[-1] ^= 1
    plan.write_bytes(bytes(data))
    with pytest.raises(EngineFileError, match="changed after the build"), open_subject(engine):
        pass


def test_tally_is_the_formula() -> None:
    rng = np.random.default_rng(0)
    a = rng.normal(size=(50, 30)).astype(np.float32)
    b = (a + 0.3 * rng.normal(size=a.shape)).astype(np.float32)
    tally = compare.Tally()
    tally.add(a[:20], b[:20])
    tally.add(a[20:], b[20:])
    p, q = (np.exp(x.astype(np.float64)) for x in (a, b))
    p, q = p / p.sum(1, keepdims=True), q / q.sum(1, keepdims=True)
    kl = (p * np.log(p / q)).sum(1)
    one = tally.result("b", "a", compare.Threshold())
    assert one.rows == 50 and one.passed
    np.testing.assert_allclose([one.mean_kl, one.max_kl], [kl.mean(), kl.max()], rtol=1e-9)
    np.testing.assert_allclose(one.max_diff, np.abs(a - b).max(), rtol=1e-6)
    assert one.top1 == (a.argmax(1) == b.argmax(1)).mean()


def test_nan_never_passes() -> None:
    tally = compare.Tally()
    bad = np.zeros((2, 4), np.float32)
    bad[1, 2] = np.nan
    tally.add(np.zeros((2, 4), np.float32), bad)
    assert not tally.result("b", "a", compare.Threshold(max_diff=1e9)).passed
    tally.add(np.zeros((2, 4), np.float32), np.zeros((2, 4), np.float32))
    assert not tally.result("b", "a", compare.Threshold(mean_kl=1e9)).passed


def test_report_is_json(tiny_checkpoint: GetCheckpoint) -> None:
    with open_subject(tiny_checkpoint("llama"), precision_name="int8") as subject:
        report = verify(subject, **SMALL)
    content = json.loads(json.dumps(report.to_json(), allow_nan=False))
    assert content["passed"] is True
    assert content["comparisons"][0]["threshold"]["max_diff"] is None


@pytest.mark.parametrize(("grouped", "block"), [(False, 0), (True, 0), (True, 32)])
def test_rounding_is_the_kernels(grouped: bool, block: int) -> None:
    """One product with a quantized weight, rounded in the graph and by hand."""
    import onnxruntime

    rng = np.random.default_rng(1)
    rows, width, outs = 5, 192, 3
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
    round_activations(model, grouped)
    options = onnxruntime.SessionOptions()
    # The default level replaces the product by one that quantizes its input in another way.
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_ENABLE_BASIC
    session = onnxruntime.InferenceSession(ir.to_proto(model).SerializeToString(), options)
    got = session.run(["y"], {"x": x})[0]

    size = (block or 64) if grouped else width
    parts = x.reshape(rows, -1, size)
    step = np.abs(parts).max(-1, keepdims=True) / 127
    rounded = np.where(step > 0, np.rint(parts / np.where(step > 0, step, 1)) * step, 0).reshape(rows, width)
    full = weight * (np.repeat(scale, block, 0) if block else scale)
    np.testing.assert_allclose(got, rounded @ full, rtol=2e-4, atol=2e-4)
    assert np.abs(got - x @ full).max() > 1e-3


def test_sequences(tiny_checkpoint: GetCheckpoint) -> None:
    checkpoint = open_checkpoint(tiny_checkpoint("llama"))
    one, two = (prompts.make_sequences(checkpoint, 12, 50, 3) for _ in range(2))
    assert one == two and len(one) == 12
    assert all(1 <= len(ids) <= 50 and 0 <= min(ids) <= max(ids) < 320 for ids in one)
    assert len({tuple(ids) for ids in one}) == 12
    assert prompts.make_sequences(checkpoint, 1, 5, 0) != prompts.make_sequences(checkpoint, 1, 4, 0)


def test_a_subject_is_closed_with_its_plan(tiny_checkpoint: GetCheckpoint) -> None:
    subject: Subject
    with open_subject(tiny_checkpoint("llama"), precision_name="fp32") as subject:
        assert subject.plan.is_file()
    assert not subject.plan.exists()
