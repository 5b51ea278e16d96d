"""The variants of PagedAttention's kernels: tiles by SM and head size, grids, workspace, a step's least work."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Literal

from ..kernel import Constant, Cost, Grid, Kernel

Dtype = Literal["fp16", "bf16"]
Kv = Literal["same", "fp8", "int8"]

MIN_SPLIT_LEN = 512
"""Positions of a split at least. Its partial result (8 * D + 16 bytes a head and row, written and read) is then 2 % of
a decode step's bytes with 4 heads a group over fp16 pools, 4 % over bytes; and 8 KV heads at 4096 positions make 64
programs a sequence, enough for 132 SMs from three sequences on."""

NO_WINDOW = 1 << 30  # `reach` where a row sees every position before it
_COMBINE_SPLITS = 16  # splits that `combine` adds at once


@dataclasses.dataclass(frozen=True)
class Attention:
    """One attention layer's shapes and types.

    kv : "same" pools hold dtype; "fp8" E4M3 codes in uint8, "int8" int8, both with k_scale and v_scale
    sm : the compute capability that tiles are chosen for; a kernel runs on any SM from its min_sm on
    """

    dtype: Dtype
    kv: Kv
    num_heads: int
    kv_num_heads: int
    head_dim: int
    has_softcap: bool = False
    sm: int = 80

    def __post_init__(self) -> None:
        if self.num_heads % self.kv_num_heads:
            raise ValueError(
                f"{self.num_heads} query heads over {self.kv_num_heads} KV heads; they must divide"
            )
        if not 16 <= self.head_dim <= 256 or self.head_dim % 8:
            raise ValueError(f"head size {self.head_dim}; the kernels take multiples of 8 within 16..256")

    @property
    def group(self) -> int:
        """Query heads that share a KV head."""
        return self.num_heads // self.kv_num_heads

    @property
    def padded_dim(self) -> int:
        """The head size as tl.dot takes it: a power of two."""
        return power_of_two(self.head_dim)

    @property
    def kv_bytes(self) -> int:
        """Bytes of one number in the pools."""
        return 2 if self.kv == "same" else 1


@dataclasses.dataclass(frozen=True)
class Tile:
    """M rows (heads times query rows) by N positions, and how the loop over positions runs."""

    m: int
    n: int
    num_warps: int
    num_stages: int


def decode_tile(attention: Attention, query_rows: int = 1) -> Tile:
    """Return decode's tile for up to query_rows rows a sequence.

    Memory bound: what counts is bytes under way. 64 positions of 128 fp16 numbers, K and V, are 32 KB a stage; two
    stages fit sm86's and sm89's 100 KB twice over with the tile of p, three fit a Hopper SM twice. 4 warps: more
    would share 16 rows of products with nothing to do.
    """
    m = max(16, power_of_two(attention.group * query_rows))
    row_bytes = attention.padded_dim * 2
    n = {128: 128, 256: 64, 512: 32}.get(row_bytes, 128)
    if m > 32:
        n = min(n, 64)
    if (
        attention.sm < 80
    ):  # no asynchronous copies: tiles come through registers, and loads that run ahead spill
        return Tile(m, n // 2, 4 if m <= 64 else 8, 1)
    return Tile(m, n, 4 if m <= 64 else 8, 3 if attention.sm in (90, 100, 103) else 2)


def prefill_tile(attention: Attention) -> Tile:
    """Return prefill's tile.

    Arithmetic bound. Hopper: 128 rows are two warp groups of 64, which wgmma needs; acc takes D / 2 registers a
    thread and 128 positions 64 for their scores: 254 of 255 registers at D = 128, so D = 256 halves the positions.
    Before Hopper mma reads its operands from registers: 128 rows over 8 warps share each K and V that was read, 64
    positions spill 8 bytes at D = 128, and 32 leave room for two programs in sm86's 100 KB. At D = 256 acc alone
    would be 128 registers: 64 rows; and decoded codes are whole tiles in registers, each warp its own copy: 32 rows
    over 4 warps are what does not spill.
    """
    m, num_warps = 128, 8
    if attention.sm in (90, 100, 103):
        n = 128 if attention.padded_dim <= 128 else 64
    elif attention.padded_dim <= 128:
        n = 64 if attention.padded_dim <= 64 else 32
    else:
        n = 32
        m, num_warps = (64, 8) if attention.kv == "same" else (32, 4)
    if attention.sm < 80:  # 64 KB of shared memory; it spills some 500 bytes there
        m, n, num_warps = (64, 32, 8) if attention.padded_dim <= 128 else (32, 16, 4)
    return Tile(max(m, power_of_two(attention.group)), n, num_warps, 1 if attention.sm < 80 else 2)


def decode_kernel(attention: Attention, query_rows: int = 1) -> Kernel:
    """Return the split kernel for sequences with up to query_rows rows."""
    tile = decode_tile(attention, query_rows)
    pointers = {"out": f"*{attention.dtype}:16", "partials": "*fp32:16", "stats": "*fp32:16"}
    numbers = (
        "query_rows",
        "split_len",
        "num_splits",
        "group",
        "num_kv_heads",
        "block_shift",
        "table_stride",
    )
    return _kernel(attention, "decode", tile, pointers, numbers)


def prefill_kernel(attention: Attention) -> Kernel:
    """Return the kernel for sequences with more rows than decode takes, or for all."""
    tile = prefill_tile(attention)
    pointers = {"out": f"*{attention.dtype}:16"}
    numbers = ("query_rows", "group", "num_kv_heads", "block_shift", "table_stride", "num_sequences")
    return _kernel(attention, "prefill", tile, pointers, numbers)


def combine_kernel(attention: Attention) -> Kernel:
    """Return the kernel that adds up the splits' partial results."""
    quantized = attention.kv != "same"
    signature = {
        "partials": "*fp32:16",
        "stats": "*fp32:16",
        "cu_query_lens": "*i32:16",
        "kv_lens": "*i32:16",
    }
    signature |= {"v_scale": "*fp32"} if quantized else {}
    signature |= {"out": f"*{attention.dtype}:16"}
    signature |= dict.fromkeys(("reach", "query_rows", "split_len", "num_splits"), "i32")
    constants: dict[str, Constant] = {"num_tokens": None}
    constants |= {} if quantized else {"v_scale": None}
    constants |= {"N": _COMBINE_SPLITS, "D": attention.head_dim, "DP": attention.padded_dim}
    return Kernel(
        op="paged_attention",
        name=f"attention_combine_{attention.dtype}_{'scaled' if quantized else 'same'}_d{attention.head_dim}",
        function="paged_attention.kernels:combine",
        signature=signature,
        constants=constants,
        num_warps=4,
        num_stages=2,
        min_sm=_min_sm(attention.dtype),
    )


