"""Names and meanings of the graph's inputs and outputs: part of the ABI, written into every manifest.

Dimensions: B sequences, T packed tokens, R rows with logits, H query heads, KVH KV heads, D head size,
V vocabulary, NB blocks of the pool, MB blocks of a sequence at most, BS positions in a block.
"""

from __future__ import annotations

VERSION = 1

OP_DOMAIN = "plansmith"
PAGED_ATTENTION = "PagedAttention"
"""plansmith::PagedAttention, version 1: writes the step's K and V into the pool, then attends.

inputs, in order
    q [T, H*D], k [T, KVH*D], v [T, KVH*D]      rotated already
    k_pool, v_pool [NB, KVH, BS, D]             like q; or FLOAT16 beside FLOAT q: the pools hold round(k), to nearest
                                                even, 65504 for what is beyond, infinities and NaN as they are
    cu_query_lens [B+1] int32                   sequence b's rows are cu[b]..cu[b+1]-1
    kv_lens [B] int32                           positions held after the step; the new ones are the last
    block_table [B, MB] int32                   block of each BS positions; unused entries -1
    k_scale, v_scale [] float32                 with FP8 or INT8 pools alone: the pools hold round(k / k_scale),
                                                saturated, and attention sees k_scale times that
outputs
    out [T, H*D], k_pool_out, v_pool_out        the pools alias their inputs
attributes
    num_heads, kv_num_heads, head_dim (int); scale (float, on q.k);
    softcap (float, 0 = none: s -> cap * tanh(s / cap)); window (int, 0 = all: p sees p-window+1..p)
"""

ROUND_INPUT = "RoundInput"
"""plansmith::RoundInput, version 1: a product's input rounded with scales taken from each token's own values.

input
    x [T, K]
    scale [] float32                            with format fp4 alone: the calibrated factor on the blocks' scales
output
    out [T, K]                                  like x
attributes
    format (string): int8, fp8 or fp4; group (int): columns that share a scale, 0 = all
int8, fp8: s = max|x| / 127 or 448 over a token's group; out = round(x / s) * s, round to nearest even (fp8: to E4M3);
    0 where s is 0
fp4: group is 16; s = e4m3(max|x| / (6 * scale)) * scale over a block; out = e2m1(x / s) * s; 0 where s is 0
"""

INPUT_IDS = "input_ids"  # [T] int32
POSITION_IDS = "position_ids"  # [T] int32
QUERY_LENS = "query_lens"  # [B] int32
KV_LENS = "kv_lens"  # [B] int32
CU_QUERY_LENS = "cu_query_lens"  # [B+1] int32
BLOCK_TABLE = "block_table"  # [B, MB] int32
LOGITS_ROWS = "logits_rows"  # [R] int32
LOGITS = "logits"  # [R, V] float32


PACKED_INPUTS = {
    INPUT_IDS: ("T",),
    POSITION_IDS: ("T",),
    QUERY_LENS: ("B",),
    KV_LENS: ("B",),
    CU_QUERY_LENS: ("B+1",),
    BLOCK_TABLE: ("B", "MB"),
    LOGITS_ROWS: ("R",),
}
"""The inputs of a packed step besides the pools, in order, with their dimensions; all are int32."""


def k_pool(layer: int) -> str:
    """Input name of a layer's K pool [NB, KVH, BS, D]."""
    return f"k_pool.{layer}"


def v_pool(layer: int) -> str:
    """Input name of a layer's V pool [NB, KVH, BS, D]."""
    return f"v_pool.{layer}"


def k_pool_out(layer: int) -> str:
    """Output name of a layer's K pool, bound to the memory of its input."""
    return f"k_pool_out.{layer}"


def v_pool_out(layer: int) -> str:
    """Output name of a layer's V pool, bound to the memory of its input."""
    return f"v_pool_out.{layer}"


def is_pool(name: str) -> bool:
    """Return whether an input is a layer's K or V pool."""
    return name.startswith(("k_pool.", "v_pool."))


def pool_out(name: str) -> str:
    """Return the output that a pool's input becomes."""
    return name.replace("_pool.", "_pool_out.")
