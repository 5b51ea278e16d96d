"""The graph of builder/graph as TensorRT-RTX takes it: rectangular steps, pages gathered, pools updated in place.

TensorRT-RTX has no packed attention and no plugins, so plansmith::PagedAttention becomes, a layer::

    k [T, KVH*D] -> Reshape [T, KVH, D] -> Gather kv_token_order [U, KVH, D]
      -> TRT_KVCacheUpdate(pool as a cache whose batch is its blocks) = k_pool_out
      -> Gather block_table [B, MB, KVH, BS, D] -> Transpose, Reshape [B, KVH, MB*BS, D] -> zeros past kv_lens
    q [T, H*D] -> Mul scale -> Reshape, Transpose [B, H, S, D]
    TRT_Attention(q, k, v, mask, kv_lens) -> Transpose, Reshape [T, H*D]

TRT_Attention has no soft cap; with one, the attention is MatMul, Div, Tanh, Mul, Softmax, MatMul.

The causal mask is an explicit boolean one by default. TRT_Attention's own `lower_right` is anchored at
"s_kv - s_q", and its documents do not say whether s_kv is then the padded length or kv_lengths; with S = 1 the two
agree, in a prefill chunk the wrong one attends to the future. The mask means the same under either reading.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Literal

import numpy as np
import onnx_ir as ir

from ....runtime.errors import InvalidArgumentError
from ...graph import contract as graph_contract
from . import contract

Causal = Literal["mask", "lower_right"]
_Attr = str | int | float | Sequence[int]

_I32, _I64, _BOOL, _F32 = ir.DataType.INT32, ir.DataType.INT64, ir.DataType.BOOL, ir.DataType.FLOAT
_COMPUTE_NAMES = {_F32: "float32", ir.DataType.FLOAT16: "float16", ir.DataType.BFLOAT16: "bfloat16"}


def lower(model: ir.Model, *, causal: Causal = "mask") -> ir.Model:
    """Return a copy of the graph with the inputs of contract.py and ops that TensorRT-RTX compiles.

    The weights stay lazy and shared with `model`, which is not changed.
    causal : how layers without a window and a soft cap mask; "lower_right" leaves it to TRT_Attention
    raises : InvalidArgumentError if it is no graph of build_graph
    """
    compute = _compute_type(model)
    lowered = model.clone()
    lowering = _Lowering(lowered.graph, compute, causal)
    lowering.run()
    lowered.graph.opset_imports.pop(graph_contract.OP_DOMAIN, None)
    lowered.graph.opset_imports[contract.DOMAIN] = 1
    return lowered


def compute_type_of(model: ir.Model) -> str:
    """Return the pools' and activations' type of a graph: "float32", "float16" or "bfloat16"."""
    return _COMPUTE_NAMES[_compute_type(model)]


def types_of(model: ir.Model) -> frozenset[str]:
    """Return the data types a plan of this graph holds, in the words of targets.py."""
    names = {
        _F32: "fp32",
        ir.DataType.FLOAT16: "fp16",
        ir.DataType.BFLOAT16: "bf16",
        ir.DataType.INT8: "int8",
        ir.DataType.INT4: "int4",
        ir.DataType.FLOAT8E4M3FN: "fp8",
        ir.DataType.FLOAT4E2M1: "fp4",
    }
    # Norm weights are float32 in every graph, and every target takes float32: it is no reason to refuse.
    used = {v.dtype for v in model.graph.initializers.values()} | {_compute_type(model)}
    return frozenset(names[t] for t in used if t in names)


def _compute_type(model: ir.Model) -> ir.DataType:
    pool = next((v for v in model.graph.inputs if v.name == graph_contract.k_pool(0)), None)
    if pool is None or pool.dtype not in _COMPUTE_NAMES:
        raise InvalidArgumentError(
            f"the graph has no input {graph_contract.k_pool(0)} of a floating type; give a graph of build_graph"
        )
    return pool.dtype


@dataclasses.dataclass(frozen=True)
class _Layer:
    """The attributes of one PagedAttention."""

    name: str
    heads: int
    kv_heads: int
    head_dim: int
    block_size: int
    scale: float
    softcap: float
    window: int


class _Lowering:
    """Rewrites one graph in place."""

    def __init__(self, graph: ir.Graph, compute: ir.DataType, causal: Causal) -> None:
        self.graph = graph
        self.compute = compute
        self.causal = causal
        self.made: dict[str, ir.Value] = {}
        self.anchor: ir.Node | None = None  # new nodes go before it

    def run(self) -> None:
        """Change the inputs, then every PagedAttention."""
        inputs = {str(v.name): v for v in self.graph.inputs}
        self.kv_lens = inputs[graph_contract.KV_LENS]
        self.block_table = inputs[graph_contract.BLOCK_TABLE]
        self.order = _input(contract.KV_TOKEN_ORDER, _I32, ("U",))
        self.lengths = _input(contract.KV_UPDATE_LENGTHS, _I32, ("NB1",))
        self.starts = _input(contract.KV_WRITE_STARTS, _I32, ("NB",))
        attentions = [n for n in self.graph if n.op_type == graph_contract.PAGED_ATTENTION]
        self.anchor = next(iter(self.graph))
        self.ids = self._make_rectangular(inputs[graph_contract.INPUT_IDS])
        self._make_rectangular(inputs[graph_contract.POSITION_IDS])
        for node in attentions:
            self.anchor = node
            self._lower_attention(node)
        for node in attentions:
            self.graph.remove(node, safe=True)
        self._set_inputs(inputs)

    def _set_inputs(self, inputs: dict[str, ir.Value]) -> None:
        c = graph_contract
        first = [inputs[c.INPUT_IDS], inputs[c.POSITION_IDS], self.kv_lens, self.block_table]
        first += [inputs[c.LOGITS_ROWS], self.order, self.lengths, self.starts]
        pools = [v for v in self.graph.inputs if "_pool." in str(v.name)]
        self.graph.inputs.clear()
        self.graph.inputs.extend(first + pools)
        for tensor, dims in ((self.kv_lens, ["B"]), (self.block_table, ["B", "MB"]), (first[4], ["R"])):
            tensor.shape = ir.Shape(dims)
        for pool in pools:
            assert pool.shape is not None
            pool.shape = ir.Shape(["NB", *list(pool.shape)[1:]])

    def _make_rectangular(self, tensor: ir.Value) -> ir.Value:
        """Give an input [T] the shape [B, S]; what read it reads it flattened. Returns the input."""
        users = list(tensor.uses())
        tensor.shape = ir.Shape(["B", "S"])
        flat = self.node("Reshape", [tensor, self.ints([-1])], f"{tensor.name}/flat", _I32)
        for use in users:
            use.node.replace_input_with(use.idx, flat)
        return tensor

    def _lower_attention(self, node: ir.Node) -> None:
        q, k, v, k_pool, v_pool = node.inputs[:5]
        assert q is not None and k is not None and v is not None and k_pool is not None and v_pool is not None
        layer = _read_layer(node, k_pool)
        k_all, k_out = self._update_and_read(layer, k, k_pool, f"{layer.name}/k")
        v_all, v_out = self._update_and_read(layer, v, v_pool, f"{layer.name}/v")
        query = self._query(layer, q)
        if layer.softcap:
            out = self._capped_attention(layer, query, k_all, v_all)
        else:
            out = self._attention(layer, query, k_all, v_all)
        name = layer.name
        out = self.node("Transpose", [out], f"{name}/rows", self.compute, perm=[0, 2, 1, 3])
        out = self.node(
            "Reshape", [out, self.ints([-1, layer.heads * layer.head_dim])], f"{name}/flat", q.dtype
        )
        for old, new in zip(node.outputs, (out, k_out, v_out), strict=True):
            self._replace(old, new)

    def _replace(self, old: ir.Value, new: ir.Value) -> None:
        """Put `new` in place of `old` under the same name, as graph output too."""
        new.shape, new.type = old.shape, old.type
        name, old.name = old.name, f"{old.name}/replaced"
        new.name = name
        ir.convenience.replace_all_uses_with(old, new, replace_graph_outputs=True)

    def _update_and_read(
        self, layer: _Layer, rows: ir.Value, pool: ir.Value, name: str
    ) -> tuple[ir.Value, ir.Value]:
        """Write the step's rows [T, KVH*D] into the pool; return (all of K or V [B, KVH, MB*BS, D], new pool)."""
        heads, d = layer.kv_heads, layer.head_dim
        split = self.node("Reshape", [rows, self.ints([-1, heads, d])], f"{name}_split", self.compute)
        packed = self.node("Gather", [split, self.order], f"{name}_packed", self.compute, axis=0)
        updated = self.node(
            contract.KV_CACHE_UPDATE,
            [pool, packed, self.starts, self.lengths],
            f"{name}_update",
            self.compute,
            domain=contract.DOMAIN,
            update_form="packed_nhd",
            mode="linear",
            axis=-2,
        )
        pages = self.node("Gather", [updated, self.block_table], f"{name}_pages", self.compute, axis=0)
        pages = self.node("Transpose", [pages], f"{name}_by_head", self.compute, perm=[0, 2, 1, 3, 4])
        whole = self.node("Reshape", [pages, self.ints([0, 0, -1, d])], f"{name}_all", self.compute)
        held = self._held(layer.block_size)
        return self.node("Where", [held, whole, self.zero()], f"{name}_held", self.compute), updated

    def _query(self, layer: _Layer, q: ir.Value) -> ir.Value:
        """Scaled q as [B, H, S, D]."""
        name, d = layer.name, layer.head_dim
        scale = self.const(f"scale.{layer.scale}", np.array(layer.scale, self.compute.numpy()))
        q = self.node("Mul", [q, scale], f"{name}/q_scaled", self.compute)
        shape = self._step_shape(layer.heads, d)
        q = self.node("Reshape", [q, shape], f"{name}/q_split", self.compute)
        return self.node("Transpose", [q], f"{name}/q_by_head", self.compute, perm=[0, 2, 1, 3])

    def _attention(self, layer: _Layer, q: ir.Value, k: ir.Value, v: ir.Value) -> ir.Value:
        own = self.causal == "lower_right" and layer.window == 0
        mask = None if own else self._mask(layer.block_size, layer.window)
        return self.node(
            contract.ATTENTION,
            [q, k, v, mask, None, self.kv_lens],
            f"{layer.name}/attend",
            self.compute,
            domain=contract.DOMAIN,
            query_form="padded_bhnd",
            kv_form="padded_bhnd",
            causal_kind="lower_right" if own else "none",
            TRT_decomposable=1,
        )

    def _capped_attention(self, layer: _Layer, q: ir.Value, k: ir.Value, v: ir.Value) -> ir.Value:
        """softmax(cap * tanh(q k / cap)) v, scores in float32; the heads of a KV head lie side by side as rows."""
        name, kvh, d = layer.name, layer.kv_heads, layer.head_dim
        group = layer.heads // kvh
        f32 = int(_F32)
        cap = self.const(f"softcap.{layer.softcap}", np.array(layer.softcap, np.float32))
        lowest = self.const("score.lowest", np.array(np.finfo(np.float32).min, np.float32))
        grouped = self.node("Reshape", [q, self.ints([0, kvh, -1, d])], f"{name}/q_grouped", self.compute)
        k_t = self.node("Transpose", [k], f"{name}/k_t", self.compute, perm=[0, 1, 3, 2])
        s = self.node("MatMul", [grouped, k_t], f"{name}/scores", self.compute)
        s = self.node("Cast", [s], f"{name}/scores_f32", _F32, to=f32)
        s = self.node("Div", [s, cap], f"{name}/cap_div", _F32)
        s = self.node("Tanh", [s], f"{name}/cap_tanh", _F32)
        s = self.node("Mul", [s, cap], f"{name}/capped", _F32)
        by_head = self._scores_shape(layer, group)
        s = self.node("Reshape", [s, by_head], f"{name}/scores_by_head", _F32)
        s = self.node(
            "Where", [self._mask(layer.block_size, layer.window), s, lowest], f"{name}/masked", _F32
        )
        p = self.node("Softmax", [s], f"{name}/softmax", _F32, axis=-1)
        p = self.node("Cast", [p], f"{name}/weights", self.compute, to=int(self.compute))
        p = self.node("Reshape", [p, self._grouped_shape(layer)], f"{name}/weights_grouped", self.compute)
        out = self.node("MatMul", [p, v], f"{name}/capped_out", self.compute)
        return self.node("Reshape", [out, self._heads_shape(layer)], f"{name}/heads", self.compute)

    # Values that all layers share, made before the first that needs them.

    def _dim(self, name: str, tensor: ir.Value, axis: int) -> ir.Value:
        """One dimension of a tensor as int64 [1]."""
        return self.once(name, "Shape", [tensor], _I64, start=axis, end=axis + 1)

    def _batch(self) -> ir.Value:
        return self._dim("step/B", self.ids, 0)

    def _rows(self) -> ir.Value:
        return self._dim("step/S", self.ids, 1)

    def _context(self, block_size: int) -> ir.Value:
        """MB * BS as int64 [1]."""
        blocks = self._dim("step/MB", self.block_table, 1)
        return self.once("step/context", "Mul", [blocks, self.ints([block_size])], _I64)

    def _shape_of(self, name: str, *parts: ir.Value) -> ir.Value:
        return self.once(name, "Concat", list(parts), _I64, axis=0)

    def _step_shape(self, heads: int, d: int) -> ir.Value:
        return self._shape_of(f"step/q_shape.{heads}", self._batch(), self._rows(), self.ints([heads, d]))

    def _heads_shape(self, layer: _Layer) -> ir.Value:
        parts = (self._batch(), self.ints([layer.heads]), self._rows(), self.ints([layer.head_dim]))
        return self._shape_of(f"step/out_shape.{layer.heads}", *parts)

    def _scores_shape(self, layer: _Layer, group: int) -> ir.Value:
        parts = (
            self._batch(),
            self.ints([layer.kv_heads * group]),
            self._rows(),
            self._context(layer.block_size),
        )
        return self._shape_of(f"step/scores_shape.{layer.heads}", *parts)

    def _grouped_shape(self, layer: _Layer) -> ir.Value:
        parts = (self._batch(), self.ints([layer.kv_heads, -1]), self._context(layer.block_size))
        return self._shape_of(f"step/grouped_shape.{layer.kv_heads}", *parts)

    def _iota(self, name: str, count: ir.Value) -> ir.Value:
        """0, 1, ... count-1 as int32 [count]; count is int64 [1]."""
        limit = self.once(f"{name}/limit", "Cast", [count], _I32, to=int(_I32))
        limit = self.once(f"{name}/scalar", "Squeeze", [limit, self.ints([0])], _I32)
        zero, one = (self.const(f"int32.{n}", np.array(n, np.int32)) for n in (0, 1))
        return self.once(name, "Range", [zero, limit, one], _I32)

    def _held(self, block_size: int) -> ir.Value:
        """Whether a gathered position holds something, bool [B, 1, MB*BS, 1]."""
        key = self._iota("step/key_positions", self._context(block_size))
        lens = self.once("step/kv_lens_column", "Unsqueeze", [self.kv_lens, self.ints([1])], _I32)
        held = self.once("step/held_rows", "Less", [key, lens], _BOOL)
        return self.once("step/held", "Unsqueeze", [held, self.ints([1, 3])], _BOOL)

    def _mask(self, block_size: int, window: int) -> ir.Value:
        """Whether row s of sequence b sees key j, bool [B, 1, S, MB*BS].

        Row s is the token at kv_lens[b] - S + s. For a padding row that may be negative; it then counts as 0, so
        that no row's softmax is over nothing.
        """
        key = self._iota("step/key_positions", self._context(block_size))
        rows = self._iota("step/row_numbers", self._rows())
        count = self.once("step/S_int32", "Cast", [self._rows()], _I32, to=int(_I32))
        first = self.once("step/first_positions", "Sub", [self.kv_lens, count], _I32)
        first = self.once("step/first_column", "Unsqueeze", [first, self.ints([1])], _I32)
        at = self.once("step/row_positions_raw", "Add", [first, rows], _I32)
        at = self.once("step/row_positions", "Max", [at, self.const("int32.0", np.array(0, np.int32))], _I32)
        at = self.once("step/row_positions_4d", "Unsqueeze", [at, self.ints([1, 3])], _I32)
        seen = self.once("step/causal", "LessOrEqual", [key, at], _BOOL)
        if window == 0:
            return seen
        width = self.const(f"window.{window}", np.array(window, np.int32))
        before = self.once(f"step/before_window.{window}", "Sub", [at, width], _I32)
        near = self.once(f"step/in_window.{window}", "Greater", [key, before], _BOOL)
        return self.once(f"step/mask.{window}", "And", [seen, near], _BOOL)

    # The pen.

    def ints(self, numbers: Sequence[int]) -> ir.Value:
        """An int64 vector."""
        return self.const("int64." + "_".join(map(str, numbers)), np.array(numbers, np.int64))

    def zero(self) -> ir.Value:
        """A zero of the compute type."""
        return self.const("zero", np.array(0, self.compute.numpy()))

    def const(self, name: str, array: np.ndarray) -> ir.Value:
        """A small initializer, made once."""
        name = f"rtx/{name}"
        if name not in self.made:
            tensor = ir.Tensor(array, name=name)
            value = ir.Value(name=name, shape=ir.Shape(array.shape), type=ir.TensorType(tensor.dtype))
            value.const_value = tensor
            self.graph.register_initializer(value)
            self.made[name] = value
        return self.made[name]

    def once(
        self, name: str, op_type: str, inputs: Sequence[ir.Value], dtype: ir.DataType, **attrs: _Attr
    ) -> ir.Value:
        """A node that all layers share; the first call makes it."""
        if name not in self.made:
            self.made[name] = self.node(op_type, inputs, name, dtype, domain="", **attrs)
        return self.made[name]

    def node(
        self,
        op_type: str,
        inputs: Sequence[ir.Value | None],
        name: str,
        dtype: ir.DataType | None,
        *,
        domain: str = "",
        **attrs: _Attr,
    ) -> ir.Value:
        """Add a node before the anchor and return its one output, "<name>/out"."""
        out = ir.Value(name=f"{name}/out", type=None if dtype is None else ir.TensorType(dtype))
        node = ir.node(
            op_type, inputs=list(inputs), attributes=attrs, domain=domain, outputs=[out], name=name
        )
        assert self.anchor is not None
        self.graph.insert_before(self.anchor, node)
        return out


def _input(name: str, dtype: ir.DataType, dims: Sequence[str]) -> ir.Value:
    return ir.Value(name=name, shape=ir.Shape(dims), type=ir.TensorType(dtype))


def _read_layer(node: ir.Node, pool: ir.Value) -> _Layer:
    a = node.attributes
    assert pool.shape is not None
    return _Layer(
        name=str(node.name),
        heads=a["num_heads"].as_int(),
        kv_heads=a["kv_num_heads"].as_int(),
        head_dim=a["head_dim"].as_int(),
        block_size=int(pool.shape[2]),  # type: ignore[arg-type]
        scale=a["scale"].as_float(),
        softcap=a["softcap"].as_float(),
        window=a["window"].as_int(),
    )