def _kernel(
    attention: Attention, function: str, tile: Tile, outputs: Mapping[str, str], numbers: Sequence[str]
) -> Kernel:
    """Return a kernel over tiles: decode or prefill."""
    dtype, kv = attention.dtype, attention.kv
    pool = {"same": f"*{dtype}:16", "fp8": "*u8:16", "int8": "*i8:16"}[kv]
    signature = {"q": f"*{dtype}:16", "k_pool": pool, "v_pool": pool}
    signature |= dict.fromkeys(("cu_query_lens", "kv_lens", "block_table"), "*i32:16")
    constants: dict[str, Constant] = {"num_tokens": None, "num_blocks": None}
    if kv == "same":
        constants |= {"k_scale": None, "v_scale": None}
    else:
        signature |= {"k_scale": "*fp32", "v_scale": "*fp32"}
    signature |= {**outputs, "scale": "fp32"}
    if attention.has_softcap:
        signature["softcap"] = "fp32"
    else:
        constants["softcap"] = None
    signature |= dict.fromkeys(("reach", *numbers), "i32")
    constants |= {"M": tile.m, "N": tile.n, "D": attention.head_dim, "DP": attention.padded_dim, "KV": kv}
    name = f"attention_{function}_{dtype}_{kv}_d{attention.head_dim}"
    name += f"_m{tile.m}n{tile.n}w{tile.num_warps}s{tile.num_stages}"
    return Kernel(
        op="paged_attention",
        name=name + ("_cap" if attention.has_softcap else ""),
        function=f"paged_attention.kernels:{function}",
        signature=signature,
        constants=constants,
        num_warps=tile.num_warps,
        num_stages=tile.num_stages,
        min_sm=_min_sm(dtype),
    )


