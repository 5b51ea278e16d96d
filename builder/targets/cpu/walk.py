"""The walk over the graph that lowering makes: what it knows of each value, and the ops it has written.

What lowers a node is in lowering.py, products.py, pointwise.py, attention.py and relabel.py; here is what they share.
"""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Callable, Iterable, Sequence

import onnx_ir as ir

from ....runtime.errors import BuildError
from ...graph import contract
from .buffers import Buffer, BufferOp, Ref
from .constants import scalar_constant
from .plan_file import OpCode, SlotRows
from .tensors import TensorPool
from .values import ROWS_AXIS, Activation, Pending, Storage
from .weights import Weight, resolve_weight

# Each row of the result is a function of the same row of the inputs alone.
_ROW_WISE = {
    ("", "RMSNormalization"),
    ("", "MatMul"),
    ("", "Add"),
    ("", "Mul"),
    ("", "Div"),
    ("", "Sigmoid"),
    ("", "Swish"),
    ("", "Gelu"),
    ("", "Tanh"),
    ("", "Cast"),
    ("", "Identity"),
    ("", "QuantizeLinear"),
    ("", "DequantizeLinear"),
    (contract.OP_DOMAIN, contract.ROUND_INPUT),
}


class Walk:
    """Nodes in the graph's order, values in buffers, ops in a list."""

    def __init__(self, graph: ir.Graph) -> None:
        self.ops: list[BufferOp] = []
        self.pool = TensorPool()
        self.nodes = list(graph)
        self.position = {node: n for n, node in enumerate(self.nodes)}
        self.inputs = {v: v.name for v in graph.inputs}
        self.static = _static_values(graph, self.nodes)
        self.late = _late_nodes(self.nodes, self.is_logits_gather)
        self.fused: set[ir.Node] = set()  # nodes that another node's op has taken in
        self._known: dict[ir.Value, Activation | Pending] = {}
        self._gathered: dict[ir.Value, Storage] = {}
        self._weights: dict[ir.Value, Weight] = {}
        # Nodes that read a value's storage for what was made of it: see Activation.before.
        self._readers_before: dict[ir.Value, list[ir.Node]] = collections.defaultdict(list)

    def emit(
        self,
        code: OpCode,
        name: str | None,
        ins: Sequence[Ref],
        out: Ref,
        *,
        tensors: Sequence[int] = (),
        i: Sequence[int] = (),
        f: Sequence[float] = (),
    ) -> None:
        """Append an op; the arguments' meaning by code is in plan_format.h."""
        rows = {ref.buffer.rows for ref in (*ins, out)}
        assert len(rows) == 1 or code is OpCode.GATHER_ROWS, f"{name}: rows of two kinds"
        self.ops.append(BufferOp(code, name or "", tuple(ins), out, tuple(tensors), tuple(i), tuple(f)))

    def new(self, rows: SlotRows, width: int) -> Storage:
        """Return the columns of a new buffer."""
        return Storage(Ref(Buffer(rows, width)), width)

    def error(self, node: ir.Node, what: str) -> BuildError:
        """Return the error of a node that the cpu target does not take."""
        kind = f"{node.domain}::{node.op_type}" if node.domain else node.op_type
        return BuildError(f"node {node.name!r} ({kind}): {what}")

    def find(self, value: ir.Value | None) -> Activation | Pending | None:
        """Return what is known of a value; None for constants and the step's integers."""
        return None if value is None else self._known.get(value)

    def bind(self, value: ir.Value, what: Activation | Pending) -> None:
        """Say where a value is; its uses keep the columns."""
        users = [use.node for use in value.uses()]
        what.storage.pending += len(users)
        self._known[value] = what
        before = what.before if isinstance(what, Activation) else None
        if before is not None:
            self._readers_before[before] += users
            self._known[before].storage.pending += len(users)
            if before in self._gathered:
                self._gathered[before].pending += sum(map(self.wants_rows, users))

    def bind_rows(self, value: ir.Value, storage: Storage) -> None:
        """Bind a plain matrix [rows, width]."""
        self.bind(value, Activation(storage, (ROWS_AXIS, storage.width)))

    def finish(self, node: ir.Node) -> None:
        """Count down the uses that a node made of its inputs."""
        for value in node.inputs:
            known = self.find(value)
            if value is None or known is None:
                continue
            self._count_down(node, value)
            if isinstance(known, Activation) and known.before is not None:
                self._count_down(node, known.before)

    def _count_down(self, node: ir.Node, value: ir.Value) -> None:
        self._known[value].storage.pending -= 1
        if value in self._gathered and self.wants_rows(node):
            self._gathered[value].pending -= 1

    def activation(self, node: ir.Node, index: int) -> Activation:
        """Return input `index` as it lies in memory: the rows with logits alone where the node needs no others."""
        value = node.inputs[index]
        found = self.find(value)
        if value is None or not isinstance(found, Activation):
            what = "half of a gated activation or a soft cap" if found else "no activation"
            raise self.error(
                node, f"input {index} is {what}; the cpu target wants an activation in memory there"
            )
        if self.wants_rows(node) and found.storage.rows is SlotRows.TOKENS:
            return dataclasses.replace(found, storage=self._gather_rows(value, found))
        return found

    def before(self, node: ir.Node, found: Activation) -> Ref | None:
        """Return where an input of a product lies as it was before factors and rounding; None where nothing was."""
        if found.before is None:
            return None
        original = self._known[found.before]
        assert isinstance(original, Activation)
        if self.wants_rows(node) and original.storage.rows is SlotRows.TOKENS:
            return self._gather_rows(found.before, original).ref
        return original.ref

    def _gather_rows(self, value: ir.Value, found: Activation) -> Storage:
        """Return the rows of a value whose logits are wanted, gathered once."""
        if value not in self._gathered:
            width = found.storage.width
            storage = self.new(SlotRows.LOGITS, width)
            self.emit(OpCode.GATHER_ROWS, f"{value.name}/rows", [found.ref], storage.ref, i=[width])
            readers = [*(use.node for use in value.uses()), *self._readers_before[value]]
            storage.pending = sum(map(self.wants_rows, readers))
            self._gathered[value] = storage
        return self._gathered[value]

    def in_place(self, storage: Storage) -> bool:
        """Return whether the node at hand is the last to need these columns, so that it may overwrite them."""
        return storage.pending == 1

    def wants_rows(self, node: ir.Node) -> bool:
        """Return whether a node's result is needed for the rows with logits only."""
        return node in self.late or self.is_logits_gather(node)

    def is_logits_gather(self, node: ir.Node) -> bool:
        """Return whether a node picks the rows with logits."""
        return (
            node.op_type == "Gather"
            and node.inputs[1] is not None
            and self.inputs.get(node.inputs[1]) == contract.LOGITS_ROWS
        )

    def input_name(self, value: ir.Value | None) -> str | None:
        """Return the name of the graph input that a value is, behind Casts and axes of size 1."""
        while value is not None and value not in self.inputs:
            node = value.producer()
            if node is None or node.op_type not in ("Cast", "Unsqueeze", "Identity"):
                return None
            value = node.inputs[0]
        return None if value is None else self.inputs[value]

    def scalar_input(self, node: ir.Node) -> tuple[int, float] | None:
        """Return (index of the other input, value) when one of two inputs is a scalar constant."""
        for index in (1, 0):
            number = scalar_constant(node.inputs[index]) if node.inputs[index] in self.static else None
            if number is not None:
                return 1 - index, number
        return None

    def weight(self, node: ir.Node) -> Weight:
        """Return the weight of a MatMul."""
        value = node.inputs[1]
        if value is None:
            raise self.error(node, "it has no weight")
        if value not in self._weights:
            self._weights[value] = resolve_weight(value, matmul=True)
        return self._weights[value]

    def in_order(self, nodes: Iterable[ir.Node]) -> list[ir.Node]:
        """Return distinct nodes in the graph's order."""
        return sorted(set(nodes), key=self.position.__getitem__)


def _static_values(graph: ir.Graph, nodes: Sequence[ir.Node]) -> set[ir.Value | None]:
    """Return the values that are known at build: initializers and what is made of them alone."""
    static: set[ir.Value | None] = set(graph.initializers.values())
    for node in nodes:
        if all(v in static for v in node.inputs if v is not None):
            static.update(node.outputs)
    return static


def _late_nodes(nodes: Sequence[ir.Node], is_gather: Callable[[ir.Node], bool]) -> set[ir.Node]:
    """Return the row-wise nodes whose results reach nothing but gathers of the rows with logits."""
    late: set[ir.Node] = set()
    for node in reversed(nodes):
        if (node.domain, node.op_type) not in _ROW_WISE or any(out.is_graph_output() for out in node.outputs):
            continue
        users = [use.node for out in node.outputs for use in out.uses()]
        if users and all(user in late or is_gather(user) for user in users):
            late.add(node)
    return late


def only_user(value: ir.Value) -> ir.Node | None:
    """Return the one node that uses a value once, None if there are more uses or the graph gives it out."""
    uses = list(value.uses())
    return uses[0].node if len(uses) == 1 and not value.is_graph_output() else None
