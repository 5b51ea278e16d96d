"""Adding nodes and constants to a graph that exists."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import onnx_ir as ir

_SMALL_BYTES = 1 << 18

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
        self._order = {name: i for i, name in enumerate(graph.initializers)}
        self._small: dict[str, npt.NDArray[Any]] = {}

    def ints(self, numbers: Sequence[int]) -> ir.Value:
        """An int64 vector."""
        return self.const("int64." + "_".join(map(str, numbers)), np.array(numbers, np.int64))

    def zero(self) -> ir.Value:
        """A zero of the compute type."""
        return self.const("zero", np.array(0, self.compute.numpy()))

    def number(self, number: float) -> ir.Value:
        """A float32 scalar."""
        return self.const(f"float.{number!r}", np.array(number, np.float32))

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

    def derived(
        self,
        name: str,
        dtype: ir.DataType,
        shape: ir.Shape | None,
        source: ir.Value,
        change: Callable[[npt.NDArray[Any]], npt.NDArray[Any]],
    ) -> ir.Value:
        """An initializer computed from another's data when it is written, made once."""
        name = f"rtx/{name}"
        if name not in self._made:
            assert shape is not None

            def read() -> ir.TensorProtocol:
                return ir.Tensor(change(self.data(source)).astype(dtype.numpy(), copy=False), name=name)

            value = ir.Value(name=name, shape=shape, type=ir.TensorType(dtype))
            value.const_value = ir.LazyTensor(read, dtype=dtype, shape=shape, name=name)
            self.graph.register_initializer(value)
            self._made[name] = value
            self._order[name] = self._order[str(source.name)]
        return self._made[name]

    def order_initializers(self) -> None:
        """Put what was derived beside its source: a weight's initializers, written in turn, then share one reading."""
        values = list(self.graph.initializers.values())
        self.graph.initializers.clear()
        last = len(self._order)
        for value in sorted(values, key=lambda one: self._order.get(str(one.name), last)):
            self.graph.register_initializer(value)

    def data(self, value: ir.Value) -> npt.NDArray[Any]:
        """Return an initializer's data; what is small is kept, since reading a scale may read its whole weight."""
        name = str(value.name)
        if name in self._small:
            return self._small[name]
        assert value.const_value is not None
        data: npt.NDArray[Any] = value.const_value.numpy()
        if data.nbytes <= _SMALL_BYTES:
            self._small[name] = data
        return data

    def cast(self, x: ir.Value, name: str, dtype: ir.DataType | None = None) -> ir.Value:
        """Return x in a type, by default the compute type; x itself where it has that."""
        dtype = dtype or self.compute
        return x if x.dtype == dtype else self.node("Cast", [x], name, dtype, to=int(dtype))

    def replace(self, old: ir.Value, new: ir.Value) -> None:
        """Put `new` in place of `old` under the same name, as graph output too."""
        new.shape, new.type = old.shape, old.type
        name, old.name = old.name, f"{old.name}/replaced"
        new.name = name
        ir.convenience.replace_all_uses_with(old, new, replace_graph_outputs=True)

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

    def nodes(
        self,
        op_type: str,
        inputs: Sequence[ir.Value],
        name: str,
        dtypes: Sequence[ir.DataType],
        *,
        domain: str,
        **attrs: Attr,
    ) -> list[ir.Value]:
        """Add a node before the anchor and return its outputs, "<name>/out0" and on."""
        outs = [ir.Value(name=f"{name}/out{i}", type=ir.TensorType(kind)) for i, kind in enumerate(dtypes)]
        node = ir.node(op_type, inputs=list(inputs), attributes=attrs, domain=domain, outputs=outs, name=name)
        self.graph.insert_before(self.anchor, node)
        return outs