def split_len(
    attention: Attention,
    max_batch_size: int,
    max_seq_len: int,
    *,
    query_rows: int = 1,
    budget: int = 256 << 20,
) -> int:
    """Return the positions of an engine's splits: MIN_SPLIT_LEN, doubled until the workspace fits the budget (bytes).

    It decides bits (kernels.py), so it is chosen once for an engine and not by the step.
    """
    length = MIN_SPLIT_LEN
    while (
        length < max_seq_len
        and workspace_bytes(attention, max_batch_size, query_rows, -(-max_seq_len // length)) > budget
    ):
        length *= 2
    return length


def num_splits(table_width: int, block_size: int, split_len: int) -> int:
    """Return the splits to launch for block tables [B, table_width]; those behind a sequence's end return at once."""
    return max(1, -(-table_width * block_size // split_len))


def workspace_bytes(attention: Attention, batch_size: int, query_rows: int, num_splits: int) -> int:
    """Return the bytes of partials and stats together."""
    return batch_size * query_rows * attention.num_heads * num_splits * (attention.head_dim + 2) * 4


def decode_grid(attention: Attention, batch_size: int, num_splits: int) -> Grid:
    """Return decode's grid."""
    return (attention.kv_num_heads, batch_size, num_splits)


def combine_grid(attention: Attention, batch_size: int, query_rows: int) -> Grid:
    """Return combine's grid."""
    return (attention.num_heads, query_rows, batch_size)


def prefill_grid(
    attention: Attention, num_tokens: int, batch_size: int, kernel: Kernel | None = None
) -> Grid:
    """Return the grid of prefill's kernel, prefill_kernel's by default; it knows T and B, not the lengths."""
    rows = int((kernel or prefill_kernel(attention)).constants["M"] or 0) // attention.group
    return (attention.kv_num_heads, num_tokens // rows + batch_size, 1)


def guarded(kernel: Kernel) -> Kernel:
    """Return a kernel that also takes num_tokens and num_blocks, the last of its arguments that have None for them.

    It reads and writes nothing beyond its tensors whatever lengths and tables hold: TensorRT runs a plugin's kernel
    on numbers of its own when it builds a plan.
    """
    names = [name for name in ("num_tokens", "num_blocks") if name in kernel.constants]
    return dataclasses.replace(
        kernel,
        signature={**kernel.signature, **dict.fromkeys(names, "i32")},
        constants={name: value for name, value in kernel.constants.items() if name not in names},
    )


def with_constants(kernel: Kernel, suffix: str, **values: Constant) -> Kernel:
    """Return a kernel whose arguments of these names are compiled in, as a plugin does with what its layer knows."""
    unknown = values.keys() - kernel.signature.keys()
    if unknown:
        raise ValueError(f"{kernel.name} has no argument {', '.join(sorted(unknown))}")
    signature = {name: type_ for name, type_ in kernel.signature.items() if name not in values}
    constants = {**kernel.constants, **values}
    return dataclasses.replace(
        kernel, name=f"{kernel.name}_{suffix}", signature=signature, constants=constants
    )


def cost(attention: Attention, query_lens: Sequence[int], kv_lens: Sequence[int], window: int = 0) -> Cost:
    """Return a step's least: q and out once, each K and V that some row sees once, 4 * D operations a visible pair."""
    num_rows = seen = pairs = 0
    for rows, length in zip(query_lens, kv_lens, strict=True):
        if length == 0:
            continue
        past = length - rows
        num_rows += rows
        seen += length - (max(0, past - window + 1) if window else 0)
        pairs += sum(min(window or length, p + 1) for p in range(past, length))
    row_bytes = 2 * attention.num_heads * attention.head_dim * 2
    pool_bytes = 2 * attention.kv_num_heads * attention.head_dim * attention.kv_bytes
    operations = 4 * attention.head_dim * attention.num_heads * pairs
    return Cost(num_rows * row_bytes + seen * pool_bytes, operations)


def power_of_two(n: int) -> int:
    """Return the first power of two that is n or more."""
    return 1 << (n - 1).bit_length()


_SHOWN = (("fp16", 128, "same"), ("fp16", 128, "fp8"), ("fp16", 256, "same"), ("bf16", 128, "same"))


def catalog(sm: int = 80) -> list[Kernel]:
    """Return the kernels that are compiled ahead of time for an SM; decode for groups of up to 16 rows.

    Every combination for sm80 and sm90; elsewhere those that show whether the rest compile and fit, the largest among
    them: compiling all for all would take twice as long.
    """
    kernels = []
    dtypes: tuple[Dtype, ...] = ("fp16", "bf16") if sm >= 80 else ("fp16",)
    kinds: tuple[Kv, ...] = ("same", "fp8", "int8")
    for dtype in dtypes:
        for head_dim in (64, 128, 256):
            for kv in kinds:
                shown = (dtype, head_dim, kv) in _SHOWN
                if sm not in (80, 90) and not shown:
                    continue
                attention = Attention(dtype, kv, 8, 1, head_dim, sm=sm)
                kernels += [decode_kernel(attention), prefill_kernel(attention)]
                if kv != "int8":
                    kernels.append(combine_kernel(attention))
    return kernels


def _min_sm(dtype: Dtype) -> int:
    return 80 if dtype == "bf16" else 75
