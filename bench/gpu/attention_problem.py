"""Attention problems on a device: random pools with scattered blocks, and the answer in float64 for the small ones."""

from __future__ import annotations

import dataclasses

import torch
from bench_device import Device
from plansmith.plugins.paged_attention import run, spec

TORCH = {"fp16": torch.float16, "bf16": torch.bfloat16}
UNIT_ROUNDOFF = {"fp16": 2.0**-11, "bf16": 2.0**-8}


@dataclasses.dataclass(frozen=True)
class Case:
    """What a step asks of attention. query_lens and kv_lens: one each sequence; kv_len 0 is padding."""

    attention: spec.Attention
    query_lens: tuple[int, ...]
    kv_lens: tuple[int, ...]
    block_size: int = 64
    window: int = 0
    softcap: float = 0.0
    query_rows: int = 1
    split_len: int = spec.MIN_SPLIT_LEN

    def __str__(self) -> str:
        """Return the case in words."""
        a = self.attention
        text = f"{a.dtype}, {a.kv} KV, heads {a.num_heads}/{a.kv_num_heads} x {a.head_dim}, blocks of {self.block_size}"
        text += f", window {self.window}" if self.window else ""
        text += f", cap {self.softcap}" if self.softcap else ""
        return text + f", rows {self.query_rows}, splits of {self.split_len}"


