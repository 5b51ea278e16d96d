"""Short names for the ONNX ops that the lowering writes; constants are shared by value."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import onnx_ir as ir

I64 = ir.DataType.INT64


class Tape:
    """Collects nodes with names below `prefix`; the caller inserts them into a graph."""

    def __init__(self, prefix: str, consts: dict[str, ir.Value]) -> None:
        self.nodes: list[ir.Node] = []
        self._prefix = prefix
        self._consts = consts

    def op(self, op_type: str, *inputs: ir.Value, **attrs: int | float | Sequence[int]) -> ir.Value:
        """Add a node with one output and return that."""
        name = f"{self._prefix}/{len(self.nodes)}.{op_type}"
        out = ir.Value(name=f"{name}/out")
        self.nodes.append(ir.node(op_type, list(inputs), dict(attrs), outputs=[out], name=name))
        return out

    def ints(self, *numbers: int) -> ir.Value:
        """An int64 vector."""
        return self._const("i." + "_".join(map(str, numbers)), np.array(numbers, np.int64))

    def scalar(self, number: int) -> ir.Value:
        """An int64 scalar."""
        return self._const(f"i0.{number}", np.array(number, np.int64))

    def number(self, number: float) -> ir.Value:
        """A float32 scalar."""
        return self._const(f"f0.{number!r}", np.array(number, np.float32))

    def cast(self, x: ir.Value, dtype: ir.DataType) -> ir.Value:
        """Return x in another type."""
        return self.op("Cast", x, to=int(dtype))

    def expand_dims(self, x: ir.Value, *axes: int) -> ir.Value:
        """Return x with axes of length 1 at these places of the result."""
        return self.op("Unsqueeze", x, self.ints(*axes))

    def iota(self, count: ir.Value) -> ir.Value:
        """0, 1, ... count - 1 for an int64 scalar."""
        return self.op("Range", self.scalar(0), count, self.scalar(1))

    def dim(self, x: ir.Value, axis: int) -> ir.Value:
        """The length of an axis, an int64 scalar."""
        return self.op("Gather", self.op("Shape", x), self.scalar(axis), axis=0)

    def _const(self, key: str, array: npt.NDArray[Any]) -> ir.Value:
        if key not in self._consts:
            value = ir.Value(name=f"ref.{key}", const_value=ir.Tensor(array, name=f"ref.{key}"))
            value.type = ir.TensorType(ir.DataType.from_numpy(array.dtype))
            value.shape = ir.Shape(array.shape)
            self._consts[key] = value
        return self._consts[key]
