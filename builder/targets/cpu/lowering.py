"""The graph of builder/graph lowered to the linear program of the cpu plan.

Nodes are taken in the graph's order and matched by what they compute, whatever the family: what shares an input is
one product (q, k and v; gate and up), a branch is added to the residual stream by the product that ends it, and of
the last layer only the rows whose logits are wanted go through what follows its attention.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Sequence

import onnx_ir as ir

from ....runtime.errors import BuildError
from ...graph import contract
from ...precision import int4_group_size
from . import values as dims_of
from .buffers import Buffer, BufferOp, Ref, assign_slots, to_ops
from .plan_file import DType, OpCode, Program, SlotRows
from .tensors import TensorPool, joined_names
from .values import ROWS_AXIS, Activation, Dims, Pending, Storage
from .weights import Weight, resolve_weight, small_constant

GLU_SILU, GLU_GELU_TANH, GLU_GELU_ERF = 0, 1, 2

# Each row of the result is a function of the same row of the inputs alone.
_ROW_WISE = {
    "RMSNormalization",
    "MatMul",
    "Add",
    "Mul",
    "Div",
    "Sigmoid",
    "Swish",
    "Gelu",
    "Tanh",
    "Cast",
    "Identity",
}


@dataclasses.dataclass(frozen=True)
class Options:
    """Choices of the lowering.

    activation_groups : quantize the activations of int8 and int4 products by groups of columns instead of by row
    """

    activation_groups: bool = False


def lower(model: ir.Model, header: dict[str, int], options: Options | None = None) -> Program:
    """Return the program of a graph; no weight is read.

    header : the plan's model fields (plan_file.MODEL_FIELDS)
    raises BuildError naming the node that the cpu target does not take, and what it takes.
    """
    return _Lowering(model.graph, options or Options()).run(header)


class _Lowering:
    def __init__(self, graph: ir.Graph, options: Options) -> None:
        self.graph = graph
        self.options = options
        self.ops: list[BufferOp] = []
        self.pool = TensorPool()
        self.inputs = {v: v.name for v in graph.inputs}
        self.known: dict[ir.Value, Activation | Pending] = {}
        self.gathered: dict[ir.Value, Storage] = {}
        self.fused: set[ir.Node] = set()
        self.nodes = list(graph)
        self.position = {node: n for n, node in enumerate(self.nodes)}
        self.static = _static_values(graph, self.nodes)
        self.late = _late_nodes(self.nodes, self.is_logits_gather)
        self.handlers: dict[str, Callable[[ir.Node], None]] = {
            "Gather": self.gather,
            "RMSNormalization": self.rms_norm,
            "MatMul": self.matmul,
            "Add": self.add,
            "Mul": self.mul,
            "Div": self.div,
            "Sigmoid": self.sigmoid,
            "Swish": self.swish,
            "Gelu": self.gelu,
            "Tanh": self.tanh,
            "RotaryEmbedding": self.rope,
            "Reshape": self.reshape,
            "Transpose": self.transpose,
            "Unsqueeze": self.unsqueeze,
            "Squeeze": self.squeeze,
            "Cast": self.cast,
            "Identity": self.identity,
            contract.PAGED_ATTENTION: self.paged_attention,
        }

    # ------------------------------------------------------------------ the walk

    def run(self, header: dict[str, int]) -> Program:
        for node in self.nodes:
            if node not in self.fused and not all(out in self.static for out in node.outputs):
                handler = self.handlers.get(node.op_type)
                if handler is None or node.domain not in ("", contract.OP_DOMAIN):
                    raise self.error(node, f"the cpu target takes {', '.join(sorted(self.handlers))}")
                handler(node)
            self.finish(node)
        logits = self.logits_buffer(header["vocab_size"])
        slots, slot_of = assign_slots(self.ops, logits)
        ops = to_ops(self.ops, slot_of)
        return Program(slots, self.pool.tensors(), ops, header, slot_of[logits])

    def finish(self, node: ir.Node) -> None:
        """Count down the uses that the node made of its inputs."""
        late = node in self.late or self.is_logits_gather(node)
        for value in node.inputs:
            if value is None:
                continue
            if value in self.known:
                self.known[value].storage.pending -= 1
            if late and value in self.gathered:
                self.gathered[value].pending -= 1

    def logits_buffer(self, vocab_size: int) -> Buffer:
        output = next((v for v in self.graph.outputs if v.name == contract.LOGITS), None)
        found = None if output is None else self.known.get(output)
        if not isinstance(found, Activation):
            raise BuildError(
                f"the graph has no output {contract.LOGITS!r}; the cpu target takes the graph's contract"
            )
        ref = found.ref
        if ref.buffer.rows is not SlotRows.LOGITS or ref.col or ref.buffer.width != vocab_size:
            raise BuildError(
                f"{contract.LOGITS} are not [R, {vocab_size}] rows chosen by {contract.LOGITS_ROWS}; "
                "gather those rows before the logits product"
            )
        return ref.buffer

    def error(self, node: ir.Node, what: str) -> BuildError:
        kind = f"{node.domain}::{node.op_type}" if node.domain else node.op_type
        return BuildError(f"node {node.name!r} ({kind}): {what}")

    # ------------------------------------------------------------------ values

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
        self.ops.append(BufferOp(code, name or "", tuple(ins), out, tuple(tensors), tuple(i), tuple(f)))

    def new(self, rows: SlotRows, width: int) -> Storage:
        return Storage(Ref(Buffer(rows, width)), width)

    def bind(self, value: ir.Value, what: Activation | Pending) -> None:
        """Say where a value is; its uses keep the columns."""
        what.storage.pending += len(value.uses())
        self.known[value] = what

    def bind_rows(self, value: ir.Value, storage: Storage, dims: Dims | None = None) -> None:
        self.bind(value, Activation(storage, dims or (ROWS_AXIS, storage.width)))

    def activation(self, node: ir.Node, index: int) -> Activation:
        """Return input `index` of a node as it lies in memory, the wanted rows only for nodes behind the last layer."""
        value = node.inputs[index]
        found = None if value is None else self.known.get(value)
        if value is None or not isinstance(found, Activation):
            kind = "a constant" if value in self.static else "half of an activation or soft cap"
            raise self.error(node, f"input {index} is {kind}; the cpu target wants an activation there")
        late = node in self.late or self.is_logits_gather(node)
        if late and found.storage.rows is SlotRows.TOKENS:
            return Activation(self.gather_rows(value, found), found.dims)
        return found

    def gather_rows(self, value: ir.Value, found: Activation) -> Storage:
        """Return the rows of a value whose logits are wanted, gathered once."""
        if value not in self.gathered:
            storage = self.new(SlotRows.LOGITS, found.storage.width)
            self.emit(
                OpCode.GATHER_ROWS, f"{value.name}/rows", [found.ref], storage.ref, i=[found.storage.width]
            )
            storage.pending = sum(
                use.node in self.late or self.is_logits_gather(use.node) for use in value.uses()
            )
            self.gathered[value] = storage
        return self.gathered[value]

    def in_place(self, storage: Storage) -> bool:
        """Return whether the node at hand is the last to need these columns."""
        return storage.pending == 1

    def is_logits_gather(self, node: ir.Node) -> bool:
        return (
            node.op_type == "Gather"
            and node.inputs[1] is not None
            and self.inputs.get(node.inputs[1]) == contract.LOGITS_ROWS
        )

    def input_name(self, value: ir.Value | None) -> str | None:
        """Return the graph input that a value is, behind Casts and axes of size 1."""
        while value is not None and value not in self.inputs:
            node = value.producer()
            if node is None or node.op_type not in ("Cast", "Unsqueeze", "Identity"):
                return None
            value = node.inputs[0]
        return None if value is None else self.inputs[value]

    def scalar_input(self, node: ir.Node) -> tuple[int, float] | None:
        """Return (index of the other input, value) when one of two inputs is a scalar constant."""
        for index in (1, 0):
            array = small_constant(node.inputs[index]) if node.inputs[index] in self.static else None
            if array is not None and array.size == 1:
                return 1 - index, float(array.reshape(-1)[0])
        return None

    # ------------------------------------------------------------------ names for the same memory

    def alias(self, node: ir.Node, dims: Dims | None, what: str = "") -> None:
        source = node.inputs[0]
        assert source is not None
        if dims is None:
            raise self.error(
                node, what or "it moves values between rows; the cpu target keeps a token in its row"
            )
        self.bind(node.outputs[0], dataclasses.replace(self.known[source], dims=dims))

    def source_dims(self, node: ir.Node) -> Dims | None:
        """Return the dims of input 0, None for what is not an activation (then the node needs nothing)."""
        source = node.inputs[0]
        if source in self.known:
            return self.known[source].dims
        if self.input_name(source) is not None:
            return None
        raise self.error(node, "its input is not an activation")

    def reshape(self, node: ir.Node) -> None:
        dims, target = self.source_dims(node), small_constant(node.inputs[1])
        if dims is not None:
            self.alias(node, None if target is None else dims_of.reshape(dims, [int(t) for t in target]))

    def transpose(self, node: ir.Node) -> None:
        dims = self.source_dims(node)
        if dims is not None:
            perm = node.attributes.get("perm")
            order = list(perm.as_ints()) if perm is not None else list(range(len(dims)))[::-1]
            self.alias(node, dims_of.transpose(dims, order))

    def unsqueeze(self, node: ir.Node) -> None:
        dims, axes = self.source_dims(node), small_constant(node.inputs[1])
        if dims is not None and axes is not None:
            self.alias(node, dims_of.unsqueeze(dims, [int(a) for a in axes]))

    def squeeze(self, node: ir.Node) -> None:
        dims = self.source_dims(node)
        axes = small_constant(node.inputs[1]) if len(node.inputs) > 1 else None
        if dims is not None:
            ones = [n for n, d in enumerate(dims) if d == 1] if axes is None else [int(a) for a in axes]
            self.alias(node, dims_of.squeeze(dims, ones))

    def cast(self, node: ir.Node) -> None:
        dims = self.source_dims(node)
        if dims is not None:
            if node.attributes["to"].as_int() != ir.DataType.FLOAT:
                raise self.error(
                    node, "the cpu target computes in float32; build its graph with compute float32"
                )
            self.identity(node)

    def identity(self, node: ir.Node) -> None:
        if node in self.late:
            value = self.activation(node, 0)
            self.bind(node.outputs[0], value)
        else:
            self.alias(node, self.source_dims(node))

    # ------------------------------------------------------------------ ops

    def gather(self, node: ir.Node) -> None:
        if self.is_logits_gather(node):
            found = self.activation(node, 0)
            if _int(node, "axis", 0) % len(found.dims) != found.dims.index(ROWS_AXIS):
                raise self.error(node, "logits rows are gathered along another axis than the tokens'")
            self.bind(node.outputs[0], found)
            return
        table, ids = node.inputs[0], node.inputs[1]
        if table not in self.static or self.input_name(ids) != contract.INPUT_IDS or _int(node, "axis", 0):
            raise self.error(
                node,
                f"the cpu target gathers rows of the embedding by {contract.INPUT_IDS}, and rows of activations "
                f"by {contract.LOGITS_ROWS}",
            )
        assert table is not None
        weight = resolve_weight(table, matmul=False)
        out, scale = self.follow_scale(node.outputs[0])
        storage = self.new(SlotRows.TOKENS, weight.cols)
        tensor = self.pool.matrix([weight], self.group_size(weight))
        self.emit(OpCode.EMBED, node.name, [], storage.ref, tensors=[tensor, -1], f=[scale])
        self.bind_rows(out, storage)

    def follow_scale(self, value: ir.Value) -> tuple[ir.Value, float]:
        """Return the value behind Casts and a Mul by a constant that are its only uses, and the constant."""
        scale = 1.0
        while (node := _only_user(value)) is not None:
            if node.op_type == "Cast" and node.attributes["to"].as_int() == ir.DataType.FLOAT:
                pass
            elif node.op_type == "Mul" and scale == 1.0 and (found := self.scalar_input(node)) is not None:
                scale = found[1]
            else:
                break
            self.fused.add(node)
            value = node.outputs[0]
        return value, scale

    def rms_norm(self, node: ir.Node) -> None:
        source = self.activation(node, 0)
        axis, width = _int(node, "axis", -1), source.last_dim
        if axis not in (-1, len(source.dims) - 1) or width == ROWS_AXIS or node.inputs[1] not in self.static:
            raise self.error(node, "the cpu target norms the last axis by a weight known at build")
        assert node.inputs[1] is not None
        tensor = self.pool.vector(node.inputs[1], 1, width)
        total = source.storage.width
        out = source.storage if self.in_place(source.storage) else self.new(source.storage.rows, total)
        epsilon = node.attributes["epsilon"].as_float() if "epsilon" in node.attributes else 1e-5
        self.emit(
            OpCode.RMS_NORM,
            node.name,
            [source.ref],
            out.ref,
            tensors=[tensor, -1],
            i=[total // width, width],
            f=[epsilon],
        )
        self.bind(node.outputs[0], Activation(out, source.dims))

    def matmul(self, node: ir.Node) -> None:
        source = self.activation(node, 0)
        group = self.sharing(node)
        weights = [resolve_weight(_second(n), matmul=True) for n in group]
        if weights[0].cols != source.storage.width or source.last_dim != weights[0].cols:
            raise self.error(node, f"{source.last_dim} columns meet a weight of {weights[0].cols} inputs")
        results = [self.follow_bias(n, w.rows) for n, w in zip(group, weights, strict=True)]
        width = sum(w.rows for w in weights)
        out = self.new(source.storage.rows, width)
        accumulate = None
        if len(group) == 1:
            accumulate = self.follow_residual(node, results[0][0], width)
        if accumulate is not None:
            out = accumulate[1]
        group_size = self.group_size(weights[0])
        tensor = self.pool.matrix(weights, group_size, packed=True)
        biases = [bias for _, bias in results]
        bias = self.pool.bias(biases, [w.rows for w in weights]) if any(biases) else -1
        grouped = self.options.activation_groups and group_size > 0
        self.emit(
            OpCode.LINEAR,
            joined_names([_unit(n.name) for n in group]),
            [source.ref],
            out.ref,
            tensors=[tensor, bias],
            i=[int(accumulate is not None), int(grouped)],
        )
        self.fused.update(group)
        if accumulate is not None:
            self.bind(accumulate[0], Activation(out, (*source.dims[:-1], width)))
            return
        col = 0
        for (value, _), weight in zip(results, weights, strict=True):
            storage = Storage(Ref(out.ref.buffer, col), weight.rows)
            self.bind(value, Activation(storage, (*source.dims[:-1], weight.rows)))
            col += weight.rows

    def sharing(self, node: ir.Node) -> list[ir.Node]:
        """Return the products of the same rows by weights of the same kind, this node's first."""
        first = resolve_weight(_second(node), matmul=True)
        source = node.inputs[0]
        assert source is not None
        group = []
        for other in self.nodes_in_order(use.node for use in source.uses()):
            if (
                other.op_type == "MatMul"
                and other.inputs[0] is source
                and other.inputs[1] in self.static
                and other not in self.fused
                and (other in self.late) == (node in self.late)
            ):
                weight = resolve_weight(_second(other), matmul=True)
                if (weight.dtype, weight.group_size, weight.cols) == (
                    first.dtype,
                    first.group_size,
                    first.cols,
                ):
                    group.append(other)
        return group

    def nodes_in_order(self, nodes: Iterable[ir.Node]) -> list[ir.Node]:
        wanted = set(nodes)
        if len(wanted) == 1:
            return list(wanted)
        return sorted(wanted, key=self.position.__getitem__)

    def group_size(self, weight: Weight) -> int:
        """Return the tensor's group size: the weight's, or one for the activations' sake."""
        if weight.dtype is DType.I8 and not weight.group_size and self.options.activation_groups:
            return int4_group_size(weight.cols)
        return weight.group_size

    def follow_bias(self, node: ir.Node, rows: int) -> tuple[ir.Value, ir.Value | None]:
        """Return a product's result and bias, the Add of a constant vector that is its only use taken in."""
        value = node.outputs[0]
        user = _only_user(value)
        if user is not None and user.op_type == "Add":
            bias = user.inputs[1] if user.inputs[0] is value else user.inputs[0]
            if bias is not None and bias in self.static and bias.shape is not None:
                if bias.shape.numpy() not in ((rows,), (1, rows)):
                    raise self.error(user, f"a bias of shape {bias.shape.numpy()} on {rows} columns")
                self.fused.add(user)
                return user.outputs[0], bias
        return value, None

    def follow_residual(self, node: ir.Node, value: ir.Value, width: int) -> tuple[ir.Value, Storage] | None:
        """Return (sum, columns to add to) when a product's only use is an Add to columns no one else needs."""
        user = _only_user(value)
        if user is None or user.op_type != "Add" or (user in self.late) != (node in self.late):
            return None
        index = 1 if user.inputs[0] is value else 0
        other = user.inputs[index]
        if other is None or not isinstance(self.known.get(other), Activation):
            return None
        target = self.activation(user, index).storage
        if target.width != width or not self.in_place(target):
            return None
        self.fused.add(user)
        return user.outputs[0], target

    def add(self, node: ir.Node) -> None:
        left, right = self.activation(node, 0), self.activation(node, 1)
        width = left.storage.width
        if width != right.storage.width:
            raise self.error(
                node, f"{width} columns plus {right.storage.width}; the cpu target adds equal shapes"
            )
        out = next((a.storage for a in (left, right) if self.in_place(a.storage)), None)
        if out is None:
            out = self.new(left.storage.rows, width)
        self.emit(OpCode.ADD, node.name, [left.ref, right.ref], out.ref, i=[width])
        self.bind(node.outputs[0], Activation(out, left.dims))

    def mul(self, node: ir.Node) -> None:
        scalar = self.scalar_input(node)
        if scalar is not None:
            self.scale(node, *scalar)
            return
        left, right = (self.known.get(v) if v is not None else None for v in node.inputs[:2])
        for gate, other, index in ((left, right, 1), (right, left, 0)):
            if isinstance(gate, Pending) and gate.kind == "sigmoid" and isinstance(other, Activation):
                other = self.activation(node, index)
                if other.storage is gate.storage:
                    self.bind(node.outputs[0], Pending("act", gate.storage, gate.dims, GLU_SILU))
                    return
            if isinstance(gate, Pending) and gate.kind == "act" and isinstance(other, Activation):
                self.glu(node, gate, self.activation(node, index))
                return
        raise self.error(
            node, "the cpu target multiplies by scalars, and SiLU or GELU of one half by the other"
        )

    def glu(self, node: ir.Node, gate: Pending, up: Activation) -> None:
        width = gate.storage.width
        if width != up.storage.width:
            raise self.error(node, f"{width} columns of a gate meet {up.storage.width}")
        out = self.new(gate.storage.rows, width)
        self.emit(OpCode.GLU, node.name, [gate.storage.ref, up.ref], out.ref, i=[width, int(gate.argument)])
        self.bind(node.outputs[0], Activation(out, up.dims))

    def div(self, node: ir.Node) -> None:
        scalar = self.scalar_input(node)
        if scalar is None or scalar[0] != 0 or scalar[1] == 0:
            raise self.error(node, "the cpu target divides by constants other than 0")
        self.scale(node, 0, 1.0 / scalar[1])

    def scale(self, node: ir.Node, index: int, factor: float) -> None:
        """Multiply by a constant, or remember it when it is part of a soft cap."""
        value = node.inputs[index]
        found = self.known.get(value) if value is not None else None
        out = node.outputs[0]
        if isinstance(found, Pending) and found.kind == "capped":
            if abs(found.argument - factor) > 1e-6 * abs(factor):
                raise self.error(
                    node, f"tanh(x / {found.argument}) * {factor}; the cpu target caps by one constant"
                )
            self.bind(out, Activation(found.storage, found.dims))
            return
        source = self.activation(node, index)
        user = _only_user(out)
        if user is not None and user.op_type == "Tanh":
            self.bind(out, Pending("scaled", source.storage, source.dims, factor))
            return
        if not self.in_place(source.storage):
            raise self.error(node, "the cpu target scales in place, but its input is used again")
        self.emit(OpCode.SCALE, node.name, [], source.ref, i=[source.storage.width], f=[factor])
        self.bind(out, source)

    def tanh(self, node: ir.Node) -> None:
        found = self.known.get(node.inputs[0]) if node.inputs[0] is not None else None
        if not isinstance(found, Pending) or found.kind != "scaled" or not self.in_place(found.storage):
            raise self.error(node, "the cpu target takes Tanh as a soft cap: tanh(x / c) * c")
        cap = 1.0 / found.argument
        self.emit(OpCode.SOFTCAP, node.name, [], found.storage.ref, i=[found.storage.width], f=[cap])
        self.bind(node.outputs[0], Pending("capped", found.storage, found.dims, cap))

    def sigmoid(self, node: ir.Node) -> None:
        self.half(node, "sigmoid", 0)

    def swish(self, node: ir.Node) -> None:
        if "alpha" in node.attributes and node.attributes["alpha"].as_float() != 1.0:
            raise self.error(node, "the cpu target takes Swish with alpha 1")
        self.half(node, "act", GLU_SILU)

    def gelu(self, node: ir.Node) -> None:
        tanh = "approximate" in node.attributes and node.attributes["approximate"].as_string() == "tanh"
        self.half(node, "act", GLU_GELU_TANH if tanh else GLU_GELU_ERF)

    def half(self, node: ir.Node, kind: str, argument: int) -> None:
        """Remember an activation until the product that it is part of."""
        source = self.activation(node, 0)
        self.bind(node.outputs[0], Pending(kind, source.storage, source.dims, argument))

    def rope(self, node: ir.Node) -> None:
        source = self.activation(node, 0)
        heads = _int(node, "num_heads", 0) or (source.dims[1] if len(source.dims) == 4 else 0)
        if not heads or source.storage.width % heads or _int(node, "interleaved", 0):
            raise self.error(node, "the cpu target rotates halves of num_heads heads")
        if self.input_name(node.inputs[3] if len(node.inputs) > 3 else None) != contract.POSITION_IDS:
            raise self.error(node, f"the cpu target rotates by {contract.POSITION_IDS}")
        if not self.in_place(source.storage):
            raise self.error(node, "the cpu target rotates in place, but its input is used again")
        width = source.storage.width // heads
        rotated = _int(node, "rotary_embedding_dim", 0) or width
        tables = [self.rope_table(node, index, rotated // 2) for index in (1, 2)]
        self.emit(OpCode.ROPE, node.name, [], source.ref, tensors=tables, i=[heads, width, rotated])
        self.bind(node.outputs[0], source)

    def rope_table(self, node: ir.Node, index: int, cols: int) -> int:
        table = node.inputs[index]
        if table is None or table not in self.static or table.shape is None:
            raise self.error(node, "the cpu target wants cosines and sines known at build")
        shape = table.shape.numpy()
        if len(shape) != 2 or shape[1] != cols:
            raise self.error(node, f"a table of shape {list(shape)}, [positions, {cols}] is wanted")
        return self.pool.vector(table, int(shape[0]), cols)

    def paged_attention(self, node: ir.Node) -> None:
        q, k, v = (self.activation(node, n) for n in range(3))
        heads, kv_heads = _int(node, "num_heads", 0), _int(node, "kv_num_heads", 0)
        width = _int(node, "head_dim", 0)
        got = (q.storage.width, k.storage.width, v.storage.width)
        if got != (heads * width, kv_heads * width, kv_heads * width):
            raise self.error(
                node, f"q, k and v have {got} columns for {heads} and {kv_heads} heads of {width}"
            )
        out = self.new(SlotRows.TOKENS, heads * width)
        self.emit(
            OpCode.PAGED_ATTENTION,
            node.name,
            [q.ref, k.ref, v.ref],
            out.ref,
            i=[heads, kv_heads, width, self.layer_of(node), _int(node, "window", 0)],
            f=[node.attributes["scale"].as_float(), _float(node, "softcap", 0.0)],
        )
        self.bind_rows(node.outputs[0], out)

    def layer_of(self, node: ir.Node) -> int:
        """Return the layer whose pools a PagedAttention node reads; the step's other inputs are checked too."""
        pools = [self.inputs.get(v) if v is not None else None for v in node.inputs[3:5]]
        rest = [self.inputs.get(v) if v is not None else None for v in node.inputs[5:8]]
        wanted = [contract.CU_QUERY_LENS, contract.KV_LENS, contract.BLOCK_TABLE]
        layer = (pools[0] or "").rpartition(".")[2]
        if not layer.isdigit() or pools != [contract.k_pool(int(layer)), contract.v_pool(int(layer))]:
            raise self.error(node, f"its pools are {pools}; k_pool.N and v_pool.N of one layer are wanted")
        if rest != wanted:
            raise self.error(node, f"inputs 5 to 7 are {rest}, wanted {wanted}")
        return int(layer)


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
        if node.op_type not in _ROW_WISE or any(out.is_graph_output() for out in node.outputs):
            continue
        users = [use.node for out in node.outputs for use in out.uses()]
        if users and all(user in late or is_gather(user) for user in users):
            late.add(node)
    return late


def _only_user(value: ir.Value) -> ir.Node | None:
    uses = list(value.uses())
    return uses[0].node if len(uses) == 1 and not value.is_graph_output() else None


def _second(node: ir.Node) -> ir.Value:
    value = node.inputs[1]
    if value is None:
        raise BuildError(f"node {node.name!r}: MatMul without a weight")
    return value


def _int(node: ir.Node, name: str, default: int) -> int:
    attribute = node.attributes.get(name)
    return default if attribute is None else attribute.as_int()


def _float(node: ir.Node, name: str, default: float) -> float:
    attribute = node.attributes.get(name)
    return default if attribute is None else attribute.as_float()


def _unit(name: str | None) -> str:
    """Return "layers.0.q" of "layers.0.q/matmul"."""
    return (name or "").partition("/")[0]
