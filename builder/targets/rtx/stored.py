"""Float weights in the compute type, whatever the checkpoint has them in.

A bfloat16 weight would keep a plan from a GPU without bfloat16 (sm75), and each Cast costs a step memory and time.
"""

from __future__ import annotations

from typing import Any

import numpy.typing as npt
import onnx_ir as ir

from ...graph.arrays import converted
from .pen import Pen

_FLOATS = (ir.DataType.FLOAT, ir.DataType.FLOAT16, ir.DataType.BFLOAT16)


def store_as_compute_type(pen: Pen) -> None:
    """Convert each weight that nodes read through a Cast to the compute type alone, and remove those Casts.

    raises (when the weights are written): CheckpointError for one beyond float16's range
    """
    for value in list(pen.graph.initializers.values()):
        if value.dtype not in _FLOATS or value.dtype == pen.compute or value.const_value is None:
            continue
        if value.uses() and all(_is_cast(use.node, pen.compute) for use in value.uses()):
            _convert(pen, value)


def _is_cast(node: ir.Node, dtype: ir.DataType) -> bool:
    """Return whether a node is a Cast to a type, or a Gather of rows that only such Casts read."""
    if node.op_type == "Cast":
        return node.attributes["to"].as_int() == int(dtype)
    readers = [use.node for use in node.outputs[0].uses()]
    return (
        node.op_type == "Gather"
        and bool(readers)
        and all(one.op_type == "Cast" and _is_cast(one, dtype) for one in readers)
    )


def _convert(pen: Pen, value: ir.Value) -> None:
    name = str(value.name)

    def convert(values: npt.NDArray[Any]) -> npt.NDArray[Any]:
        return converted(values, pen.compute.numpy(), name)

    stored = pen.derived(name, pen.compute, value.shape, value, convert)
    for use in list(value.uses()):
        use.node.replace_input_with(use.idx, stored)
        node = use.node
        if node.op_type == "Gather":
            node.outputs[0].type = ir.TensorType(pen.compute)
            casts = [one.node for one in node.outputs[0].uses()]
        else:
            casts = [node]
        for cast in casts:
            ir.convenience.replace_all_uses_with(cast.outputs[0], cast.inputs[0])  # type: ignore[arg-type]
            pen.graph.remove(cast, safe=True)
    del pen.graph.initializers[name]
