"""The graph of builder/graph as TensorRT 11 takes it: packed as it is, attention a chain of plugin nodes in each layer.

What becomes of quantized weights and rounded inputs is the other TensorRT's lowering (../rtx/products.py): both read
ONNX with the same parser and have the same layers, and numbers that depend on neither's fusions are the same on both.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence

import onnx_ir as ir

from ....plugins.paged_attention.spec import Attention, split_len
from ....runtime.errors import InvalidArgumentError, UnsupportedError
from ...graph import contract as graph_contract
from ...limits import Limits
from ...spec import DecoderSpec
from ..rtx.pen import Attr, Pen
from ..rtx.products import lower_products
from ..rtx.stored import store_as_compute_type
from . import contract

_F32 = ir.DataType.FLOAT
_COMPUTE = {"float32": _F32, "float16": ir.DataType.FLOAT16, "bfloat16": ir.DataType.BFLOAT16}
_KV_TYPES = {
    **{kind: name for name, kind in _COMPUTE.items()},
    ir.DataType.FLOAT8E4M3FN: "float8_e4m3fn",
    ir.DataType.INT8: "int8",
}
_TILE_ROWS, _MAX_QUERY_ROWS = 16, 4
SHAPE_ATTRIBUTES = ("num_heads", "kv_num_heads", "head_dim")


def lower(model: ir.Model, limits: Limits) -> ir.Model:
    """Return a copy of the graph with the inputs of contract.py and nodes that TensorRT 11 and our plugins run.

    The weights stay lazy and shared with `model`, which is not changed.
    raises : InvalidArgumentError if it is no graph of build_graph
    """
    compute = _COMPUTE[compute_type_of(model)]
    lowered = model.clone()
    _Lowering(lowered.graph, compute, limits).run()
    lowered.graph.opset_imports[graph_contract.OP_DOMAIN] = 1
    lowered.graph.opset_imports["trt"] = 1
    return lowered


def compute_type_of(model: ir.Model) -> str:
    """Return the type of a graph's activations: "float32", "float16" or "bfloat16"."""
    name = model.metadata_props.get("plansmith.compute", "")
    if name not in _COMPUTE:
        raise InvalidArgumentError(
            "the graph does not say what it computes in (plansmith.compute); give a graph of build_graph"
        )
    return name


def kv_type_of(model: ir.Model) -> str:
    """Return the type of a graph's KV pools, e.g. "float16" or "float8_e4m3fn"."""
    pool = next((v for v in model.graph.inputs if v.name == graph_contract.k_pool(0)), None)
    if pool is None or pool.dtype not in _KV_TYPES:
        raise InvalidArgumentError(
            f"the graph has no input {graph_contract.k_pool(0)} of a type that pools have; give a graph of build_graph"
        )
    return _KV_TYPES[pool.dtype]


