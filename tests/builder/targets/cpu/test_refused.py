"""Quantized graphs that a plan cannot hold: refused with the node's or the weight's name."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import onnx_ir as ir
import pytest
from plansmith.builder.targets.cpu.lowering import lower
from plansmith.runtime.errors import BuildError
from quantized_weights import SCHEMES
from scheme_graphs import graph_of

Change = Callable[[ir.Model], None]


def node_of(model: ir.Model, name: str) -> ir.Node:
    return next(n for n in model.graph if n.name == name)


def constant(model: ir.Model, array: np.ndarray) -> ir.Value:
    value = ir.Value(name=f"extra.{len(model.graph.initializers)}", const_value=ir.tensor(array))
    value.shape, value.dtype = ir.Shape(array.shape), ir.tensor(array).dtype
    model.graph.initializers.add(value)
    return value


def new_input(node: str, index: int, array: np.ndarray) -> Change:
    return lambda m: node_of(m, node).replace_input_with(index, constant(m, array))


def attribute(node: str, name: str, number: int | str) -> Change:
    made = ir.AttrString(name, number) if isinstance(number, str) else ir.AttrInt64(name, number)
    return lambda m: node_of(m, node).attributes.update({name: made})


def two_readers(model: ir.Model) -> None:
    q = node_of(model, "layers.0.q/input_q")
    again = ir.node("DequantizeLinear", [q.outputs[0], q.inputs[1]], name="again")
    model.graph.insert_after(q, again)


ONE = np.float32(1)
REFUSED: list[tuple[str, Change, str]] = [
    ("fp8", new_input("layers.0.q/input_dq", 1, ONE), "'layers.0.q/input_dq'.* multiplies by another scale"),
    ("fp8", new_input("layers.0.q/input_q", 1, np.float32(0)), "'layers.0.q/input_q'.* its scale is 0.0"),
    ("fp8", new_input("layers.0.q/input_q", 1, np.ones(128, np.float32)), "its scale is None"),
    ("int8_static", new_input("layers.0.q/input_q", 2, np.int8(3)), "'layers.0.q/input_q': a zero point"),
    ("fp8", attribute("layers.0.q/input_q", "saturate", 0), "saturated INT8 and FLOAT8E4M3FN"),
    ("fp8", two_readers, "'layers.0.q/input_q'.* one DequantizeLinear behind it"),
    ("fp8_rows", attribute("layers.0.q/round", "format", "fp6"), "'layers.0.q/round'.* rounds to 'fp6'"),
    ("fp8_rows", attribute("layers.0.q/round", "group", 48), "in groups of 48, which must divide"),
    ("nvfp4", attribute("layers.0.q/round", "group", 32), "FP4 has groups of 16"),
    (
        "int4_awq",
        new_input("layers.0.q/pre_scale", 1, np.ones(64, np.float32)),
        r"factors of shape \[64\] on 128",
    ),
    (
        "w4a8",
        new_input("layers.0.o.weight/grid_dq", 1, ONE),
        "'layers.0.o.weight/grid_q': rounds a weight by other",
    ),
    (
        "w4a8",
        attribute("layers.0.o.weight/grid_q", "saturate", 0),
        "'layers.0.o.weight/grid_q': .* saturated",
    ),
    (
        "nvfp4_wo",
        attribute("layers.0.o.weight/dq", "block_size", 32),
        "'layers.0.o.weight': F4 with groups of 32",
    ),
    ("int4_32", attribute("layers.0.o.weight/dq", "block_size", 4), "'layers.0.o.weight': groups of 4"),
    (
        "int4_32",
        attribute("layers.0.o.weight/dq", "block_size", 64),
        r"scales of shape \[4, 128\], \[2, 128\]",
    ),
    (
        "fp8_wo",
        new_input("layers.0.o.weight/dq", 1, np.ones(64, np.float32)),
        r"scales of shape \[64\], \[128\]",
    ),
]


@pytest.mark.parametrize(("name", "change", "message"), REFUSED, ids=[r[2][:40] for r in REFUSED])
def test_what_a_plan_cannot_hold_is_named(name: str, change: Change, message: str) -> None:
    model, header = graph_of(SCHEMES[name])
    change(model)
    with pytest.raises(BuildError, match=message):
        lower(model, header)


def test_pools_without_scales_or_of_several_types_are_refused() -> None:
    model, header = graph_of(SCHEMES["int8_wo"])
    next(v for v in model.graph.inputs if v.name == "k_pool.1").dtype = ir.DataType.INT8
    with pytest.raises(BuildError, match=r"'layers.1.attn'.*0 scales of its pools, wanted 2"):
        lower(model, header)
    model, header = graph_of(SCHEMES["int8_wo"], kv="fp8")
    next(v for v in model.graph.inputs if v.name == "k_pool.1").dtype = ir.DataType.INT8
    with pytest.raises(BuildError, match="the KV pools are FLOAT8E4M3FN, INT8; the cpu target takes one of"):
        lower(model, header)
