"""Names and shapes of a TensorRT-RTX plan's inputs and outputs: part of the ABI, written into the manifest.

A plan takes a rectangular step: B sequences of S rows each, T = B * S. A sequence with fewer than S new tokens has
its padding rows FIRST (right alignment), so that row s of sequence b is the token at position kv_lens[b] - S + s:
the mask needs no query lengths, and decode steps (S = 1) and lone prefill chunks (B = 1) have no padding at all.

What the executor supplies (step_inputs.py computes all of it):

    input_ids         [B, S] int32     padding rows: any valid token id (0)
    position_ids      [B, S] int32     padding rows: 0
    kv_lens           [B] int32        positions held after the step, at least 1
    block_table       [B, MB] int32    MB only as wide as the longest sequence of the step needs; unused entries
                                       repeat the sequence's first block (never -1: they are gathered)
    logits_rows       [R] int32        rows of the flattened [B * S], 1 to max_batch_size of them: a step that wants
                                       no logits asks for its last row and drops the result
    kv_token_order    [U] int32        flat rows of the U real tokens, sorted by (block, row in the block)
    kv_update_lengths [NB + 1] int32   cumulative number of tokens that go to each block of the pool, from 0 to U
    kv_write_starts   [NB] int32       first row of each block that is written, 0 for blocks that are not
    k_pool.N, v_pool.N [NB, KVH, BS, D]

Padding rows are not in kv_token_order, so nothing of them can reach a pool, and their outputs are never selected by
logits_rows. Pages past a sequence's end are replaced by zeros before they are used, so what an earlier owner left in
a block (even inf or NaN) cannot reach another sequence.

Outputs: logits [R, V] float32, and k_pool_out.N, v_pool_out.N, each bound to the memory of its input.
"""

from __future__ import annotations

import dataclasses
from typing import Any

from ...graph import contract as graph_contract
from ...limits import Limits
from ...spec import DecoderSpec

TOKEN_LAYOUT = "rectangular"
ROW_ALIGNMENT = "right"

KV_TOKEN_ORDER = "kv_token_order"  # [U] int32
KV_UPDATE_LENGTHS = "kv_update_lengths"  # [NB + 1] int32
KV_WRITE_STARTS = "kv_write_starts"  # [NB] int32

DOMAIN = "trt"
ATTENTION = "TRT_Attention"
KV_CACHE_UPDATE = "TRT_KVCacheUpdate"
FP4_DYNAMIC_QUANTIZE = "TRT_FP4DynamicQuantize"


@dataclasses.dataclass(frozen=True)
class TensorSpec:
    """One input or output: its name, its type ("int32", "float16", ...) and its dimensions, dynamic ones by name."""

    name: str
    dtype: str
    dims: tuple[int | str, ...]

    @property
    def shape(self) -> tuple[int, ...]:
        """The dimensions as TensorRT has them, -1 where dynamic."""
        return tuple(d if isinstance(d, int) else -1 for d in self.dims)


def plan_inputs(spec: DecoderSpec, limits: Limits, compute: str) -> list[TensorSpec]:
    """Return the inputs of a plan, in order; `compute` is the activations' and the pools' type."""
    rows = [
        TensorSpec(graph_contract.INPUT_IDS, "int32", ("B", "S")),
        TensorSpec(graph_contract.POSITION_IDS, "int32", ("B", "S")),
        TensorSpec(graph_contract.KV_LENS, "int32", ("B",)),
        TensorSpec(graph_contract.BLOCK_TABLE, "int32", ("B", "MB")),
        TensorSpec(graph_contract.LOGITS_ROWS, "int32", ("R",)),
        TensorSpec(KV_TOKEN_ORDER, "int32", ("U",)),
        TensorSpec(KV_UPDATE_LENGTHS, "int32", ("NB1",)),
        TensorSpec(KV_WRITE_STARTS, "int32", ("NB",)),
    ]
    return rows + _pools(spec, limits, compute, graph_contract.k_pool, graph_contract.v_pool)


def plan_outputs(spec: DecoderSpec, limits: Limits, compute: str) -> list[TensorSpec]:
    """Return the outputs of a plan, in order."""
    logits = TensorSpec(graph_contract.LOGITS, "float32", ("R", spec.vocab_size))
    return [logits, *_pools(spec, limits, compute, graph_contract.k_pool_out, graph_contract.v_pool_out)]


def _pools(spec: DecoderSpec, limits: Limits, compute: str, *names: Any) -> list[TensorSpec]:
    dims = ("NB", spec.num_kv_heads, limits.tokens_per_block, spec.head_dim)
    return [TensorSpec(name(n), compute, dims) for n in range(spec.num_layers) for name in names]
