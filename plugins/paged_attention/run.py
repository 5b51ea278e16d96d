"""PagedAttention's reads on torch tensors: what kv_write has put into the pools, attended to."""

from __future__ import annotations

import dataclasses
from typing import Any

from ..torch_launch import launch
from . import spec
from .spec import Attention


@dataclasses.dataclass(frozen=True)
class Workspace:
    """Partial results of decode (kernels.py); as large as the largest step needs, used again by every layer."""

    partials: Any
    stats: Any


def allocate(
    attention: Attention, batch_size: int, query_rows: int, num_splits: int, device: Any
) -> Workspace:
    """Return a workspace for steps of up to batch_size sequences; a smaller step uses its beginning."""
    import torch

    slots = batch_size * query_rows * attention.num_heads * num_splits
    return Workspace(
        torch.empty(slots * attention.head_dim, dtype=torch.float32, device=device),
        torch.empty(slots * 2, dtype=torch.float32, device=device),
    )


def paged_attention(
    attention: Attention,
    q: Any,
    k_pool: Any,
    v_pool: Any,
    cu_query_lens: Any,
    kv_lens: Any,
    block_table: Any,
    out: Any,
    *,
    scale: float,
    softcap: float = 0.0,
    window: int = 0,
    k_scale: Any = None,
    v_scale: Any = None,
    query_rows: int = 1,
    split_len: int = spec.MIN_SPLIT_LEN,
    workspace: Workspace | None = None,
    has_prefill: bool = True,
) -> None:
    """Write out [T, H*D] for one step over pools that hold its K and V already, without waiting for a GPU.

    q : [T, H*D]; pools [NB, KVH, BS, D], BS a power of two; the rest as in builder/graph/contract.py, all contiguous
    k_scale, v_scale : [] float32 with attention.kv "fp8" and "int8"
    query_rows : sequences with up to this many rows are split over the context (decode), 0 = none
    split_len : positions of a split, spec.split_len's: a multiple of decode's tile
    workspace : allocate()'s for this step's B, table and query_rows; None = allocated here
    has_prefill : False where no sequence has more than query_rows rows, which saves a launch
    """
    batch_size, table_width = block_table.shape
    block_size = k_pool.shape[2]
    if block_size & (block_size - 1):
        raise ValueError(f"block size {block_size}; the kernels take powers of two")
    shared: dict[str, Any] = {"cu_query_lens": cu_query_lens, "kv_lens": kv_lens, "out": out}
    shared |= {"reach": window or spec.NO_WINDOW, "query_rows": query_rows}
    read: dict[str, Any] = {"q": q, "k_pool": k_pool, "v_pool": v_pool, "block_table": block_table}
    read |= {"scale": scale, "group": attention.group, "num_kv_heads": attention.kv_num_heads}
    read |= {"block_shift": block_size.bit_length() - 1, "table_stride": table_width}
    if attention.kv != "same":
        read |= {"k_scale": k_scale, "v_scale": v_scale}
    if attention.has_softcap:
        read["softcap"] = softcap
    if query_rows:
        tile = spec.decode_tile(attention, query_rows).n
        if split_len % tile:
            raise ValueError(f"splits of {split_len} positions; they must be whole tiles of {tile}")
        splits = spec.num_splits(table_width, block_size, split_len)
        work = workspace or allocate(attention, batch_size, query_rows, splits, q.device)
        partial = {
            "partials": work.partials,
            "stats": work.stats,
            "split_len": split_len,
            "num_splits": splits,
        }
        kernel = spec.decode_kernel(attention, query_rows)
        launch(kernel, spec.decode_grid(attention, batch_size, splits), {**shared, **read, **partial})
        if splits > 1:
            scales = {} if attention.kv == "same" else {"v_scale": v_scale}
            kernel = spec.combine_kernel(attention)
            launch(
                kernel, spec.combine_grid(attention, batch_size, query_rows), {**shared, **partial, **scales}
            )
    if has_prefill:
        grid = spec.prefill_grid(attention, q.shape[0], batch_size)
        launch(spec.prefill_kernel(attention), grid, {**shared, **read, "num_sequences": batch_size})
