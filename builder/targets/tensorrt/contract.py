"""Names and shapes of a TensorRT plan's inputs and outputs, and the plugin nodes of its graph.

A plan takes packed steps: what builder/graph/contract.py lists, except query_lens, which nothing in it reads. The pools
are inputs and outputs, k_pool_out.N and v_pool_out.N each bound to the memory of its input.

A quickly deployable plugin launches one kernel, so plansmith::PagedAttention is a chain of nodes, of the namespace
"plansmith" and version 1; num_heads, kv_num_heads, head_dim, scale, softcap and window mean what they mean in that op::

    KvWrite(k, v, k_pool, v_pool, STEP, k_scale, v_scale) -> k_pool_out, v_pool_out
    PagedAttentionDecode(q, k_pool_out, v_pool_out, STEP, k_scale, v_scale) -> out [T, H*D], partials, stats
    PagedAttentionCombine(out, partials, stats, cu_query_lens, kv_lens, v_scale) -> out
    PagedAttentionPrefill(out, q, k_pool_out, v_pool_out, STEP, k_scale, v_scale) -> out

STEP is cu_query_lens, kv_lens, block_table. An output of the name of an input is written in place. Decode attends for
the sequences with 1..query_rows rows, Prefill for those with more; neither touches the other's rows of out. Decode
takes a sequence's context in splits of split_len positions; one that lies in several leaves partials
[B, query_rows, H, S, D] and stats [B, query_rows, H, S, 2] float32, S = MB * BS / split_len rounded up, which Combine
puts together. A plan whose longest sequence fits in one split has no Combine. With pools of floats the scales are 1 and
not read.
"""

from __future__ import annotations

from typing import Any

from ...graph import contract as graph_contract
from ...limits import Limits
from ...spec import DecoderSpec
from ..rtx.contract import TensorSpec

TOKEN_LAYOUT = "packed"
ROW_ALIGNMENT = "none"

NAMESPACE = "plansmith"
VERSION = "1"
KV_WRITE = "KvWrite"
DECODE = "PagedAttentionDecode"
COMBINE = "PagedAttentionCombine"
PREFILL = "PagedAttentionPrefill"
PLUGINS = (KV_WRITE, DECODE, COMBINE, PREFILL)

STEP_INPUTS: dict[str, tuple[str, ...]] = {
    name: dims for name, dims in graph_contract.PACKED_INPUTS.items() if name != graph_contract.QUERY_LENS
}
"""The inputs besides the pools, in order, with their dimensions; all are int32."""


def plan_inputs(spec: DecoderSpec, limits: Limits, kv_type: str) -> list[TensorSpec]:
    """Return the inputs of a plan, in order; `kv_type` is the pools', e.g. "float16" or "float8_e4m3fn"."""
    step = [TensorSpec(name, "int32", dims) for name, dims in STEP_INPUTS.items()]
    return step + _pools(spec, limits, kv_type, graph_contract.k_pool, graph_contract.v_pool)


def plan_outputs(spec: DecoderSpec, limits: Limits, kv_type: str) -> list[TensorSpec]:
    """Return the outputs of a plan, in order."""
    logits = TensorSpec(graph_contract.LOGITS, "float32", ("R", spec.vocab_size))
    return [logits, *_pools(spec, limits, kv_type, graph_contract.k_pool_out, graph_contract.v_pool_out)]


def _pools(spec: DecoderSpec, limits: Limits, kv_type: str, *names: Any) -> list[TensorSpec]:
    dims = ("NB", spec.num_kv_heads, limits.tokens_per_block, spec.head_dim)
    return [TensorSpec(name(n), kv_type, dims) for n in range(spec.num_layers) for name in names]
