"""A thin pen over onnx-ir: every node and value gets a stable name, a type and a shape as it is added."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import onnx_ir as ir

from . import contract

OPSET = 24

Dim = int | str
Array = npt.NDArray[Any]

TOKENS = "num_tokens"
SEQS = "num_seqs"
ROWS = "num_logits"
BLOCKS = "num_blocks"
TABLE = "blocks_per_seq"


class GraphBuilder:
    """Collects nodes, inputs and initializers in the order they are made; `finish` returns the model.

    compute : the type of the activations, FLOAT, FLOAT16 or BFLOAT16
    """

    def __init__(self, compute: ir.DataType) -> None:
        self.compute = compute
        self._inputs: list[ir.Value] = []
        self._outputs: list[ir.Value] = []
        self._initializers: dict[str, ir.Value] = {}
        self._nodes: list[ir.Node] = []
        self._made: dict[str, ir.Value] = {}
        self._block = ""

    def set_block(self, block: str) -> None:
        """Mark the nodes that follow as part of `block`, e.g. "layers.3.attn" (metadata "plansmith.block")."""
        self._block = block

    def input(self, name: str, dtype: ir.DataType, shape: Sequence[Dim]) -> ir.Value:
        """Add a graph input."""
        made = value(name, dtype, shape)
        self._inputs.append(made)
        return made

    def output(self, made: ir.Value) -> None:
        """Make `made` a graph output under its own name."""
        self._outputs.append(made)

    def lazy(
        self, name: str, dtype: ir.DataType, shape: Sequence[int], read: Callable[[], Array]
    ) -> ir.Value:
        """Add an initializer whose data `read` returns each time it is asked for; a name is added once."""
        if name not in self._initializers:
            tensor = ir.LazyTensor(
                lambda: ir.Tensor(read(), dtype=dtype, name=name),
                dtype=dtype,
                shape=ir.Shape(shape),
                name=name,
            )
            made = value(name, dtype, shape)
            made.const_value = tensor
            self._initializers[name] = made
        return self._initializers[name]

    def const(self, name: str, array: Array) -> ir.Value:
        """Add a small initializer held in memory."""
        if name not in self._initializers:
            tensor = ir.Tensor(array, name=name)
            made = value(name, tensor.dtype, array.shape)
            made.const_value = tensor
            self._initializers[name] = made
        return self._initializers[name]

    def ints(self, name: str, numbers: Sequence[int]) -> ir.Value:
        """Add an int64 vector, e.g. a shape or axes."""
        return self.const(name, np.array(numbers, np.int64))

    def const_f32(self, name: str, number: float) -> ir.Value:
        """Add a rank-0 float32 constant."""
        return self.const(name, np.array(number, np.float32))

    def scalar(self, name: str, number: float) -> ir.Value:
        """Add a rank-0 constant of the compute type."""
        return self.const(name, np.array(number, dtype=self.compute.numpy()))

    def node(
        self,
        op_type: str,
        inputs: Sequence[ir.Value | None],
        name: str,
        dtype: ir.DataType,
        shape: Sequence[Dim],
        attrs: Mapping[str, int | float | str | Sequence[int]] | None = None,
        out: str | None = None,
    ) -> ir.Value:
        """Add a standard node `name` with one output, called `out` or "<name>/out"."""
        result = value(out or f"{name}/out", dtype, shape)
        self.add(op_type, inputs, [result], name, attrs)
        return result

    def add(
        self,
        op_type: str,
        inputs: Sequence[ir.Value | None],
        outputs: Sequence[ir.Value],
        name: str,
        attrs: Mapping[str, int | float | str | Sequence[int]] | None = None,
        domain: str = "",
    ) -> None:
        """Add a node with the given output values."""
        node = ir.node(
            op_type,
            inputs=list(inputs),
            attributes={key: _attr(key, item) for key, item in (attrs or {}).items()},
            domain=domain,
            outputs=list(outputs),
            name=name,
        )
        if self._block:
            node.metadata_props["plansmith.block"] = self._block
        self._nodes.append(node)
        self._made.update((str(out.name), out) for out in outputs)

    def made(self, name: str) -> ir.Value:
        """Return a node's output by its name."""
        return self._made[name]

    def finish(self, name: str, metadata: Mapping[str, str]) -> ir.Model:
        """Return the model; nodes are in the order they were added, which is a topological one."""
        graph = ir.Graph(
            self._inputs,
            self._outputs,
            nodes=self._nodes,
            initializers=list(self._initializers.values()),
            opset_imports={"": OPSET, contract.OP_DOMAIN: contract.VERSION},
            name=name,
        )
        model = ir.Model(graph, ir_version=11, producer_name="plansmith")
        model.metadata_props.update(metadata)
        return model


def _attr(key: str, item: int | float | str | Sequence[int]) -> ir.Attr:
    """Return an attribute typed by its value: a float stays FLOAT even when it is whole."""
    if isinstance(item, str):
        return ir.AttrString(key, item)
    if isinstance(item, float):
        return ir.AttrFloat32(key, item)
    if isinstance(item, int):
        return ir.AttrInt64(key, item)
    return ir.AttrInt64s(key, list(item))


def value(name: str, dtype: ir.DataType, shape: Sequence[Dim]) -> ir.Value:
    """Return a value that no node makes yet."""
    return ir.Value(name=name, shape=ir.Shape(shape), type=ir.TensorType(dtype))
