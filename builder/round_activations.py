"""Gives the reference graph the cpu target's rounding of activations, so that the two can be compared closely.

Beside int8 and int4 weights the cpu kernels quantize each row of their input to int8 by groups of columns, or whole
where no group divides it (kOpLinear in runtime/src/cpu/plan_format.h). Here the same is written as standard ops before
each such product.
"""

from __future__ import annotations

import numpy as np
import onnx_ir as ir

from .precision import activation_group_size


def round_activations(model: ir.Model) -> None:
    """Round the input of every product with a quantized weight, in place: x -> round(x / s) * s, s = max|x| / 127.

    model : a graph of build_graph with compute float32. A scale s holds for activation_group_size columns of a row.
    """
    for node in list(model.graph):
        if node.op_type != "MatMul":
            continue
        weight, source = node.inputs[1], node.inputs[0]
        dequantize = _dequantize(weight)
        if dequantize is None or weight is None or weight.shape is None or source is None:
            continue
        width = int(weight.shape[0])  # type: ignore[arg-type]
        size = activation_group_size(dequantize.attributes.get_int("block_size", 0), width)
        nodes = _rounding(source, width, size or width)
        model.graph.insert_before(node, nodes)
        node.replace_input_with(0, nodes[-1].outputs[0])


def _dequantize(value: ir.Value | None) -> ir.Node | None:
    """Return the DequantizeLinear behind a weight, or None."""
    node = value.producer() if value is not None else None
    while node is not None and node.op_type in ("Transpose", "Cast"):
        value = node.inputs[0]
        node = value.producer() if value is not None else None
    return node if node is not None and node.op_type == "DequantizeLinear" else None


def _rounding(source: ir.Value, width: int, size: int) -> list[ir.Node]:
    nodes: list[ir.Node] = []

    def add(op: str, *inputs: ir.Value, **attributes: int) -> ir.Value:
        nodes.append(ir.node(op, list(inputs), attributes))
        return nodes[-1].outputs[0]

    def constant(value: object, kind: type[np.generic]) -> ir.Value:
        nodes.append(ir.node("Constant", [], {"value": ir.tensor(np.array(value, kind))}))
        return nodes[-1].outputs[0]

    x = add("Reshape", source, constant([-1, width // size, size], np.int64))
    largest = add("ReduceMax", add("Abs", x), constant([-1], np.int64), keepdims=1)
    # A row of zeros has no scale; any but zero gives zeros again.
    scale = add("Div", add("Max", largest, constant(1e-30, np.float32)), constant(127.0, np.float32))
    rounded = add("Mul", add("Round", add("Div", x, scale)), scale)
    add("Reshape", rounded, constant([-1, width], np.int64))
    return nodes