class Problem:
    """Tensors of a case and its launch. One layer's pools; the blocks lie in random order."""

    def __init__(self, device: Device, case: Case, pool_blocks: int | None = None) -> None:
        """Make random inputs. `pool_blocks`: blocks of the pools, at least those that the case needs."""
        self.case, a = case, case.attention
        num_tokens, batch = sum(case.query_lens), len(case.kv_lens)
        widths = [-(-length // case.block_size) for length in case.kv_lens]
        self.num_blocks = max(pool_blocks or 0, sum(widths), 1)
        table = torch.full((batch, max(*widths, 1)), -1, dtype=torch.int32, device=device.name)
        order = device.permutation(self.num_blocks)
        at = 0
        for b, width in enumerate(widths):
            table[b, :width] = order[at : at + width]
            at += width
        self.block_table = table
        self.q = device.normal(num_tokens, a.num_heads * a.head_dim, dtype=TORCH[a.dtype])
        shape = (self.num_blocks, a.kv_num_heads, case.block_size, a.head_dim)
        self.k_pool, self.k_scale = _pool(device, a, shape)
        self.v_pool, self.v_scale = _pool(device, a, shape)
        cu = [0]
        for rows in case.query_lens:
            cu.append(cu[-1] + rows)
        self.cu_query_lens = torch.tensor(cu, dtype=torch.int32, device=device.name)
        self.kv_lens = torch.tensor(case.kv_lens, dtype=torch.int32, device=device.name)
        self.scale = a.head_dim**-0.5
        # What is not written stays NaN and shows.
        self.out = torch.full_like(self.q, float("nan"))
        splits = spec.num_splits(table.shape[1], case.block_size, case.split_len)
        self.workspace = run.allocate(a, batch, max(case.query_rows, 1), splits, device.name)
        self.has_prefill = any(rows > case.query_rows for rows in case.query_lens)

    def attend(self) -> torch.Tensor:
        """Launch the kernels; return out [T, H*D]."""
        case = self.case
        run.paged_attention(
            case.attention,
            self.q,
            self.k_pool,
            self.v_pool,
            self.cu_query_lens,
            self.kv_lens,
            self.block_table,
            self.out,
            scale=self.scale,
            softcap=case.softcap,
            window=case.window,
            k_scale=self.k_scale,
            v_scale=self.v_scale,
            query_rows=case.query_rows,
            split_len=case.split_len,
            workspace=self.workspace,
            has_prefill=self.has_prefill,
        )
        return self.out

    def cost(self) -> spec.Cost:
        """Return the least bytes and operations."""
        return spec.cost(self.case.attention, self.case.query_lens, self.case.kv_lens, self.case.window)

    def exact(self) -> torch.Tensor:
        """Return out [T, H*D] in float64, sequence by sequence; NaN where no row is written."""
        case, a = self.case, self.case.attention
        out = torch.full(self.q.shape, float("nan"), dtype=torch.float64, device=self.q.device)
        first = 0
        for b, (rows, length) in enumerate(zip(case.query_lens, case.kv_lens, strict=True)):
            if rows and length:
                q = self.q[first : first + rows].double().view(rows, a.kv_num_heads, a.group, a.head_dim)
                keys, values = self.held(b, length)
                scores = torch.einsum("rkgd,knd->rkgn", q, keys) * self.scale
                if case.softcap:
                    scores = case.softcap * torch.tanh(scores / case.softcap)
                seen = visible(rows, length, case.window).to(scores.device)
                weights = scores.masked_fill(~seen[:, None, None, :], float("-inf")).softmax(-1)
                out[first : first + rows] = torch.einsum("rkgn,knd->rkgd", weights, values).reshape(rows, -1)
            first += rows
        return out

    def held(self, b: int, length: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return sequence b's keys and values (KVH, length, D) float64, scales included."""
        num_blocks = -(-length // self.case.block_size)
        blocks = self.block_table[b, :num_blocks].long()
        pools = ((self.k_pool, self.k_scale), (self.v_pool, self.v_scale))
        pages = [(numbers(pool[blocks], self.case.attention.kv), scale) for pool, scale in pools]
        keys, values = (
            page.transpose(0, 1).flatten(1, 2)[:, :length] * (1.0 if scale is None else scale.double())
            for page, scale in pages
        )
        return keys, values


def visible(rows: int, length: int, window: int) -> torch.Tensor:
    """Return which positions [rows, length] each row sees; the rows are the last positions."""
    row = torch.arange(length - rows, length)[:, None]
    position = torch.arange(length)[None, :]
    return (position <= row) & (position > row - (window or length + 1))


def numbers(held: torch.Tensor, kv: str) -> torch.Tensor:
    """Return what a pool holds in float64, without its scale."""
    return (held.view(torch.float8_e4m3fn).float() if kv == "fp8" else held).double()


def relative_errors(got: torch.Tensor, want: torch.Tensor, head_dim: int) -> torch.Tensor:
    """Return |got - want| / |want| of each row and head; unwritten rows (NaN in both) have none."""
    got, want = got.double().view(-1, head_dim), want.view(-1, head_dim)
    unwritten = want.isnan().all(1) & got.isnan().all(1)
    error = (got - want).norm(dim=1) / want.norm(dim=1)
    return error.masked_fill(unwritten, 0.0)


def bound(dtype: str) -> float:
    """Return how large a row's relative error may be.

    The weights and the result are rounded to the type, each by at most a unit roundoff u of itself, so the error is
    below 2u of sums that are larger than the result by what cancels: twice that is allowed. float32 sums add 1e-5.
    """
    return 4 * UNIT_ROUNDOFF[dtype] + 5e-5


def _pool(
    device: Device, attention: spec.Attention, shape: tuple[int, ...]
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Return (pool, scale) with numbers of about 1 in it."""
    if attention.kv == "same":
        return device.normal(*shape, dtype=TORCH[attention.dtype]), None
    if attention.kv == "int8":
        codes = device.integers(-127, 128, *shape, dtype=torch.int8)
        return codes, torch.tensor(1 / 73, device=device.name)
    # Every code but the two NaNs, whose low seven bits are all ones.
    codes = device.integers(0, 127, *shape, dtype=torch.uint8)
    codes.bitwise_or_(device.integers(0, 2, *shape, dtype=torch.uint8).bitwise_left_shift_(7))
    return codes, torch.tensor(1 / 64, device=device.name)
