"""What a product tells adapters is its input as it was before factors and rounding, and still is when it is read."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx_ir as ir
import pytest
from plan_interpreter import PlanInterpreter
from plansmith.builder.batch import BatchPlanner
from plansmith.builder.scheme import WHOLE, Scheme
from plansmith.builder.targets.cpu.lowering import lower
from plansmith.builder.targets.cpu.plan_file import Op, View
from plansmith.builder.targets.cpu.plan_writer import write_plan
from quantized_weights import SCHEMES
from scheme_graphs import graph_of

# "static": by a fixed scale, in memory, since its products cannot
KINDS = {**SCHEMES, "static": Scheme("int4", 32, zero_points=True, input="int8", input_group=WHOLE)}


class AdapterWitness(PlanInterpreter):
    """Checks that what a product tells adapters is what was there before factors and rounding."""

    def __init__(self, path: Path, num_blocks: int) -> None:
        super().__init__(path, num_blocks)
        self.checked = 0
        self.originals: dict[View, np.ndarray] = {}  # by where the result lies
        self.multiplied: View | None = None

    def _mul_vector(self, op: Op) -> None:
        self.originals[op.out] = self.view(op.ins[0], op.i[0]).copy()
        self.multiplied = op.out
        super()._mul_vector(op)

    def _round_input(self, op: Op) -> None:
        if op.ins[0] == self.multiplied:
            self.originals[op.out] = self.originals[op.ins[0]]
        else:
            self.originals[op.out] = self.view(op.ins[0], op.i[0]).copy()
        self.multiplied = None
        super()._round_input(op)

    def _gather_rows(self, op: Op) -> None:
        super()._gather_rows(op)
        if op.ins[0] in self.originals:
            self.originals[op.out] = self.originals[op.ins[0]][self.batch.logits_rows]

    def _linear(self, op: Op) -> None:
        if op.ins[1].slot >= 0:
            original = self.originals[op.ins[0]]
            np.testing.assert_array_equal(self.view(op.ins[1], original.shape[1]), original)
            self.checked += 1
        super()._linear(op)


def run_witness(model: ir.Model, header: dict[str, int], path: Path) -> int:
    """Run a plan of the graph over some steps and return how many products were looked at in one step."""
    write_plan(path, lower(model, header))
    witness = AdapterWitness(path, 4)
    steps = list(
        BatchPlanner(
            [[5, 6, 7, 8]], num_blocks=4, tokens_per_block=32, max_blocks_per_seq=4, max_num_tokens=8
        )
    )
    for step in steps:
        assert np.isfinite(witness.step(step.batch)).all()
    return witness.checked // len(steps)


@pytest.mark.parametrize("name", ["int4_awq", "int8_sq", "static", "w4a8", "nvfp4"])
def test_adapters_find_the_input_as_it_was(name: str, tmp_path: Path) -> None:
    assert run_witness(*graph_of(KINDS[name]), tmp_path / "p") == 9


def normed(model: ir.Model, value: ir.Value, after: ir.Node, layer: int) -> None:
    """Add a norm of a value to the layer's residual stream; lowered behind `after`, it may overwrite the value."""
    nodes = {node.name: node for node in model.graph}
    weight = nodes[f"layers.{layer}.mlp_norm"].inputs[1]
    extra = ir.node("RMSNormalization", [value, weight], attributes={"axis": -1}, name="extra")
    model.graph.insert_after(after, extra)
    use = nodes[f"layers.{layer}.mlp_norm"]
    total = ir.node("Add", [use.inputs[0], extra.outputs[0]], name="extra_add")
    model.graph.insert_before(use, total)
    use.replace_input_with(0, total.outputs[0])


@pytest.mark.parametrize(("layer", "product"), [(0, "q"), (1, "o")], ids=["all_rows", "wanted_rows"])
@pytest.mark.parametrize("name", ["static", "nvfp4", "int4_awq"])
def test_nobody_overwrites_it_in_between(name: str, layer: int, product: str, tmp_path: Path) -> None:
    model, header = graph_of(KINDS[name])
    last = {"static": "input_dq", "nvfp4": "round", "int4_awq": "pre_scale"}[name]
    nodes = {node.name: node for node in model.graph}
    value = nodes[f"layers.{layer}.{product}/{'input_q' if name == 'static' else last}"].inputs[0]
    assert value is not None
    normed(model, value, nodes[f"layers.{layer}.{product}/{last}"], layer)
    assert run_witness(model, header, tmp_path / "p") == 9


def test_wanted_rows_of_an_input_that_all_rows_share(tmp_path: Path) -> None:
    """The last layer's gate and up read what its q, k and v read, and a norm may overwrite its wanted rows."""
    model, header = graph_of(KINDS["static"])
    nodes = {node.name: node for node in model.graph}
    for unit in ("gate", "up"):
        nodes[f"layers.1.{unit}/matmul"].replace_input_with(0, nodes["layers.1.q/input_dq"].outputs[0])
    model.graph.remove([nodes["layers.1.gate/input_dq"], nodes["layers.1.gate/input_q"]], safe=True)
    norm, gather = nodes["layers.1.mlp_norm"], nodes["select/gather"]
    norm.replace_input_with(0, nodes["layers.1.attn_norm"].outputs[0])
    total = ir.node("Add", [gather.inputs[0], norm.outputs[0]], name="extra_add")
    model.graph.insert_before(gather, total)
    gather.replace_input_with(0, total.outputs[0])
    assert run_witness(model, header, tmp_path / "p") == 9
