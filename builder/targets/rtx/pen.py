"""Adding nodes and constants to a graph that exists."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import onnx_ir as ir

Attr = str | int | float | Sequence[int]


class Pen:
    """Writes nodes into a graph before its `anchor`, which the caller moves along.

    compute : the type of the graph's activations
    """

    def __init__(self, graph: ir.Graph, compute: ir.DataType) -> None:
        self.graph = graph
        self.compute = compute
        self.anchor: ir.Node = next(iter(graph))
        self._made: dict[str, ir.Value] = {}

    def ints(self, numbers: Sequence[int]) -> ir.Value:
        """An int64 vector."""
        return self.const("int64." + "_".join(map(str, numbers)), np.array(numbers, np.int64))

    def zero(self) -> ir.Value:
        """A zero of the compute type."""
        return self.const("zero", np.array(0, self.compute.numpy()))

    def const(self, name: str, array: np.ndarray) -> ir.Value:
        """A small initializer, made once."""
        name = f"rtx/{name}"
        if name not in self._made:
            tensor = ir.Tensor(array, name=name)
            value = ir.Value(name=name, shape=ir.Shape(array.shape), type=ir.TensorType(tensor.dtype))
            value.const_value = tensor
            self.graph.register_initializer(value)
            self._made[name] = value
        return self._made[name]

    def once(
        self, name: str, op_type: str, inputs: Sequence[ir.Value], dtype: ir.DataType, **attrs: Attr
    ) -> ir.Value:
        """A node that all layers share; the first call makes it."""
        if name not in self._made:
            self._made[name] = self.node(op_type, inputs, name, dtype, domain="", **attrs)
        return self._made[name]

    def node(
        self,
        op_type: str,
        inputs: Sequence[ir.Value | None],
        name: str,
        dtype: ir.DataType | None,
        *,
        domain: str = "",
        **attrs: Attr,
    ) -> ir.Value:
        """Add a node before the anchor and return its one output, "<name>/out"."""
        out = ir.Value(name=f"{name}/out", type=None if dtype is None else ir.TensorType(dtype))
        node = ir.node(
            op_type, inputs=list(inputs), attributes=attrs, domain=domain, outputs=[out], name=name
        )
        self.graph.insert_before(self.anchor, node)
        return out
