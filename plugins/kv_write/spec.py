"""The variants of kv_write's kernel, its grid, the least that it moves."""

from __future__ import annotations

import dataclasses
from typing import Literal

from ..kernel import Constant, Cost, Grid, Kernel

Dtype = Literal["fp16", "bf16", "fp32"]
Kv = Literal["same", "fp8", "int8"]

_NUMBERS = 1024
"""Numbers of a program at most: 8 a thread of 4 warps, one load of 16 bytes in a 16-bit type."""


@dataclasses.dataclass(frozen=True)
class KvWrite:
    """One attention layer's shapes and types.

    kv : "same" pools hold dtype; "fp8" E4M3 codes in uint8, "int8" int8, both with k_scale and v_scale
    rotary_dim : columns of each head that are rotated, even; 0 = q and K come rotated, and q is no argument
    tables : type of cos and sin
    """

    dtype: Dtype
    kv: Kv
    num_heads: int
    kv_num_heads: int
    head_dim: int
    rotary_dim: int = 0
    tables: Dtype = "fp32"

    def __post_init__(self) -> None:
        if not 0 <= self.rotary_dim <= self.head_dim or self.rotary_dim % 2:
            raise ValueError(
                f"rotary_dim {self.rotary_dim} with head size {self.head_dim}; it must be even, at most that"
            )

    @property
    def heads(self) -> int:
        """Heads of a program, a power of two."""
        return max(1, min(_NUMBERS // power_of_two(self.head_dim), power_of_two(self.kv_num_heads)))


def kernel(write: KvWrite) -> Kernel:
    """Return the kernel."""
    dtype, rotary_dim, has_rope = write.dtype, write.rotary_dim, write.rotary_dim > 0
    pool = {"same": f"*{dtype}:16", "fp8": "*u8:16", "int8": "*i8:16"}[write.kv]
    types = {"q": f"*{dtype}:16"} if has_rope else {}
    types |= {"k": f"*{dtype}:16", "v": f"*{dtype}:16"}
    if has_rope:
        types |= {"cos": f"*{write.tables}:16", "sin": f"*{write.tables}:16", "position_ids": "*i32:16"}
    types |= {"cu_query_lens": "*i32:16", "kv_lens": "*i32:16", "block_table": "*i32:16"}
    if write.kv != "same":
        types |= {"k_scale": "*fp32", "v_scale": "*fp32"}
    types |= {"q_out": f"*{dtype}:16"} if has_rope else {}
    types |= {"k_pool": pool, "v_pool": pool, "num_sequences": "i32"}
    types |= {"num_heads": "i32"} if has_rope else {}
    types |= dict.fromkeys(("num_kv_heads", "block_shift", "table_stride"), "i32")
    optional = ("q", "cos", "sin", "position_ids", "k_scale", "v_scale", "q_out", "num_heads")
    constants: dict[str, Constant] = dict.fromkeys(name for name in optional if name not in types)
    constants["num_blocks"] = None
    rest = write.head_dim - rotary_dim
    constants |= {"HEADS": write.heads, "D": write.head_dim, "DP": power_of_two(write.head_dim)}
    constants |= {"RD": rotary_dim, "HALF": power_of_two(max(1, rotary_dim // 2))}
    constants |= {"REST": power_of_two(max(1, rest)), "KV": write.kv}
    rope = f"rope{rotary_dim}{'' if write.tables == 'fp32' else write.tables}" if has_rope else "norope"
    return Kernel(
        op="kv_write",
        name=f"kv_write_{dtype}_{write.kv}_d{write.head_dim}x{write.heads}_{rope}",
        function="kv_write.kernels:kv_write",
        signature=types,
        constants=constants,
        num_warps=max(1, min(4, write.heads * power_of_two(write.head_dim) // 256)),
        num_stages=2,
        min_sm=80 if "bf16" in (dtype, write.tables) else 75,
    )


def grid(write: KvWrite, num_tokens: int) -> Grid:
    """Return the grid; it knows T alone."""
    parts = -(-write.kv_num_heads // write.heads)
    if write.rotary_dim:
        parts += -(-write.num_heads // write.heads)
    return (num_tokens, parts, 1)


def cost(write: KvWrite, num_tokens: int) -> Cost:
    """Return a step's least: each number read and written once, 3 operations a rotated one."""
    size = 4 if write.dtype == "fp32" else 2
    pool_size = size if write.kv == "same" else 1
    kv_numbers = num_tokens * write.kv_num_heads * write.head_dim
    num_bytes = 2 * kv_numbers * (size + pool_size)
    operations = 0
    if write.rotary_dim:
        num_bytes += 2 * num_tokens * write.num_heads * write.head_dim * size
        num_bytes += num_tokens * write.rotary_dim * (4 if write.tables == "fp32" else 2)
        operations = 3 * num_tokens * (write.num_heads + write.kv_num_heads) * write.rotary_dim
    return Cost(num_bytes, operations)


def power_of_two(n: int) -> int:
    """Return the first power of two that is n or more."""
    return 1 << (n - 1).bit_length()


def catalog(sm: int = 80) -> list[Kernel]:
    """Return the kernels to compile ahead of time: without rope, as the plugin takes it, and with, at size 128."""
    dtypes: tuple[Dtype, ...] = ("fp16", "bf16") if sm >= 80 else ("fp16",)
    kinds: tuple[Kv, ...] = ("same", "fp8", "int8")
    writes = [KvWrite(dtype, kv, 32, 8, dim) for dtype in dtypes for kv in kinds for dim in (64, 128, 256)]
    writes += [KvWrite(dtype, kv, 32, 8, 128, 128) for dtype in dtypes for kv in kinds if kv != "int8"]
    return [kernel(write) for write in writes]
