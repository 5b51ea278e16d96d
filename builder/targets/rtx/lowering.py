"""The graph of builder/graph as TensorRT-RTX takes it: rectangular steps, pages gathered, pools updated in place.

TensorRT-RTX has no packed attention and no plugins, so plansmith::PagedAttention becomes, a layer::

    k [T, KVH*D] -> Reshape [T, KVH, D] -> Gather kv_token_order [U, KVH, D]
      -> TRT_KVCacheUpdate(pool as a cache whose batch is its blocks) = k_pool_out
      -> Gather block_table [B, MB, KVH, BS, D] -> Transpose, Reshape [B, KVH, MB*BS, D] -> zeros past kv_lens
    q [T, H*D] -> Mul scale -> Reshape, Transpose [B, H, S, D]
    TRT_Attention(q, k, v, mask, kv_lens) -> Transpose, Reshape [T, H*D]

TRT_Attention has no soft cap; with one, the attention is MatMul, Div, Tanh, Mul, Softmax, MatMul. What becomes of
quantized weights and rounded inputs is in products.py.

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

from ....runtime.errors import InvalidArgumentError, UnsupportedError
from ...graph import contract as graph_contract
from . import contract
from .pen import Pen
from .products import lower_products
from .step_values import StepValues
from .stored import store_as_compute_type

Causal = Literal["mask", "lower_right"]

_I32, _F32 = ir.DataType.INT32, ir.DataType.FLOAT
_COMPUTE_NAMES = {_F32: "float32", ir.DataType.FLOAT16: "float16", ir.DataType.BFLOAT16: "bfloat16"}


def lower(model: ir.Model, *, causal: Causal = "mask") -> ir.Model:
    """Return a copy of the graph with the inputs of contract.py and ops that TensorRT-RTX compiles.

    The weights stay lazy and shared with `model`, which is not changed.
    causal : how layers without a window and a soft cap mask; "lower_right" leaves it to TRT_Attention
    raises : InvalidArgumentError if it is no graph of build_graph, UnsupportedError for one with quantized KV pools
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
        ir.DataType.UINT4: "int4",
        ir.DataType.FLOAT8E4M3FN: "fp8",
        ir.DataType.FLOAT4E2M1: "fp4",
    }
    # Norm weights are float32 in every graph, and every target takes float32: it is no reason to refuse. Other float
    # weights get the compute type (stored.py).
    held = {v.dtype for v in model.graph.initializers.values()} - {ir.DataType.FLOAT16, ir.DataType.BFLOAT16}
    used = held | {_compute_type(model)}
    rounds = (
        n.attributes.get_string("format", "") for n in model.graph if n.op_type == graph_contract.ROUND_INPUT
    )
    return frozenset(names[t] for t in used if t in names) | frozenset(rounds)


def _compute_type(model: ir.Model) -> ir.DataType:
    pool = next((v for v in model.graph.inputs if v.name == graph_contract.k_pool(0)), None)
    if pool is not None and pool.dtype in (ir.DataType.FLOAT8E4M3FN, ir.DataType.INT8):
        raise UnsupportedError(
            f"the KV pools of this graph are {pool.dtype.name}, TensorRT-RTX writes pools of floats alone; "
            "quantize the checkpoint with --kv-cache none"
        )
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
    scale: float
    softcap: float
    window: int


