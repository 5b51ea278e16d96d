"""The program that a graph becomes: its ops, slots and tensors, and graphs that it refuses."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx_ir as ir
import pytest
from plansmith.builder.graph import build_graph
from plansmith.builder.limits import make_limits
from plansmith.builder.precision import Precision, precision
from plansmith.builder.targets.cpu.compile import header_fields
from plansmith.builder.targets.cpu.lowering import lower
from plansmith.builder.targets.cpu.plan_file import (
    DType,
    Layout,
    LinearInput,
    OpCode,
    Program,
    SlotRows,
    View,
)
from plansmith.runtime.errors import BuildError
from tiny_graph import EVERYTHING, RandomWeights, tiny_spec


def graph_of(
    recipe: str | Precision = "fp32", *, compute: str = "float32", **fields: Any
) -> tuple[ir.Model, dict[str, int]]:
    spec = tiny_spec(**fields)
    limits = make_limits(spec.max_position_embeddings)
    held = precision(recipe).on_cpu() if isinstance(recipe, str) else recipe
    model = build_graph(spec, RandomWeights(spec), held, limits, compute=compute)
    return model, header_fields(spec, limits)


def program_of(recipe: str | Precision = "fp32", **fields: Any) -> Program:
    return lower(*graph_of(recipe, **fields))


def listing(program: Program) -> list[str]:
    return [f"{op.code.name} {op.name}" for op in program.ops]


LLAMA = """
EMBED embed/gather
RMS_NORM layers.0.attn_norm
LINEAR layers.0.q|k|v
ROPE layers.0.q_rope|k_rope
PAGED_ATTENTION layers.0.attn
LINEAR layers.0.o
RMS_NORM layers.0.mlp_norm
LINEAR layers.0.gate|up
GLU layers.0.glu
LINEAR layers.0.down
RMS_NORM layers.1.attn_norm
LINEAR layers.1.q|k|v
ROPE layers.1.q_rope|k_rope
PAGED_ATTENTION layers.1.attn
GATHER_ROWS layers.1.attn/out/rows
GATHER_ROWS layers.0.mlp_add/out/rows
LINEAR layers.1.o
RMS_NORM layers.1.mlp_norm
LINEAR layers.1.gate|up
GLU layers.1.glu
LINEAR layers.1.down
RMS_NORM final_norm
LINEAR lm_head
"""

GEMMA_LAYER = """
RMS_NORM layers.0.attn_norm
LINEAR layers.0.q|k|v
RMS_NORM layers.0.q_norm
RMS_NORM layers.0.k_norm
ROPE layers.0.q_rope|k_rope
PAGED_ATTENTION layers.0.attn
LINEAR layers.0.o
RMS_NORM layers.0.post_attn_norm
ADD layers.0.attn_add
RMS_NORM layers.0.mlp_norm
LINEAR layers.0.gate|up
GLU layers.0.glu
LINEAR layers.0.down
RMS_NORM layers.0.post_mlp_norm
ADD layers.0.mlp_add
"""


def test_a_llama_is_ten_ops_a_layer_and_its_last_layer_runs_for_the_wanted_rows() -> None:
    program = program_of()
    assert listing(program) == LLAMA.split("\n")[1:-1]
    linears = {op.name: op for op in program.ops if op.code is OpCode.LINEAR}
    accumulating = [name for name, op in linears.items() if op.i[0]]
    assert accumulating == ["layers.0.o", "layers.0.down", "layers.1.o", "layers.1.down"]
    rows = [program.slots[op.out.slot].rows for op in program.ops]
    assert rows == [SlotRows.TOKENS] * 14 + [SlotRows.LOGITS] * 9
    assert program.slots[program.logits_slot].width == 96
    # A residual, a normed row, q|k|v, attention, gate|up and their product; the same again for the wanted rows.
    assert len(program.slots) <= 12


def test_views_split_the_fused_products() -> None:
    ops = {op.name: op for op in program_of().ops}
    qkv = ops["layers.0.q|k|v"].out.slot
    assert ops["layers.0.attn"].ins == (View(qkv, 0), View(qkv, 128), View(qkv, 192))
    assert ops["layers.0.attn"].i == (4, 2, 32, 0, 0) and ops["layers.1.attn"].i == (4, 2, 32, 1, 8)
    assert ops["layers.0.q_rope|k_rope"].i == (6, 32, 32)  # q's 4 heads and k's 2 lie side by side
    gate_up = ops["layers.0.gate|up"].out.slot
    assert ops["layers.0.glu"].ins == (View(gate_up, 0), View(gate_up, 96))
    assert ops["layers.0.glu"].out.slot != gate_up


def test_a_gemma_keeps_its_norms_scales_and_caps() -> None:
    program = program_of(**EVERYTHING)
    lines = listing(program)
    assert lines[1:16] == GEMMA_LAYER.split("\n")[1:-1] and lines[-1] == "SOFTCAP logits/tanh"
    ops = {op.name: op for op in program.ops}
    assert ops["embed/gather"].f == (8.0,) and ops["logits/tanh"].f == pytest.approx((6.0,))
    assert ops["layers.0.attn"].f == pytest.approx((32**-0.5, 4.0))
    assert ops["layers.0.glu"].i == (96, 1)
    assert ops["layers.0.q_norm"].i == (4, 32) and ops["layers.0.k_norm"].i == (2, 32)
    assert ops["layers.0.k_norm"].ins == (ops["layers.0.k_norm"].out,)  # in place on k's columns
    biased = [program.tensors[op.tensors[1]].name for op in program.ops if op.code is OpCode.LINEAR]
    assert biased[:2] == ["layers.0.q|k|v.bias", "layers.0.o.bias"] and biased[-1] == "lm_head.bias"


def test_ropes_of_different_tables_stay_apart() -> None:
    """Where q and k do not lie side by side, or rotate differently, there are two ops."""
    program = program_of(qk_norm=True)
    names = [op.name for op in program.ops if op.code is OpCode.ROPE]
    assert names == ["layers.0.q_rope|k_rope", "layers.1.q_rope|k_rope"]
    model, header = graph_of()
    node = next(n for n in model.graph if n.name == "layers.0.k_rope")
    table = np.zeros((128, 16), np.float32)
    other = ir.Value(
        name="other.cos", shape=ir.Shape(table.shape), const_value=ir.tensor(table, name="other.cos")
    )
    model.graph.initializers.add(other)
    node.replace_input_with(1, other)
    names = [op.name for op in lower(model, header).ops if op.code is OpCode.ROPE]
    assert names[:2] == ["layers.0.q_rope", "layers.0.k_rope"]


@pytest.mark.parametrize("recipe", ["fp32", "bf16", "int8", "int4"])
def test_a_tied_table_is_stored_once(recipe: str) -> None:
    program = program_of(recipe)
    tables = [t for t in program.tensors if t.name == "embed.weight"]
    assert len(tables) == 1 and tables[0].layout is not Layout.ROW_MAJOR
    assert program.ops[0].tensors[0] == program.ops[-1].tensors[0] == program.tensors.index(tables[0])


def test_an_untied_float_table_keeps_a_row_for_each_token_id() -> None:
    by_name = {t.name: t for t in program_of(tie_embeddings=False).tensors}
    assert by_name["embed.weight"].layout is Layout.ROW_MAJOR
    assert by_name["lm_head.weight"].layout is Layout.PACKED_N16
    int8 = {t.name: t for t in program_of("int8", tie_embeddings=False).tensors}
    assert int8["embed.weight"].layout is Layout.PACKED_N16_K4


def test_precision_decides_what_is_stored() -> None:
    kinds = {"fp32": DType.F32, "fp16": DType.F16, "bf16": DType.BF16, "int8": DType.I8, "int4": DType.I4}
    for recipe, dtype in kinds.items():
        by_name = {t.name: t for t in program_of(recipe).tensors}
        matrix = by_name["layers.0.q|k|v.weight"]
        assert matrix.dtype is dtype and (matrix.rows, matrix.cols) == (256, 64)
        assert matrix.group_size == (32 if recipe in ("int8", "int4") else 0)
        assert matrix.scale_dtype is (DType.BF16 if recipe in ("int8", "int4") else DType.F32)
        assert by_name["layers.0.attn_norm.weight"].dtype is DType.F32


def test_rounding_by_groups_gives_int8_tensors_groups() -> None:
    for recipe in ("int8", "int4"):
        for size, wide in ((None, 32), (128, 64)):
            held = precision(recipe).in_groups(size).on_cpu()
            program = program_of(held)
            groups = {t.name: t.group_size for t in program.tensors}
            assert groups["layers.0.q|k|v.weight"] == wide  # 64 inputs: 128 do not divide them
            assert (
                groups["layers.0.down.weight"] == groups["embed.weight"] == 32
            )  # 96; a head has the smallest
            assert all(op.i[1] == LinearInput.INT8_GROUP for op in program.ops if op.code is OpCode.LINEAR)
            assert len([t for t in program.tensors if t.name == "embed.weight"]) == 1
            untied = program_of(held, tie_embeddings=False)
            assert {t.name: t for t in untied.tensors}["embed.weight"].group_size == 32
    plain = program_of(precision("int8"))
    assert all(op.i[1] == LinearInput.FLOAT for op in plain.ops if op.code is OpCode.LINEAR)
    assert {t.name: t for t in plain.tensors}["layers.0.down.weight"].group_size == 0


def test_columns_that_no_group_divides_are_rounded_by_row() -> None:
    fields = {"hidden_size": 40, "intermediate_size": 96}
    program = program_of("int8", **fields)
    by_unit = {op.name: op for op in program.ops if op.code is OpCode.LINEAR}
    assert by_unit["layers.0.q|k|v"].i[1] == LinearInput.INT8_ROW
    assert by_unit["layers.0.down"].i[1] == LinearInput.INT8_GROUP
    groups = {t.name: t.group_size for t in program.tensors}
    assert groups["layers.0.q|k|v.weight"] == 0 and groups["layers.0.down.weight"] == 32


def test_rows_may_be_picked_behind_the_head_as_well() -> None:
    """The gather moves forward as far as it can: the program is the same wherever the graph has it."""
    model, header = graph_of()
    nodes = {node.name: node for node in model.graph}
    early, identity = nodes["select/gather"], nodes["logits/identity"]
    nodes["final_norm"].replace_input_with(0, early.inputs[0])
    late = ir.node("Gather", [identity.inputs[0], early.inputs[1]], attributes={"axis": 0}, name="late")
    insert(model, "logits/identity", late)
    model.graph.remove(early, safe=True)
    assert listing(lower(model, header)) == LLAMA.split("\n")[1:-1]


def insert(model: ir.Model, before: str, node: ir.Node) -> None:
    """Put a node in front of the first input of another."""
    target = next(n for n in model.graph if n.name == before)
    model.graph.insert_before(target, node)
    target.replace_input_with(0, node.outputs[0])


def first_input(model: ir.Model, name: str) -> ir.Value:
    value = next(n for n in model.graph if n.name == name).inputs[0]
    assert value is not None
    return value


def test_an_unknown_op_is_named() -> None:
    model, header = graph_of()
    insert(model, "layers.1.mlp_norm", ir.node("Sin", [first_input(model, "layers.1.mlp_norm")], name="odd"))
    with pytest.raises(BuildError, match=r"node 'odd' \(Sin\): .* does not take this op, it takes .*MatMul"):
        lower(model, header)
    model, header = graph_of()
    op = ir.node("Fancy", [first_input(model, "layers.1.mlp_norm")], domain="com.example", name="mine")
    insert(model, "layers.1.mlp_norm", op)
    with pytest.raises(BuildError, match=r"node 'mine' \(com.example::Fancy\)"):
        lower(model, header)


@pytest.mark.parametrize(
    ("op", "attributes", "message"),
    [
        ("Tanh", {}, "soft cap"),
        ("Transpose", {"perm": [1, 0]}, "half of an activation|columns meet|last axis"),
        ("Cast", {"to": ir.DataType.FLOAT16}, "compute float32"),
    ],
)
def test_known_ops_in_unknown_places_are_named(op: str, attributes: dict[str, Any], message: str) -> None:
    model, header = graph_of()
    node = ir.node(op, [first_input(model, "layers.1.attn_norm")], attributes=attributes, name="odd")
    insert(model, "layers.1.attn_norm", node)
    with pytest.raises(BuildError, match=message):
        lower(model, header)


def test_a_graph_of_another_compute_type_is_refused() -> None:
    model, header = graph_of("fp16", compute="float16")
    with pytest.raises(BuildError, match="compute float32"):
        lower(model, header)


def test_asymmetric_and_misplaced_scales_are_refused() -> None:
    for change, message in (
        (lambda n: n.attributes.update({"axis": ir.AttrInt64("axis", 0)}), "one scale an input"),
        (
            lambda n: n.attributes.update({"block_size": ir.AttrInt64("block_size", 16)}),
            "groups of 16 along outputs",
        ),
    ):
        model, header = graph_of(precision("int8"))  # one scale an output
        change(next(n for n in model.graph if n.name == "layers.0.o.weight/dq"))
        with pytest.raises(BuildError, match=message):
            lower(model, header)
    model, header = graph_of("int8")
    node = next(n for n in model.graph if n.name == "layers.0.o.weight/dq")
    zero = ir.Value(name="zero", const_value=ir.tensor(np.ones(64, np.int8), name="zero"))
    model.graph.initializers.add(zero)
    dq = ir.node("DequantizeLinear", [*node.inputs[:2], zero], attributes={"axis": 1}, name="asymmetric")
    model.graph.insert_before(node, dq)
    node.outputs[0].replace_all_uses_with(dq.outputs[0])
    with pytest.raises(BuildError, match="'asymmetric': a zero point other than 0"):
        lower(model, header)
