"""kv_write on torch tensors."""

from __future__ import annotations

from typing import Any

from ..torch_launch import launch
from . import spec
from .spec import KvWrite


def kv_write(
    write: KvWrite,
    k: Any,
    v: Any,
    k_pool: Any,
    v_pool: Any,
    cu_query_lens: Any,
    kv_lens: Any,
    block_table: Any,
    *,
    q: Any = None,
    q_out: Any = None,
    cos: Any = None,
    sin: Any = None,
    position_ids: Any = None,
    k_scale: Any = None,
    v_scale: Any = None,
) -> None:
    """Write a step's K and V into the pools, and with write.rotary_dim q rotated into q_out, without waiting for a GPU.

    k, v : [T, KVH*D]; pools [NB, KVH, BS, D], BS a power of two; the rest as in builder/graph/contract.py
        all are contiguous
    q, q_out : [T, H*D]; q_out None = in place
    cos, sin : [P, rotary_dim / 2]; position_ids : [T] int32
    k_scale, v_scale : [] float32 with write.kv "fp8" and "int8"
    """
    batch_size, table_width = block_table.shape
    block_size = k_pool.shape[2]
    if block_size & (block_size - 1):
        raise ValueError(f"block size {block_size}; the kernels take powers of two")
    arguments = {
        "k": k,
        "v": v,
        "cu_query_lens": cu_query_lens,
        "kv_lens": kv_lens,
        "block_table": block_table,
    }
    arguments |= {"k_pool": k_pool, "v_pool": v_pool, "num_sequences": batch_size}
    arguments |= {"num_kv_heads": write.kv_num_heads, "block_shift": block_size.bit_length() - 1}
    arguments |= {"table_stride": table_width}
    if write.kv != "same":
        arguments |= {"k_scale": k_scale, "v_scale": v_scale}
    if write.rotary_dim:
        arguments |= {"q": q, "q_out": q if q_out is None else q_out, "num_heads": write.num_heads}
        arguments |= {"cos": cos, "sin": sin, "position_ids": position_ids}
    launch(spec.kernel(write), spec.grid(write, k.shape[0]), arguments)