class _Lowering(Pen):
    """Rewrites one graph in place."""

    def __init__(self, graph: ir.Graph, compute: ir.DataType, causal: Causal) -> None:
        super().__init__(graph, compute)
        self.causal = causal
        self.inputs = {str(v.name): v for v in graph.inputs}
        self.kv_lens = self.inputs[graph_contract.KV_LENS]
        self.block_table = self.inputs[graph_contract.BLOCK_TABLE]
        self.order = _input(contract.KV_TOKEN_ORDER, _I32, ("U",))
        self.lengths = _input(contract.KV_UPDATE_LENGTHS, _I32, ("NB1",))
        self.starts = _input(contract.KV_WRITE_STARTS, _I32, ("NB",))
        pool = self.inputs[graph_contract.k_pool(0)]
        assert pool.shape is not None
        ids = self.inputs[graph_contract.INPUT_IDS]
        self.step = StepValues(self, ids, self.kv_lens, self.block_table, int(pool.shape[2]))  # type: ignore[arg-type]

    def run(self) -> None:
        """Change the inputs, then every PagedAttention."""
        attentions = [n for n in self.graph if n.op_type == graph_contract.PAGED_ATTENTION]
        for name in (graph_contract.INPUT_IDS, graph_contract.POSITION_IDS):
            self._make_rectangular(self.inputs[name])
        for node in attentions:
            self.anchor = node
            self._lower_attention(node)
        for node in attentions:
            self.graph.remove(node, safe=True)
        self._set_inputs()
        lower_products(self)
        store_as_compute_type(self)
        self.order_initializers()

    def _set_inputs(self) -> None:
        c, inputs = graph_contract, self.inputs
        first = [inputs[c.INPUT_IDS], inputs[c.POSITION_IDS], self.kv_lens, self.block_table]
        first += [inputs[c.LOGITS_ROWS], self.order, self.lengths, self.starts]
        pools = [v for v in self.graph.inputs if c.is_pool(str(v.name))]
        self.graph.inputs.clear()
        self.graph.inputs.extend(first + pools)
        for tensor, dims in ((self.kv_lens, ["B"]), (self.block_table, ["B", "MB"]), (first[4], ["R"])):
            tensor.shape = ir.Shape(dims)
        for pool in pools:
            assert pool.shape is not None
            pool.shape = ir.Shape(["NB", *list(pool.shape)[1:]])

    def _make_rectangular(self, tensor: ir.Value) -> None:
        """Give an input [T] the shape [B, S]; what read it reads it flattened."""
        users = list(tensor.uses())
        tensor.shape = ir.Shape(["B", "S"])
        flat = self.node("Reshape", [tensor, self.ints([-1])], f"{tensor.name}/flat", _I32)
        for use in users:
            use.node.replace_input_with(use.idx, flat)

    def _lower_attention(self, node: ir.Node) -> None:
        q, k, v, k_pool, v_pool = node.inputs[:5]
        assert q is not None and k is not None and v is not None and k_pool is not None and v_pool is not None
        layer = _read_layer(node)
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
            self.replace(old, new)

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
        held = self.step.held()
        return self.node("Where", [held, whole, self.zero()], f"{name}_held", self.compute), updated

    def _query(self, layer: _Layer, q: ir.Value) -> ir.Value:
        """Scaled q as [B, H, S, D]."""
        name, d = layer.name, layer.head_dim
        scale = self.const(f"scale.{layer.scale}", np.array(layer.scale, self.compute.numpy()))
        q = self.node("Mul", [q, scale], f"{name}/q_scaled", self.compute)
        shape = self.step.by_row(layer.heads, d)
        q = self.node("Reshape", [q, shape], f"{name}/q_split", self.compute)
        return self.node("Transpose", [q], f"{name}/q_by_head", self.compute, perm=[0, 2, 1, 3])

    def _attention(self, layer: _Layer, q: ir.Value, k: ir.Value, v: ir.Value) -> ir.Value:
        own = self.causal == "lower_right" and layer.window == 0
        mask = None if own else self.step.mask(layer.window)
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
        by_head = self.step.scores_by_head(layer.heads)
        s = self.node("Reshape", [s, by_head], f"{name}/scores_by_head", _F32)
        s = self.node("Where", [self.step.mask(layer.window), s, lowest], f"{name}/masked", _F32)
        p = self.node("Softmax", [s], f"{name}/softmax", _F32, axis=-1)
        p = self.node("Cast", [p], f"{name}/weights", self.compute, to=int(self.compute))
        p = self.node("Reshape", [p, self.step.scores_grouped(kvh)], f"{name}/weights_grouped", self.compute)
        out = self.node("MatMul", [p, v], f"{name}/capped_out", self.compute)
        return self.node("Reshape", [out, self.step.by_head(layer.heads, d)], f"{name}/heads", self.compute)


def _input(name: str, dtype: ir.DataType, dims: Sequence[str]) -> ir.Value:
    return ir.Value(name=name, shape=ir.Shape(dims), type=ir.TensorType(dtype))


def _read_layer(node: ir.Node) -> _Layer:
    a = node.attributes
    return _Layer(
        name=str(node.name),
        heads=a["num_heads"].as_int(),
        kv_heads=a["kv_num_heads"].as_int(),
        head_dim=a["head_dim"].as_int(),
        scale=a["scale"].as_float(),
        softcap=a["softcap"].as_float(),
        window=a["window"].as_int(),
    )