class _Lowering(Pen):
    """Rewrites one graph in place."""

    def __init__(self, graph: ir.Graph, compute: ir.DataType, limits: Limits) -> None:
        super().__init__(graph, compute)
        self._limits = limits

    def run(self) -> None:
        """Replace every PagedAttention, then quantized products."""
        attentions = [n for n in self.graph if n.op_type == graph_contract.PAGED_ATTENTION]
        for node in attentions:
            self.anchor = node
            self._lower_attention(node)
        for node in attentions:
            self.graph.remove(node, safe=True)
        self._drop_query_lens()
        lower_products(self)
        store_as_compute_type(self)
        self.order_initializers()

    def _drop_query_lens(self) -> None:
        """Remove the input that nothing reads: the compiler would keep it, to be bound for nothing."""
        inputs = [v for v in self.graph.inputs if v.name != graph_contract.QUERY_LENS]
        self.graph.inputs.clear()
        self.graph.inputs.extend(inputs)

    def _lower_attention(self, node: ir.Node) -> None:
        q, k, v, k_pool, v_pool, cu, kv_lens, table = (_value(x) for x in node.inputs[:8])
        scales = [_value(x) for x in node.inputs[8:]] or [self.number(1.0)] * 2
        step = [cu, kv_lens, table]
        shape: dict[str, Attr] = {name: node.attributes[name].as_int() for name in SHAPE_ATTRIBUTES}
        heads, kv_heads, head_dim = (node.attributes[name].as_int() for name in SHAPE_ATTRIBUTES)
        parts = splitting(heads, kv_heads, head_dim, self._limits)
        splits = {"query_rows": parts.query_rows, "split_len": parts.split_len}
        score: dict[str, Attr] = {
            "scale": node.attributes["scale"].as_float(),
            "softcap": node.attributes["softcap"].as_float(),
            "window": node.attributes["window"].as_int(),
        }
        name, kinds = str(node.name), (k_pool.dtype, v_pool.dtype)
        pools = self._plugin(
            contract.KV_WRITE, [k, v, k_pool, v_pool, *step, *scales], f"{name}/write", kinds, shape
        )
        out, partials, stats = self._plugin(
            contract.DECODE,
            [q, *pools, *step, *scales],
            f"{name}/decode",
            (q.dtype, _F32, _F32),
            {**shape, **score, **splits},
        )
        if parts.has_combine:
            (out,) = self._plugin(
                contract.COMBINE,
                [out, partials, stats, cu, kv_lens, scales[1]],
                f"{name}/combine",
                (q.dtype,),
                {**shape, "window": score["window"], **splits},
            )
        (out,) = self._plugin(
            contract.PREFILL,
            [out, q, *pools, *step, *scales],
            f"{name}/prefill",
            (q.dtype,),
            {**shape, **score, "query_rows": parts.query_rows},
        )
        for old, new in zip(node.outputs, (out, *pools), strict=True):
            self.replace(old, new)

    def _plugin(
        self,
        op_type: str,
        inputs: Sequence[ir.Value],
        name: str,
        dtypes: Sequence[ir.DataType | None],
        attributes: Mapping[str, Attr],
    ) -> list[ir.Value]:
        """Add a plugin's node; the last three attributes are what TensorRT's parser finds the plugin by."""
        return self.nodes(
            op_type,
            inputs,
            name,
            [kind or self.compute for kind in dtypes],
            domain=graph_contract.OP_DOMAIN,
            **attributes,
            plugin_namespace=contract.NAMESPACE,
            plugin_version=contract.VERSION,
            aot=1,
        )


def _value(value: ir.Value | None) -> ir.Value:
    assert value is not None
    return value


@dataclasses.dataclass(frozen=True)
class Splitting:
    """How Decode takes the sequences of an engine, fixed when it is built (it decides bits).

    query_rows : Decode takes the sequences with up to this many rows: as many as its tile of 16 rows has room for
        anyway, 4 at most, since the workspace grows with them
    split_len : positions of a split
    has_combine : whether a sequence can lie in more than one
    """

    query_rows: int
    split_len: int
    has_combine: bool


def splitting(num_heads: int, kv_num_heads: int, head_dim: int, limits: Limits) -> Splitting:
    """Return how a layer's Decode splits.

    raises : UnsupportedError for shapes that the kernels do not take
    """
    size = limits.tokens_per_block
    if size & (size - 1):
        raise UnsupportedError(
            f"the attention plugin takes KV blocks of a power of two positions, not {size}; build with "
            f"--tokens-per-block {1 << size.bit_length() - 1}"
        )
    try:
        attention = Attention("fp16", "same", num_heads, kv_num_heads, head_dim)
    except ValueError as error:
        raise UnsupportedError(
            f"the attention plugin cannot run this model: {error}; build it for cpu"
        ) from None
    rows = max(1, min(_MAX_QUERY_ROWS, _TILE_ROWS // attention.group))
    length = split_len(attention, limits.max_batch_size, limits.max_seq_len, query_rows=rows)
    return Splitting(rows, length, limits.max_blocks_per_seq * size > length)


def count_plugins(spec: DecoderSpec, limits: Limits) -> int:
    """Return how many plugin nodes a lowered graph has."""
    parts = splitting(spec.num_heads, spec.num_kv_heads, spec.head_dim, limits)
    return spec.num_layers * (4 if parts.has_combine else 3)
